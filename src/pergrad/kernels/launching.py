"""What every launcher needs: a kernel that is launched fast, and tensors as kernels can read them."""

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

# The interpreter multiplies bfloat16 as if it were integers: there, and only there, kernels widen first.
INTERPRETED: bool = triton_internals.is_interpreted()
MULTIPROCESSORS = 132  # of the GPU that costs were fitted on; others have the same order of choices
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Kernel:
    """A jitted kernel, launched by what was compiled for an earlier call like this one.

    Triton's own launch reads all arguments in Python, to find what it has compiled: 110 µs a call on the host
    of an H200, longer than most kernels run. Here a call is told by its device, its tensors' types and
    alignment, its numbers and its settings: never by less than what Triton compiles anew for. Hooks that are
    to see every launch, as Triton's profiler has them, see the first of each.
    """

    most = 1000  # calls to tell apart, after which it begins again

    def __init__(self, jitted: Any) -> None:
        self._jitted = jitted
        name = getattr(jitted, "__name__", "a kernel")
        self._compiled: Cache[tuple[Any, list[Any]]] = Cache(
            __name__, f"what `{name}` was compiled to, by call", most=self.most
        )

    def __call__(
        self, programs: int, first: Tensor, *others: Tensor | int, **settings: Any
    ) -> None:
        """Run so many programs; `settings` are the kernel's last arguments, and Triton's options."""
        arguments = (first, *others)
        if INTERPRETED:
            self._jitted[(programs,)](*arguments, **settings)
            return
        device = first.get_device()
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(programs, first, *others, **settings)
            return
        told_by = [a if type(a) is int else (a.dtype, a.data_ptr() % 16) for a in arguments]  # type: ignore[union-attr]
        key = (device, *told_by, *settings.items())
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
    """How float32 numbers are multiplied: in three products of TensorFloat-32, which err by 3e-7.

    Exactly, on the slower units, where `torch.backends.cuda.matmul.fp32_precision = "ieee"` asks for it.
    """
    asked = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return "ieee" if asked == "ieee" else "tf32x3"


def precision_of(dtype: torch.dtype) -> Precision:
    """The same for products of that type, of which only float32 has a choice."""
    return float32_precision() if dtype == torch.float32 else "tf32x3"


def same_dtype(*tensors: Tensor) -> list[Tensor]:
    """All in the widest of their types: a product takes two of a kind."""
    dtype = reduce(promoted, [t.dtype for t in tensors])
    return [t if t.dtype is dtype else t.to(dtype) for t in tensors]


MemoryPlace = tuple[int, torch.Size, tuple[int, ...]]  # address, shape and strides of a tensor


def places(tensors: Sequence[Tensor]) -> tuple[MemoryPlace, ...]:
    """Where tensors lie: all that a plan of a launch depends on, beside their types."""
    return tuple([(t.data_ptr(), t.shape, t.stride()) for t in tensors])


# A function of places, which are the same from step to step: to make a plan takes longer than to launch it.
def cached_by_place(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps the plans that a function of places makes."""
    return cached("plans of launches, by where their tensors lie", most=1000)(function)


def with_aligned_rows(tensors: list[Tensor]) -> tuple[list[Tensor], tuple[MemoryPlace, ...]]:
    """All (n, t, d), of one type, with rows that begin where wide loads can; and where they lie.

    Those that have none are copied, which costs less than narrow loads.
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
    """Pairs of blocks of positions, mirrored ones once."""
    blocks = -(-positions // block)
    return blocks * (blocks + 1) // 2


def power_of_two(size: int, low: int, high: int) -> int:
    """The next power of two, within bounds that are powers of two."""
    return max(low, min(high, 1 << (size - 1).bit_length() if size > 1 else 1))
