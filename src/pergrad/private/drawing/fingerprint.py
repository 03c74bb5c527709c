"""Fingerprints a data set, to see that a run resumes with the same one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from pergrad.private.drawing.streams import seeded

__all__ = ["fingerprint_of"]

_SMALL, _PROBES = 1024, 256  # samples that are read of data sets that keep them elsewhere


def fingerprint_of(dataset: Any, size: int) -> str:
    """Hashes the type, the length, the tensors that a data set holds, and samples of it: all of
    1,024 and less, 256 of more.

    Samples that are different each time they are read are left out.
    """
    digest = hashlib.sha256()
    _add_dataset(digest, dataset, size)
    return digest.hexdigest()


def _add_dataset(digest: Any, dataset: Any, size: int) -> None:
    digest.update(f"{type(dataset).__qualname__} {size};".encode())
    if isinstance(dataset, list | tuple):
        _add(digest, dataset)
        return
    held = vars(dataset) if hasattr(dataset, "__dict__") else {}
    for name in sorted(held):
        _add_held(digest, name, held[name], size)
    if isinstance(dataset, Subset):
        _add(digest, [*dataset.indices])
    if isinstance(dataset, TensorDataset | Subset):
        return  # all that it has is hashed
    places = [*range(size)]
    if size > _SMALL:
        places = sorted({round(k * (size - 1) / (_PROBES - 1)) for k in range(_PROBES)})
    for place in places:
        # Two seeds: a random augmentation differs between them.
        once, again = (_of_sample(dataset, place, bytes([k]) * 12) for k in (1, 2))
        if once == again:
            digest.update(once)


def _add_held(digest: Any, name: str, value: Any, size: int) -> None:
    """Adds tensors, arrays and data sets that a data set holds, and columns with an entry for each sample.

    Other attributes may change as a data set is used, such as a cache or a count.
    """
    if isinstance(value, Tensor) or hasattr(value, "__array_interface__"):
        digest.update(f"{name}:".encode())
        _add(digest, value)
    elif isinstance(value, Dataset) and hasattr(value, "__len__"):
        digest.update(f"{name}:".encode())
        _add_dataset(digest, value, len(value))
    elif isinstance(value, list | tuple) and value and _all_parts(value):
        for number, item in enumerate(value):
            _add_held(digest, f"{name} {number}", item, size)
    elif isinstance(value, Mapping):  # columns by name, as tokenizers return
        for key in value:
            column = value[key]
            is_scalar = isinstance(column, Tensor) and not column.dim()
            if hasattr(column, "__len__") and not is_scalar and len(column) == size:
                _add_held(digest, f"{name} {key}", column, size)
    elif isinstance(value, list | tuple) and len(value) == size > 0:
        told = _json_of(value)
        if told is not None:
            digest.update(f"{name}:".encode())
            digest.update(told)


def _json_of(column: list[Any] | tuple[Any, ...]) -> bytes | None:
    """Returns labels, texts, paths or tokens as JSON; None where an entry is none of these."""
    try:
        return "\n".join(map(json.dumps, column)).encode()
    except (TypeError, ValueError):
        return None


def _all_parts(values: Any) -> bool:
    return all(isinstance(v, Tensor | Dataset) or hasattr(v, "__array_interface__") for v in values)


def _of_sample(dataset: Any, place: int, seed: bytes) -> bytes:
    digest = hashlib.sha256()
    with seeded(seed):
        _add(digest, dataset[place])
    return digest.digest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)};".encode())
        whole = value.detach().cpu().contiguous()
        if whole.numel():
            digest.update(whole.view(-1).view(torch.uint8).numpy(force=True).tobytes())
    elif isinstance(value, Mapping):
        for name in value:
            digest.update(f"{name}:".encode())
            _add(digest, value[name])
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)};".encode())
        for item in value:
            _add(digest, item)
    elif hasattr(value, "tobytes"):  # an array or a picture
        digest.update(value.tobytes())
    elif isinstance(value, str | bytes | int | float | bool | None):
        digest.update(f"{value!r};".encode())
    else:
        digest.update(type(value).__qualname__.encode())  # its repr may hold an address
