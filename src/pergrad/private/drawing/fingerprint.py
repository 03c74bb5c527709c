"""Fingerprints a data set, to see that a run resumes with the same one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from pergrad.private.drawing.streams import seeded

__all__ = ["fingerprint_of"]

_PROBES = 16


def fingerprint_of(dataset: Any, size: int) -> str:
    """Hashes the type, the length and the tensors of a data set, or a few samples where it has none.

    Samples that are different each time they are read are left out.
    """
    digest = hashlib.sha256(f"{type(dataset).__qualname__} {size};".encode())
    if isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            _add(digest, tensor)
        return digest.hexdigest()
    places = sorted({round(k * (size - 1) / (_PROBES - 1)) for k in range(_PROBES)}) if size else []
    for place in places:
        # Two seeds: a random augmentation differs between them.
        once, again = (_of_sample(dataset, place, bytes([k]) * 12) for k in (1, 2))
        if once == again:
            digest.update(once)
    return digest.hexdigest()


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
        for item in value:
            _add(digest, item)
    elif hasattr(value, "tobytes"):  # an array or a picture
        digest.update(value.tobytes())
    elif isinstance(value, str | bytes | int | float | bool | None):
        digest.update(f"{value!r};".encode())
    else:
        digest.update(type(value).__qualname__.encode())  # its repr may hold an address
