"""Launches compiled kernels directly, and prepares tensors for wide loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from pergrad.runtime import promoted, triton_internals
from pergrad.runtime.caches import Cache, cached

__all__ = [
    "INTERPRETED",
    "MULTIPROCESSORS",
    "TYPES",
    "Kernel",
    "MemoryPlace",
    "Precision",
    "cached_by_place",
    "float32_precision",
    "pair_count",
    "places",
    "power_of_two",
    "precision_of",
    "same_dtype",
    "with_aligned_rows",
]

P = ParamSpec("P")
R = TypeVar("R")
Precision = Literal["tf32x3", "ieee"]

# Triton's interpreter multiplies bfloat16 as if it were integers; only there do kernels widen first.
INTERPRETED: bool = triton_internals.is_interpreted()
MULTIPROCESSORS = 132  # of an H200, where costs were fitted; the ranking is the same on other GPUs
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Kernel:
    """Launches a jitted kernel from a cache of compiled ones.

    Triton's own launch inspects all arguments in Python to find the compiled kernel: 110 µs per call on the
    host of an H200, longer than most kernels run. The key here is the device, dtypes and alignment of the
    tensors, integers and settings, which includes all that Triton specialises on. Launch hooks, as Triton's
    profiler has them, see only the first call of each key.
    """

    most = 1000  # entries; the cache starts over when it is full

    def __init__(self, jitted: Any) -> None:
        self._jitted = jitted
        name = getattr(jitted, "__name__", "a kernel")
        self._compiled: Cache[tuple[Any, list[Any]]] = Cache(
            __name__, f"compiled kernels of `{name}`, by call", most=self.most
        )

    def __call__(
        self, programs: int, first: Tensor, *others: Tensor | int, **settings: Any
    ) -> None:
        """Runs `programs` programs; `settings` are the kernel's last arguments and Triton's options."""
        arguments = (first, *others)
        if INTERPRETED:
            self._jitted[(programs,)](*arguments, **settings)
            return
        device = first.get_device()
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(programs, first, *others, **settings)
            return
        arguments_key = [a if type(a) is int else (a.dtype, a.data_ptr() % 16) for a in arguments]  # type: ignore[union-attr]
        key = (device, *arguments_key, *settings.items())
        known = self._compiled.get(key)
        if known is not None:
            compiled, constants = known
            triton_internals.launch(compiled, device, programs, arguments, constants)
            return
        compiled = self._jitted[(programs,)](*arguments, **settings)
        if isinstance(compiled, triton_internals.CompiledKernel):
            constants = [settings[name] for name in self._jitted.arg_names[len(arguments) :]]
            self._compiled.put(key, (compiled, constants))


def float32_precision() -> Precision:
    """Returns the precision of float32 products: three products of TensorFloat-32, with an error of 3e-7.

    With `torch.backends.cuda.matmul.fp32_precision = "ieee"`, products are exact and slower.
    """
    asked = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return "ieee" if asked == "ieee" else "tf32x3"


def precision_of(dtype: torch.dtype) -> Precision:
    """Returns the precision of products of a dtype; only float32 has a choice."""
    return float32_precision() if dtype == torch.float32 else "tf32x3"


def same_dtype(*tensors: Tensor) -> list[Tensor]:
    """Casts all tensors to the widest of their dtypes, since `tl.dot` takes operands of one dtype."""
    dtype = reduce(promoted, [t.dtype for t in tensors])
    return [t if t.dtype is dtype else t.to(dtype) for t in tensors]


MemoryPlace = tuple[int, torch.Size, tuple[int, ...]]  # address, shape and strides of a tensor


def places(tensors: Sequence[Tensor]) -> tuple[MemoryPlace, ...]:
    """Returns addresses, shapes and strides: with the dtypes, all that the plan of a launch depends on."""
    return tuple([(t.data_ptr(), t.shape, t.stride()) for t in tensors])


# Places repeat from step to step, and making a plan takes longer than launching it.
def cached_by_place(function: Callable[P, R]) -> Callable[P, R]:
    """Caches the plans that a function makes from places."""
    return cached("plans of launches, by the places of their tensors", most=1000)(function)


def with_aligned_rows(tensors: list[Tensor]) -> tuple[list[Tensor], tuple[MemoryPlace, ...]]:
    """Aligns the rows of tensors, (n, t, d) of one dtype, for wide loads; returns them and their places.

    Copies tensors that are not aligned, which costs less than narrow loads.
    """
    at = places(tensors)
    aligned = _are_aligned(at, tensors[0].dtype)
    if all(aligned):
        return tensors, at
    tensors = [
        t if is_aligned else _copy_with_aligned_rows(t)
        for t, is_aligned in zip(tensors, aligned, strict=True)
    ]
    return tensors, places(tensors)


@cached_by_place
def _are_aligned(at: tuple[MemoryPlace, ...], dtype: torch.dtype) -> list[bool]:
    return [
        of_columns == 1
        and address % 16 == 0
        and not (of_samples | of_rows | width) % (16 // dtype.itemsize)
        for address, (_, _, width), (of_samples, of_rows, of_columns) in at
    ]


def _copy_with_aligned_rows(t: Tensor) -> Tensor:
    n, rows, width = t.shape
    copy = t.new_zeros(n, rows, width + -width % (16 // t.dtype.itemsize))
    copy[..., :width] = t
    return copy


def pair_count(positions: int, block: int) -> int:
    """Counts unordered pairs of blocks of positions: (a, b) and (b, a) count once."""
    blocks = -(-positions // block)
    return blocks * (blocks + 1) // 2


def power_of_two(size: int, low: int, high: int) -> int:
    """Returns the next power of two, within bounds that are powers of two."""
    return max(low, min(high, 1 << (size - 1).bit_length() if size > 1 else 1))
