"""Fingerprints a data set, to see that a run resumes with the same one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from pergrad.private.drawing.streams import seeded

__all__ = ["fingerprint_of"]

_SMALL, _PROBES = 1024, 256  # samples that are read of data sets that keep them elsewhere


def fingerprint_of(dataset: Any, size: int) -> str:
    """Hashes the type, the length, all tensors, tables and columns that a data set holds, and samples of it:
    all of 1,024 and less, 256 of more.

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
            is_column = hasattr(column, "__len__") and not is_scalar and len(column) == size
            if is_column or isinstance(column, Mapping):
                _add_held(digest, f"{name} {key}", column, size)
    elif isinstance(value, list | tuple) and len(value) == size > 0:
        digest.update(f"{name}:".encode())
        told = _json_of(value)
        if told is not None:
            digest.update(told)
        else:
            _add(digest, value)
    elif hasattr(value, "to_numpy") and hasattr(value, "iloc"):  # of pandas
        digest.update(f"{name} {[*getattr(value, 'columns', [])]}:".encode())
        _add(digest, value.to_numpy())
    elif hasattr(value, "combine_chunks") and hasattr(value, "slice"):
        digest.update(f"{name}:".encode())
        _add_table(digest, value)


def _add_table(digest: Any, table: Any) -> None:
    """Adds a table of Arrow, as Hugging Face data sets hold one, whatever its chunks are."""
    table = getattr(table, "table", table)  # of the package datasets
    digest.update(f"{table.schema.remove_metadata()}".encode())
    for start in range(0, len(table), _SMALL):
        for part in table.slice(start, _SMALL).combine_chunks().to_batches():
            digest.update(memoryview(part.serialize()))


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
        if value.layout is not torch.strided:
            _add(digest, _parts_of(value))
            return
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
        if getattr(getattr(value, "dtype", None), "kind", "") == "O":  # its bytes are addresses
            _add(digest, value.tolist())
        else:
            digest.update(value.tobytes())
    elif isinstance(value, os.PathLike):
        digest.update(f"{os.fspath(value)!r};".encode())
    elif isinstance(value, str | bytes | int | float | bool | None):
        digest.update(f"{value!r};".encode())
    else:
        digest.update(type(value).__qualname__.encode())  # its repr may hold an address


def _parts_of(sparse: Tensor) -> list[Tensor]:
    """Returns the strided tensors that a sparse tensor consists of."""
    if sparse.layout is torch.sparse_coo:
        whole = sparse.coalesce()
        return [whole.indices(), whole.values()]
    if sparse.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [sparse.crow_indices(), sparse.col_indices(), sparse.values()]
    if sparse.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [sparse.ccol_indices(), sparse.row_indices(), sparse.values()]
    return [*sparse.unbind()]  # nested
