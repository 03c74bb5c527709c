"""Fingerprints a model and a data set, to check that an audit resumes with the same ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from pergrad.audit.streaming.loading import drawing_from, item_of
from pergrad.audit.subject.sharding import structure_of
from pergrad.audit.subject.texts import as_text
from pergrad.distributed.placing import is_sharded, whole_of
from pergrad.errors import AuditError

__all__ = [
    "DIGITS",
    "add_values",
    "checksum_of_model",
    "fingerprint_of_data",
    "fingerprint_of_model",
]

_PROBES = 128  # items hashed of a data set that is not made of tensors
DIGITS = 16


def fingerprint_of_model(model: nn.Module) -> str:
    """Hashes the structure, the mode, which parameters are trained, and every value.

    A sharded model has the fingerprint of the whole one. All its processes call this together, and gather
    one parameter after the other.
    """
    digest = hashlib.sha256(structure_of(model).encode())
    for name, module in model.named_modules():
        digest.update(f"{name} {module.training};".encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tensor.requires_grad} ".encode())
        add_values(digest, whole_of(tensor.detach()))
    return digest.hexdigest()[:DIGITS]


def checksum_of_model(model: nn.Module) -> str:
    """Sums the bits of every tensor: as fast as memory, to see whether the models of all ranks are equal.

    Tensors with the same numbers in another order have the same checksum, but not the same fingerprint. Each
    process has other shards of a sharded parameter, which are left out.
    """
    digest = hashlib.sha256(repr(model).encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_whole = tensor.layout == torch.strided and not is_sharded(tensor)
        total = _sum_of_bits(tensor.detach()) if is_whole else 0
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {total};".encode())
    return digest.hexdigest()[:DIGITS]


def _sum_of_bits(tensor: Tensor) -> int:
    """Adds up the tensor's bytes, eight at a time."""
    if not tensor.numel():
        return 0
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    raw = raw.clone() if raw.storage_offset() % 8 else raw
    whole = len(raw) // 8 * 8
    return int(raw[:whole].view(torch.int64).sum()) + int(raw[whole:].sum(dtype=torch.int64))


def fingerprint_of_data(dataset: Any, seed: int) -> tuple[str, bool]:
    """Hashes the type, the length, and every value of a data set made of tensors, else 128 items.

    Also returns whether the items are the same each time they are read. Items that use a random generator of
    their own are not, and are left out of the fingerprint.
    """
    digest = hashlib.sha256(f"{type(dataset).__qualname__} {len(dataset)} ".encode())
    if _add_whole(digest, dataset):
        return digest.hexdigest()[:DIGITS], True
    once, again = (_of_probes(dataset, seed) for _ in range(2))
    if once == again:
        digest.update(once)
    return digest.hexdigest()[:DIGITS], once == again


def _add_whole(digest: Any, dataset: Any) -> bool:
    """Adds the whole data set if its values can be read at once; returns whether they can."""
    if type(dataset) is TensorDataset:
        for tensor in dataset.tensors:
            add_values(digest, tensor)
        return True
    if type(dataset) is Subset:
        digest.update(repr(list(dataset.indices)).encode())
        return _add_whole(digest, dataset.dataset)
    of_hugging_face = getattr(dataset, "_fingerprint", None)
    if isinstance(of_hugging_face, str) and type(dataset).__module__.startswith("datasets."):
        digest.update(of_hugging_face.encode())
        return True
    return False


def _of_probes(dataset: Any, seed: int) -> bytes:
    size = len(dataset)
    digest = hashlib.sha256()
    with drawing_from(seed, size):
        for index in sorted({round(at) for at in np.linspace(0, size - 1, min(size, _PROBES))}):
            try:
                add_values(digest, item_of(dataset, index))
            except AuditError as error:  # an item that cannot be read, which the audit skips
                digest.update(as_text(error).encode())
    return digest.digest()


def add_values(digest: Any, value: Any) -> None:
    """Adds the values in an item; of unknown objects, the type."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value if value.layout == torch.strided else value.to_dense()).contiguous()
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy() if value.numel() else b"")
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        for key, part in value.items():
            digest.update(as_text(f"{key}=").encode())
            add_values(digest, part)
    elif isinstance(value, list | tuple):
        digest.update(f"[{len(value)}]".encode())
        for part in value:
            add_values(digest, part)
    elif isinstance(value, int | float | complex | str | bytes | bool | None):
        digest.update(repr(value).encode())
    elif hasattr(value, "tobytes"):  # a PIL image
        digest.update(value.tobytes())
    else:
        digest.update(type(value).__qualname__.encode())
