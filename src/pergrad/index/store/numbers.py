"""Stores rows in half precision without overflow: a power of two for each row and checkpoint."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from pergrad.errors import IndexingError

__all__ = [
    "StoredDtype",
    "as_arrays",
    "as_stored",
    "bytes_each",
    "checked_dtype",
    "encoded",
    "from_stored",
    "type_on_disk",
    "unscaled",
]

StoredDtype = Literal["float16", "bfloat16", "float32", "float64"]
_ON_DISK = {
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float32": np.float32,
    "float64": np.float64,
}


def checked_dtype(dtype: str) -> StoredDtype:
    """Returns the dtype if rows can be stored in it."""
    if dtype not in get_args(StoredDtype):
        allowed = ", ".join(get_args(StoredDtype))
        raise IndexingError(f"rows are stored as one of {allowed}, got dtype={dtype!r}")
    return dtype  # type: ignore[return-value]


def type_on_disk(dtype: StoredDtype) -> np.dtype[Any]:
    """Returns the type of the numbers in files: bfloat16 as its bits."""
    return np.dtype(_ON_DISK[dtype])


def bytes_each(dtype: StoredDtype) -> int:
    """Returns the bytes of one number."""
    return int(type_on_disk(dtype).itemsize)


def encoded(rows: Tensor, dtype: StoredDtype) -> tuple[Tensor, Tensor]:
    """Returns the rows of one checkpoint, (n, k), in the dtype that is stored, and the scale of each, (n,).

    A row is divided by a power of two so that its largest entry lies within 0.5 to 1: gradients of 1e-9 and
    of 1e9 keep their digits in half precision. Rows that are not finite are stored as NaN. Runs on the device
    of the rows, and waits for nothing.

    >>> encoded(torch.tensor([[3.0, -6.0]]), "float16")
    (tensor([[ 0.3750, -0.7500]], dtype=torch.float16), tensor([8.]))
    """
    rows = rows.detach()
    rows = rows if rows.dtype == torch.float64 else rows.float()
    if dtype in ("float32", "float64"):
        return rows.to(getattr(torch, dtype)), torch.ones(len(rows), device=rows.device)
    largest = rows.abs().amax(1) if rows.numel() else rows.new_zeros(len(rows))
    is_finite = torch.isfinite(largest)
    exponent = torch.frexp(torch.where(is_finite, largest, 0)).exponent.clamp(-126, 127)
    # By its bits: a GPU's `pow` may round.
    scale = ((exponent.int() + 127) << 23).view(torch.float32)
    scaled = torch.where(is_finite[:, None], rows / scale[:, None], torch.nan)
    return scaled.to(getattr(torch, dtype)), scale


def as_arrays(stored: Tensor, scale: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Returns encoded rows and scales on the CPU as the arrays that are written."""
    stored = stored.cpu()
    stored = stored.view(torch.uint16) if stored.dtype == torch.bfloat16 else stored
    return stored.numpy(), scale.cpu().numpy()


def as_stored(rows: Tensor, dtype: StoredDtype) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of one checkpoint, (n, k), as they are written, and the scale of each, (n,)."""
    return as_arrays(*encoded(rows, dtype))


def from_stored(values: np.ndarray, dtype: StoredDtype) -> Tensor:
    """Returns what was written as a tensor of its own dtype, without a copy."""
    if dtype == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def unscaled(values: np.ndarray, scale: np.ndarray, dtype: StoredDtype) -> Tensor:
    """Returns rows of all checkpoints, (n, c, k), in float32 or wider, from (n, c·k) and scales (n, c)."""
    wide = torch.float64 if dtype == "float64" else torch.float32
    apart = from_stored(values, dtype).to(wide).view(len(values), scale.shape[1], -1)
    return apart * torch.from_numpy(np.asarray(scale)).to(wide)[:, :, None]
