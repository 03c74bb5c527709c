"""What every launcher needs: to be an operation of torch, and tables of problems for one launch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import chain
from typing import Any, Literal, TypeVar, cast

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pergrad.factors import is_traced

__all__ = [
    "INTERPRETED",
    "MULTIPROCESSORS",
    "TYPES",
    "Precision",
    "aligned_rows",
    "float32_precision",
    "operation",
    "pair_count",
    "power_of_two",
    "same_dtype",
    "table_of",
]

Precision = Literal["tf32x3", "ieee"]
Launch = TypeVar("Launch", bound=Callable[..., Any])

# The interpreter multiplies bfloat16 as if it were integers: there, and only there, kernels widen first.
INTERPRETED = bool(triton.knobs.runtime.interpret)
MULTIPROCESSORS = 132  # of the GPU that costs were fitted on; others have the same order of choices
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def operation(name: str, result: Callable[..., Any]) -> Callable[[Launch], Launch]:
    """Makes a launcher `torch.ops.pergrad.<name>`, which a compiled step calls; `result` gives its shape.

    Outside of a trace the launcher is called as it is: a dispatch costs more than the launch.
    """

    def register(launch: Launch) -> Launch:
        op: Any = torch.library.custom_op(
            f"pergrad::{name}",
            launch,
            mutates_args=(),
            tags=(torch.Tag.flexible_layout,),  # whatever strides the compiler has chosen
        )
        op.register_fake(result)

        @wraps(launch)
        def call(*arguments: Any) -> Any:
            first = arguments[0]
            traced = is_traced(first if isinstance(first, Tensor) else first[0])
            return op(*arguments) if traced else launch(*arguments)

        return cast(Launch, call)

    return register


def float32_precision() -> Precision:
    """How float32 numbers are multiplied: in three products of TensorFloat-32, which err by 3e-7.

    Exactly, on the slower units, where `torch.backends.cuda.matmul.fp32_precision = "ieee"` asks for it.
    """
    asked = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return "ieee" if asked == "ieee" else "tf32x3"


def same_dtype(*tensors: Tensor) -> list[Tensor]:
    """All in the widest of their types: a product takes two of a kind."""
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    return [t.to(dtype) for t in tensors]


def aligned_rows(x: Tensor) -> Tensor:
    """With rows that begin where wide loads can: else a copy, which costs less than narrow loads."""
    alignment = 16 // x.element_size()
    of_samples, of_rows, of_columns = x.stride()
    width = x.shape[2]
    is_aligned = of_columns == 1 and x.data_ptr() % 16 == 0
    if is_aligned and not (of_samples | of_rows | width) % alignment:
        return x
    return F.pad(x, (0, -width % alignment)).contiguous()


def table_of(problems: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Addresses, sizes and strides of several problems, a row each, for one launch to read."""
    numbers = array("q", chain.from_iterable(problems))
    table = torch.frombuffer(numbers, dtype=torch.int64).view(len(problems), -1)
    return table.to(device, non_blocking=True)


def pair_count(positions: int, block: int) -> int:
    """Pairs of blocks of positions, mirrored ones once."""
    blocks = -(-positions // block)
    return blocks * (blocks + 1) // 2


def power_of_two(size: int, low: int, high: int) -> int:
    """The next power of two, within bounds that are powers of two."""
    return max(low, min(high, 1 << (size - 1).bit_length() if size > 1 else 1))
