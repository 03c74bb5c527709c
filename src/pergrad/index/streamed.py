"""Scores all samples without a store: one pass over the data against preconditioned queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pergrad.audit.streaming.loading import Loader, drawing_from
from pergrad.audit.streaming.stream import batches_in
from pergrad.audit.subject.spec import Spec
from pergrad.errors import IndexingError
from pergrad.index.options import IndexOptions
from pergrad.index.preconditioning.choosing import (
    Kind,
    Preconditioning,
    fit_preconditioners,
    loaded_from,
)
from pergrad.index.preconditioning.fitting import FitData, Labels
from pergrad.index.querying.queries import as_batch, refuse_other_query, size_of
from pergrad.index.rows.computing import RowMaker
from pergrad.index.subject import in_eval_mode, made_subject
from pergrad.quantities import Gram

__all__ = ["scores_without_store"]


def scores_without_store(
    model: Spec | nn.Module,
    dataset: Any = None,
    batch: Any = None,
    loss: Any = None,
    *,
    preconditioner: Kind | None = "none",
    damping: float | None = None,
    ridge: float = 0.0,
    labels: Labels = "given",
    optimizer: Any = None,
    checkpoints: Sequence[Any] = (),
    batch_size: int = 64,
    seed: int = 0,
    device: str | None = None,
    say: Callable[[str], None] = lambda _: None,
    **spec: Any,
) -> Tensor:
    """Returns the scores of all samples of a data set for each query, (queries, samples), and writes nothing.

    Nothing is projected: whole gradients of the queries are held, and each sample's gradient is multiplied
    with them as it is computed. Scores are those of an index with `projection="none"`.

    Args:
        model: the model, or a `pergrad.audit.Spec`.
        dataset: the data set; None with a spec.
        batch: the queries, as the loss takes them.
        loss: called as loss(model, *batch); inferred by default.
        preconditioner: "ekfac", "adam", "gauss_newton" or "none". The second moment of rows needs an index.
        damping: as of `Index.build`.
        ridge: as of `Index.build`.
        labels: as of `Index.build`.
        optimizer: as of `Index.build`.
        checkpoints: earlier states of the model.
        batch_size: samples per batch.
        seed: random seed for random draws of the model and the data set.
        device: such as "cpu"; by default a GPU if there is one.
        say: receives what is inferred.
        spec: other fields of the spec.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> x, y = torch.eye(3), torch.arange(3)
    >>> model = torch.nn.Linear(3, 3)
    >>> scores_without_store(model, TensorDataset(x, y), (x[:2], y[:2])).shape
    torch.Size([2, 3])
    """
    chosen = Preconditioning(preconditioner or "none", damping, ridge, labels)
    if chosen.kind == "second_moment":
        raise IndexingError(
            "preconditioner='second_moment' needs rows, and none are stored here: build an index, or take "
            "preconditioner='ekfac'"
        )
    subject = made_subject(model, dataset, loss, checkpoints=checkpoints, say=say, **spec)
    placed = subject.placed(IndexOptions(device=device, seed=seed))
    # The count sketch is never used: the maker needs some projection, and this one is cheap to make.
    maker = RowMaker(placed.models, subject.spec.loss, "count", 1, seed)
    indices = np.arange(len(subject.spec.dataset), dtype=np.int64)
    loader = Loader(subject.spec, indices, seed, strict=True)
    spans = batches_in([(0, len(indices))], batch_size)

    def batches() -> Any:
        for loaded in loader.batches(spans, 0):
            yield loaded.start, maker.arguments(loaded.arguments), loaded.count

    with in_eval_mode(placed.models), TemporaryDirectory() as folder:
        fit_preconditioners(Path(folder), chosen, FitData(maker, batches, seed), optimizer)
        preconditioners = loaded_from(Path(folder), chosen, placed.models)
        queries = as_batch(batch)
        count = size_of(queries)
        total = torch.zeros(count, len(indices), dtype=torch.float64)
        for number, own in enumerate(placed.models):
            with refuse_other_query(), drawing_from(seed, 0):
                whole = maker.gradients(number, queries, count)
            if preconditioners is not None:
                whole = preconditioners[number].applied(whole)
            for start, arguments, size in batches():
                gram = Gram(against=whole)
                with drawing_from(seed, start):
                    maker.run(own, arguments, [gram], size)
                total[:, start : start + size] += gram.result.T.double().cpu()
        return total / len(placed.models)
