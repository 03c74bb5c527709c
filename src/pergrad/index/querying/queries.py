"""Turns a query into rows: its gradients at each checkpoint, preconditioned and projected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pergrad.audit.streaming.loading import drawing_from
from pergrad.errors import AuditError, IndexingError
from pergrad.index.preconditioning.base import OnGradients, OnRows
from pergrad.index.rows.computing import RowMaker

__all__ = ["as_batch", "query_rows", "size_of"]


def as_batch(query: Any) -> tuple[Any, ...]:
    """Returns a query as the arguments of the loss: a tuple, or one argument such as a tensor or a dict.

    >>> as_batch([1, 2]), as_batch({"x": 1})
    ((1, 2), ({'x': 1},))
    """
    return tuple(query) if isinstance(query, tuple | list) else (query,)


def size_of(batch: tuple[Any, ...]) -> int:
    """Returns the number of samples in a batch: the length of its first tensor."""
    for part in batch:
        if isinstance(part, Tensor) and part.dim():
            return len(part)
        if isinstance(part, Mapping):
            found = [value for value in part.values() if isinstance(value, Tensor) and value.dim()]
            if found:
                return len(found[0])
    raise IndexingError(
        "the query holds no tensor with a row for each input: pass a batch as the loss takes it, such as (x, "
        "y)"
    )


def query_rows(
    maker: RowMaker,
    batch: tuple[Any, ...],
    preconditioners: Sequence[OnRows | OnGradients] | None,
    *,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Returns preconditioned rows of the queries at each checkpoint, and plain ones, both (q, c, k)."""
    count = size_of(batch)
    try:
        with drawing_from(seed, 0):
            plain = torch.stack(maker.rows(batch, count).rows, 1).cpu()
            if preconditioners is None:
                return plain, plain
            found = []
            for number, preconditioner in enumerate(preconditioners):
                if isinstance(preconditioner, OnRows):
                    found.append(preconditioner.applied(plain[:, number]))
                else:
                    gradients = maker.gradients(number, batch, count)
                    found.append(maker.projector.projected(preconditioner.applied(gradients)).cpu())
            return torch.stack([rows.to(plain) for rows in found], 1), plain
    except AuditError as error:
        raise IndexingError(
            f"the query does not fit the model and loss of this index: {error}"
        ) from error
