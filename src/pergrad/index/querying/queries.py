"""Turns a query into rows: its gradients at each checkpoint, preconditioned and projected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pergrad.audit.streaming.loading import drawing_from
from pergrad.audit.subject.places import told
from pergrad.errors import AuditError, IndexingError
from pergrad.index.preconditioning.base import OnGradients, OnRows
from pergrad.index.rows.computing import RowMaker
from pergrad.index.subject import Subject, in_eval_mode

__all__ = ["as_batch", "prepared", "query_rows", "refuse_other_query", "size_of"]


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
    with refuse_other_query(), drawing_from(seed, 0):
        plain = torch.stack(maker.rows(batch, count).rows, 1).cpu()
        if preconditioners is None:
            return plain, plain
        found = []
        for number, preconditioner in enumerate(preconditioners):
            if isinstance(preconditioner, OnRows):
                found.append(preconditioner.applied(plain[:, number]))
            else:
                whole = preconditioner.applied(maker.gradients(number, batch, count))
                found.append(maker.projector.projected(whole).cpu())
        return torch.stack([rows.to(plain) for rows in found], 1), plain


@contextmanager
def refuse_other_query() -> Iterator[None]:
    """Explains errors of the loss within the block as those of a query that does not fit."""
    try:
        yield
    except AuditError as error:
        raise IndexingError(
            f"the query does not fit the model and loss of this index: {error}"
        ) from error


def prepared(query: Any, subject: Subject, maker: RowMaker) -> tuple[Any, ...]:
    """Returns a query as the arguments of the loss.

    A text, or a list of texts, is tokenized. Inputs without targets, of data whose items have one, get the
    class that the model predicts: the samples that made it say so are looked for.
    """
    if isinstance(query, str):
        query = [query]
    if isinstance(query, list) and query and all(isinstance(text, str) for text in query):
        return as_batch(_of_texts(query, subject))
    batch = as_batch(query)
    item = subject.spec.dataset[0] if len(subject.spec.dataset) else None
    if not isinstance(item, tuple | list) or len(batch) != len(item) - 1:
        return batch
    target = item[-1]
    is_class = isinstance(target, int) or (
        isinstance(target, Tensor) and target.dim() == 0 and not target.is_floating_point()
    )
    if not is_class:
        raise IndexingError(
            "the query has no target, and the model cannot predict one, because the targets of the data are "
            "not classes: pass the batch as the loss takes it, such as (x, y)"
        )
    model = maker.models[-1]
    with refuse_other_query(), torch.no_grad(), in_eval_mode([model]):
        try:
            logits = model(*maker.arguments(batch))
        except Exception as error:
            raise AuditError(f"the model raised {told(error)}") from error
    logits = logits if isinstance(logits, Tensor) else logits.logits
    is_one = logits.dim() == 1 or logits.shape[1] == 1
    return (*batch, (logits.flatten() > 0).long() if is_one else logits.argmax(1))


def _of_texts(texts: list[str], subject: Subject) -> Any:
    if subject.tokenizer is not None:
        return subject.tokenizer(texts, return_tensors="pt", padding=True)
    spec = subject.spec
    first = spec.dataset[0] if len(spec.dataset) else None
    if spec.collate is not None and isinstance(first, str):
        return spec.collate(texts)
    if spec.collate is not None and isinstance(first, Mapping):
        names = [name for name, value in first.items() if isinstance(value, str)]
        if names:
            return spec.collate([{**first, names[0]: text} for text in texts])
    raise IndexingError(
        "a query that is a text needs tokenizer=, called as tokenizer(texts, return_tensors='pt', "
        "padding=True)"
    )
