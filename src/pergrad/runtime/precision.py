"""Multiplies low-precision tensors with accumulation and results in a wider dtype; controls autocast."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.runtime import internals
from pergrad.runtime.allocation import large_result

__all__ = [
    "HALVES",
    "autocast_state",
    "bmm",
    "cast_as_autocast",
    "current_autocast",
    "in_dtype",
    "least_trusted",
    "mm",
    "promoted",
    "wide",
    "with_aligned_width",
    "without_autocast",
]

_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
HALVES = (torch.bfloat16, torch.float16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to accumulate in: float32, or float64 for float64; complex for a complex one."""
    if dtype in _WIDE:
        return dtype
    return torch.complex64 if dtype.is_complex else torch.float32


def in_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts a tensor; `to` is slow even if there is nothing to do."""
    return t if t.dtype is dtype else t.to(dtype)


def least_trusted(dtype: torch.dtype) -> float:
    """Threshold of abs(sum) / norm(terms) below which cancellation dominates."""
    return 1e4 * torch.finfo(dtype).eps


def promoted(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Returns the promoted dtype, without a call into torch if both are the same."""
    return dtype if dtype is other else torch.promote_types(dtype, other)


class without_autocast:  # noqa: N801  # a context manager, as in contextlib
    """Disables autocast within the block: a backward under autocast must not cast its products.

    `torch.autocast(enabled=False)` takes ten times as long, and this runs for every function of every step.
    """

    __slots__ = ("_device", "_is_on")

    def __init__(self, device: torch.device) -> None:
        self._device = device.type

    def __enter__(self) -> None:
        is_any_on = internals.is_any_autocast_enabled()  # some devices have no autocast to ask
        self._is_on = is_any_on and torch.is_autocast_enabled(self._device)
        if self._is_on:
            torch.set_autocast_enabled(self._device, False)

    def __exit__(self, *_: object) -> None:
        if self._is_on:
            torch.set_autocast_enabled(self._device, True)


def autocast_state(device: str) -> tuple[bool, torch.dtype]:
    """Returns whether autocast is enabled for a device type, and its dtype."""
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def current_autocast(device: str) -> Callable[[], torch.autocast]:
    """Returns a factory of contexts that restore the present autocast settings.

    Their cache of casts is off: a cast made within must not be reused outside.
    """
    is_on, dtype = autocast_state(device)
    return lambda: torch.autocast(device, dtype, enabled=is_on, cache_enabled=False)


def cast_as_autocast(t: Tensor) -> Tensor:
    """Casts a tensor as autocast does for a product; float64 and integers stay as they are."""
    dtype = t.dtype
    if dtype == torch.float64 or not dtype.is_floating_point:
        return t
    is_on, wanted = autocast_state(t.device.type)
    return t.to(wanted) if is_on and dtype is not wanted else t


def with_aligned_width(x: Tensor) -> Tensor:
    """Pads the last dimension with zeros to a multiple of 8, where a GPU multiplies several times as fast."""
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if x.is_cuda and x.dtype in HALVES and missing else x


def bmm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A @ b, (n, p, q) @ (n, q, s), accumulated and returned in `dtype`."""
    if _supports_out_dtype(a, b, dtype):
        return torch.bmm(a, b, out_dtype=dtype)
    a, b = in_dtype(a, dtype), in_dtype(b, dtype)
    return torch.bmm(a, b, out=large_result((a.shape[0], a.shape[1], b.shape[2]), a))


def mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A @ b, (p, q) @ (q, s), accumulated and returned in `dtype`."""
    if _supports_out_dtype(a, b, dtype):
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(in_dtype(a, dtype), in_dtype(b, dtype))


def _supports_out_dtype(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch multiplies these matrices with an `out_dtype`: halves to float32 on a GPU."""
    is_half = a.dtype == b.dtype and a.dtype in HALVES
    return a.is_cuda and is_half and dtype == torch.float32
