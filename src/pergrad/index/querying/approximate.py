"""Searches rows approximately: a graph over few principal directions gives candidates, exact products rank
them.

The largest inner product is found as the nearest neighbour of vectors of equal length: each row gets one more
number that fills it up to the longest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pergrad.audit.streaming.files import replacing
from pergrad.errors import IndexingError
from pergrad.index.querying.scoring import Best, best_of
from pergrad.index.store.numbers import unscaled
from pergrad.index.store.store import Store

__all__ = ["Graph"]

_DIRECTIONS = 256  # numbers of a row in the graph
_CANDIDATES = 50  # for each row that is wanted; all of them are multiplied exactly
_LEAST = 200
_PROBES = 32  # rows that the recall is measured with
_OF = 10  # best rows that count in the recall
_MOST_ROWS = 2**15  # that the directions are found from


class Graph:
    """A stored graph of an index's rows, made when it is first asked for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        try:
            from usearch.index import Index as Usearch  # noqa: PLC0415  # an extra
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "approximate search needs usearch: pip install 'pergrad[search]'", name="usearch"
            ) from error
        about = store.derived("approximate", lambda: self._made(Usearch))
        self._basis: Tensor = about["basis"]  # (c·k, d)
        self._longest = float(about["longest"])
        self.recall = float(about["recall"])
        if not hasattr(self, "_graph"):
            self._graph: Any = Usearch.restore(str(store.path / "approximate.usearch"))
        if self._graph is None:
            raise IndexingError(
                f"{store.path / 'approximate.usearch'} is missing: remove approximate.pt beside it, and "
                f"query again"
            )

    def best(self, queries: Tensor, k: int, lengths: np.ndarray | None = None) -> tuple[Best, Best]:
        """Returns about the k highest and the k lowest rows of each query, with exact scores."""
        found = []
        for sign in (1, -1):
            flat = sign * queries.flatten(1)
            wanted = min(len(self._store), max(_LEAST, _CANDIDATES * k))
            near = self._graph.search(self._vectors(flat, is_query=True), wanted)
            keys = np.asarray(near.keys).reshape(len(queries), -1).astype(np.int64)
            found.append(self._ranked(queries, keys, k, lengths, largest=sign > 0))
        return found[0], found[1]

    def _ranked(
        self,
        queries: Tensor,
        keys: np.ndarray,
        k: int,
        lengths: np.ndarray | None,
        *,
        largest: bool,
    ) -> Best:
        rows, scores = [], []
        for query, own in zip(queries, keys, strict=True):
            held = self._rows(own)
            products = torch.einsum("nck,ck->nc", held, query.to(held))
            if lengths is not None:
                products = products / torch.from_numpy(lengths[own]).to(products)
            score = products.mean(1)
            worst = -torch.inf if largest else torch.inf
            score = torch.where(torch.isnan(score), worst, score)
            chosen = score.topk(min(k, len(score)), largest=largest)
            rows.append(torch.from_numpy(own)[chosen.indices])
            scores.append(chosen.values)
        return Best(torch.stack(rows), torch.stack(scores))

    def _rows(self, numbers: np.ndarray) -> Tensor:
        """Reads single rows from the mapped files, (n, c, k)."""
        out: list[Tensor | None] = [None] * len(numbers)
        order = np.argsort(numbers)
        at = start = 0
        for stored, facts in self._store.mapped():
            kept = np.flatnonzero(~np.isin(facts.index, self._store.deleted))
            stop = start + len(kept)
            while at < len(order) and numbers[order[at]] < stop:
                row = kept[numbers[order[at]] - start]
                some = slice(row, row + 1)
                out[order[at]] = unscaled(
                    np.array(stored[some]), facts.scale[some], self._store.dtype
                )
                at += 1
            start = stop
        return torch.cat([row for row in out if row is not None])

    def _vectors(self, flat: Tensor, *, is_query: bool) -> np.ndarray:
        """Returns unit vectors whose cosines grow with the inner product, (n, d + 1)."""
        few = flat.float() @ self._basis
        if is_query:
            filled = torch.zeros(len(few), 1)
        else:
            few = few / self._longest
            filled = (1 - few.square().sum(1, keepdim=True)).clamp(min=0).sqrt()
        return torch.cat([few, filled], 1).numpy()

    def _made(self, kind: Any) -> dict[str, Any]:
        store = self._store
        self._basis, self._longest = self._directions()
        graph = kind(
            ndim=self._basis.shape[1] + 1,
            metric="cos",
            dtype="f16",
            connectivity=32,
            expansion_add=128,
            expansion_search=512,
        )
        for block in store.blocks():
            rows = self._finite(block)
            keys = np.arange(block.start, block.start + len(block), dtype=np.uint64)
            graph.add(keys, self._vectors(rows, is_query=False))
        with replacing(store.path / "approximate.usearch", durable=False) as unfinished:
            graph.save(str(unfinished))
        self._graph = graph
        recall = self._measured()
        return {"basis": self._basis, "longest": self._longest, "recall": recall}

    def _finite(self, block: Any) -> Tensor:
        kept = slice(None) if block.kept is None else block.kept
        rows = unscaled(block.rows[kept], block.facts.scale[kept], self._store.dtype)
        return rows.flatten(1).float().nan_to_num(0.0, 0.0, 0.0)

    def _directions(self) -> tuple[Tensor, float]:
        """Returns principal directions of the rows, (c·k, d), and the length of the longest row in them."""
        store = self._store
        size = min(_DIRECTIONS, store.width)
        generator = torch.Generator().manual_seed(0)
        guess = torch.randn(store.width, size, generator=generator)
        every = max(1, len(store) // _MOST_ROWS)
        for _ in range(3):  # power iterations of the second moment
            total = torch.zeros_like(guess)
            for block in store.blocks(every=every):
                rows = self._finite(block)
                total += rows.T @ (rows @ guess)
            guess = torch.linalg.qr(total).Q
        longest = 0.0
        for block in store.blocks():
            longest = max(longest, float((self._finite(block) @ guess).norm(dim=1).max()))
        return guess, longest or 1.0

    def _measured(self) -> float:
        """Returns the share of the ten best rows that the graph finds, for 32 rows as queries."""
        store = self._store
        count = len(store)
        chosen = np.unique(np.linspace(0, count - 1, min(_PROBES, count)).astype(np.int64))
        self.recall = 0.0
        queries = self._rows(chosen)
        k = min(_OF, count)
        exact, _ = best_of(store, queries, k)
        near, _ = self.best(queries, k)
        hits = [
            len({*a} & {*b}) for a, b in zip(exact.rows.tolist(), near.rows.tolist(), strict=True)
        ]
        return sum(hits) / (k * len(hits))
