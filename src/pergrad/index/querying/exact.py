"""Computes products of whole gradients for a few candidates, to rank them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pergrad.audit.streaming.loading import Loader, drawing_from
from pergrad.audit.subject.spec import Spec
from pergrad.index.preconditioning.base import OnGradients, OnRows
from pergrad.index.querying.queries import refuse_other_query, size_of
from pergrad.index.querying.scoring import Best
from pergrad.index.rows.computing import RowMaker
from pergrad.quantities import Gram

__all__ = ["exact_scores", "ranked_again"]

_BATCH = 64


def exact_scores(
    spec: Spec,
    maker: RowMaker,
    batch: tuple[Any, ...],
    preconditioners: Sequence[OnRows | OnGradients] | None,
    indices: np.ndarray,
) -> Tensor:
    """Returns the exact scores of some samples of the data for each query, (q, samples) in float64."""
    count = size_of(batch)
    loader = Loader(spec, indices, 0)
    total = torch.zeros(count, len(indices), dtype=torch.float64)
    for number, model in enumerate(maker.models):
        with refuse_other_query(), drawing_from(0, 0):
            whole = maker.gradients(number, batch, count)
        if preconditioners is not None:
            own = preconditioners[number]
            assert isinstance(own, OnGradients)
            whole = own.applied(whole)
        for start in range(0, len(indices), _BATCH):
            loaded = loader.load(start, min(start + _BATCH, len(indices)))
            gram = Gram(against=whole)
            with drawing_from(0, start):
                maker.run(model, maker.arguments(loaded.arguments), [gram], loaded.count)
            total[:, start : loaded.stop] += gram.result.T.double().cpu()
    return total / len(maker.models)


def ranked_again(
    best: Best, exact: Tensor, place: Mapping[int, int], k: int, *, largest: bool
) -> Best:
    """Returns the k best candidates by their exact scores; `place` is the column of each row."""
    columns = torch.tensor([[place[row] for row in rows] for rows in best.rows.tolist()])
    scores, order = exact.gather(1, columns).sort(dim=1, descending=largest, stable=True)
    return Best(best.rows.gather(1, order)[:, :k], scores[:, :k])
