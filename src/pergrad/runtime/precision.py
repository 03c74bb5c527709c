"""Products of low-precision tensors that are summed up, and given, in a wider type."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.runtime import internals
from pergrad.runtime.allocation import large_result

__all__ = [
    "autocast_state",
    "bmm",
    "cast_as_autocast",
    "current_autocast",
    "least_trusted",
    "mm",
    "promoted",
    "wide",
    "with_aligned_width",
    "without_autocast",
]

_HALVES = (torch.bfloat16, torch.float16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to sum up in: float32, or float64 where the numbers have that."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def least_trusted(dtype: torch.dtype) -> float:
    """Of its terms' length as a vector: a sum that is less has cancelled, and their rounding errors show."""
    return 1e4 * torch.finfo(dtype).eps


def promoted(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    """The type that holds the numbers of both; torch is not asked where they are the same."""
    return dtype if dtype is other else torch.promote_types(dtype, other)


class without_autocast:  # noqa: N801  # a context manager, as in contextlib
    """Within, products are in the types of their factors: what a backward inside of autocast must see to.

    Autocast's own way to switch itself off takes ten times as long, for every function of every step.
    """

    __slots__ = ("_device", "_is_on")

    def __init__(self, device: torch.device) -> None:
        self._device = device.type

    def __enter__(self) -> None:
        is_any_on = internals.is_any_autocast_enabled()  # not every device has it
        self._is_on = is_any_on and torch.is_autocast_enabled(self._device)
        if self._is_on:
            torch.set_autocast_enabled(self._device, False)

    def __exit__(self, *_: object) -> None:
        if self._is_on:
            torch.set_autocast_enabled(self._device, True)


def autocast_state(device: str) -> tuple[bool, torch.dtype]:
    """Whether autocast is on for a type of device, and the type that it casts to."""
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def current_autocast(device: str) -> Callable[[], torch.autocast]:
    """Makes contexts in which functions run under the autocast settings of now.

    They keep no casts of weights: a cast that is made within must not be met outside.
    """
    is_on, dtype = autocast_state(device)
    return lambda: torch.autocast(device, dtype, enabled=is_on, cache_enabled=False)


def cast_as_autocast(t: Tensor) -> Tensor:
    """Casts a tensor as autocast is about to cast it for a product: not float64, and no integers."""
    dtype = t.dtype
    if dtype == torch.float64 or not dtype.is_floating_point:
        return t
    is_on, wanted = autocast_state(t.device.type)
    return t.to(wanted) if is_on and dtype is not wanted else t


def with_aligned_width(x: Tensor) -> Tensor:
    """Pads the last dimension with zeros to a multiple of 8, where a GPU multiplies several times as fast."""
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if x.is_cuda and x.dtype in _HALVES and missing else x


def bmm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A @ b, (n, p, q) @ (n, q, s), in `dtype`: never rounded to less on the way."""
    if _gives_directly(a, b, dtype):
        return torch.bmm(a, b, out_dtype=dtype)
    a = a if a.dtype == dtype else a.to(dtype)
    b = b if b.dtype == dtype else b.to(dtype)
    return torch.bmm(a, b, out=large_result((a.shape[0], a.shape[1], b.shape[2]), a))


def mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A @ b, (p, q) @ (q, s), in `dtype`: never rounded to less on the way."""
    if _gives_directly(a, b, dtype):
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))


def _gives_directly(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether the GPU's own product of two low-precision matrices can be had in float32."""
    is_half = a.dtype == b.dtype and a.dtype in _HALVES
    return a.is_cuda and is_half and dtype == torch.float32
