"""Asks an index: prepares queries with its model, searches its rows, ranks and shows what is found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pergrad.audit.subject.inferring import inferred_show
from pergrad.errors import IndexingError
from pergrad.index.attaching import Attached, attached, referred, remembered
from pergrad.index.curating import is_count
from pergrad.index.preconditioning.choosing import Preconditioning, loaded_preconditioners
from pergrad.index.preconditioning.second_moment import lengths_of
from pergrad.index.querying.approximate import Coarse
from pergrad.index.querying.exact import exact_scores, ranked_again
from pergrad.index.querying.matches import Matches, Preview, previews_of
from pergrad.index.querying.queries import prepared, query_rows
from pergrad.index.querying.scoring import Best, best_of
from pergrad.index.store.store import Store
from pergrad.index.subject import Subject, in_eval_mode

__all__ = ["Asking"]


class Asking:
    """A finished store, and the model that queries of it run with once they are asked for."""

    def __init__(self, store: Store, subject: Subject | None = None) -> None:
        store.refuse_unfinished()
        self.store = store
        self.subject = subject
        self._models: Attached | None = None
        self._loaded: tuple[Any, Any] | None = None  # preconditioners, and what they depend on

    def attached(self) -> Attached:
        """Returns the models that queries run with; refuses others than the index was built with."""
        path = self.store.path
        if self.subject is None:
            # Of what is remembered, the data may be gone; a reference finds all of it.
            self.subject = referred(self.store.manifest) or remembered(path)
        if self.subject is None:
            raise IndexingError(
                f"the index {path} was opened without its model: pass it as Index(path, model, dataset, "
                "loss), or a spec as Index(path, spec)"
            )
        if self._models is None or not self._models.is_current():
            self._models = attached(self.store, self.subject)
        return self._models

    @property
    def preconditioning(self) -> Preconditioning:
        return Preconditioning(**self.store.manifest.preconditioner)

    def _preconditioners(self, models: Sequence[nn.Module]) -> Any:
        chosen, store = self.preconditioning, self.store
        key = (chosen, len(store), store.manifest.generation, len(store.deleted))
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = (key, loaded_preconditioners(store, chosen, models))
        return self._loaded[1]

    def queries(self, query: Any) -> tuple[Tensor, np.ndarray | None]:
        """Returns preconditioned rows of the queries, (q, c, k), and lengths to divide scores of rows by."""
        attached = self.attached()
        maker = attached.maker
        if not len(self.store):
            raise IndexingError(
                f"the index {self.store.path} holds no rows, as all of its samples were deleted or could not "
                "be read: append some, or build another one"
            )
        with in_eval_mode(maker.models):
            preconditioners = self._preconditioners(maker.models)
            batch = prepared(query, attached.subject, maker)
            queries, plain = query_rows(maker, batch, preconditioners)
        _refuse_unfinite(queries)
        chosen = self.preconditioning
        if not chosen.unit_norm:
            return queries, None
        own = (queries * plain).sum(2, keepdim=True).clamp(min=0).sqrt()
        lengths = self.store.derived(
            "lengths", lambda: lengths_of(self.store, preconditioners), **chosen.as_json()
        )
        return queries / own.clamp(min=torch.finfo(own.dtype).tiny), lengths.numpy()

    def query(self, batch: Any, k: int, *, approximate: bool, rerank: int | None) -> Matches:
        """Returns the k most helpful and the k most harmful rows of each query."""
        if not is_count(k) or k < 1:
            raise IndexingError(f"k must be a positive integer, got {k!r}")
        queries, lengths = self.queries(batch)
        many = k if rerank is None else max(k, rerank)
        recall = None
        if approximate:
            coarse = Coarse(self.store, queries, lengths, self.preconditioning.as_json())
            high, low = coarse.best(queries, many)
            recall = coarse.recall
        else:
            high, low = best_of(self.store, queries, many, lengths)
        if rerank is not None:
            high, low = self._reranked(batch, high, low, k)
        return Matches(
            high.rows.numpy(),
            high.scores.numpy(),
            low.rows.numpy(),
            low.scores.numpy(),
            self.store.facts,
            self._preview(),
            recall=recall,
            title=self.store.path.name,
        )

    def _reranked(self, query: Any, high: Best, low: Best, k: int) -> tuple[Best, Best]:
        """Ranks candidates again by products of whole gradients, computed at all checkpoints."""
        if self.preconditioning.kind == "second_moment" or self.preconditioning.unit_norm:
            raise IndexingError(
                "scores by the second moment of the rows, and cosines, are exact as they are: leave rerank "
                "out, or build with preconditioner='ekfac' or 'none'"
            )
        attached = self.attached()
        subject, maker = attached.subject, attached.maker
        facts = self.store.facts
        if (
            len(self.store.manifest.parts) > 1
            or len(subject.spec.dataset) == 0
            or facts.token is not None
        ):
            raise IndexingError(
                "re-ranking needs the one data set that the index was built with: pass it"
            )
        with in_eval_mode(maker.models):
            batch = prepared(query, subject, maker)
            rows = np.unique(np.concatenate([high.rows.numpy().ravel(), low.rows.numpy().ravel()]))
            exact = exact_scores(
                subject.spec, maker, batch, self._preconditioners(maker.models), facts.index[rows]
            )
        place = {int(row): number for number, row in enumerate(rows)}
        return (
            ranked_again(high, exact, place, k, largest=True),
            ranked_again(low, exact, place, k, largest=False),
        )

    def _preview(self) -> Preview | None:
        """Returns what shows a sample; None without its data set, and for samples of several data sets."""
        subject = self.attached().subject
        spec = subject.spec
        if len(self.store.manifest.parts) > 1 or len(spec.dataset) == 0:
            return None
        return previews_of(
            spec.dataset, spec.show or inferred_show(spec.dataset, tokenizer=subject.tokenizer)
        )


def _refuse_unfinite(queries: Tensor) -> None:  # (q, c, k)
    wrong = (~queries.isfinite()).flatten(1).any(1).nonzero()[:, 0].tolist()
    if wrong:
        raise IndexingError(
            f"query {wrong[0]} has no finite gradient, so no sample could be ranked by it: look for inputs "
            "or losses that are NaN or infinite"
        )
