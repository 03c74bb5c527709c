"""Searches rows approximately: products in a few directions give candidates, exact products rank them.

Rows are projected to their principal directions and stored beside the index, a sixteenth of its size at 4,096
numbers. A search reads these instead of the rows, and then the rows of the candidates alone. Directions in
which rows differ little are left out: a preconditioner that is a function of the rows' second moment divides
by their spread, but damping keeps those directions small.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pergrad.audit.streaming.files import replacing
from pergrad.errors import IndexingError
from pergrad.index.querying.scoring import Best, best_of, merged
from pergrad.index.store.numbers import encoded, unscaled
from pergrad.index.store.store import Block, Store

__all__ = ["Coarse"]

_DIRECTIONS = 256  # numbers of a row that are searched
_MOST_ROWS = 2**15  # that the directions are found from
_AT_ONCE = 2**14  # rows that are multiplied at once
_PROBES = 32  # queries that the recall is measured with
_OF = 10  # best rows that count in the recall
_ENOUGH = 0.97  # recall at which no more candidates are taken
_FACTORS = (20, 50, 100, 200, 400, 800)  # candidates for each row that is wanted


class Coarse:
    """The rows of an index in few directions, made and stored when they are first asked for.

    Args:
        store: the index.
        queries: preconditioned queries, (q, c, k); the first ones tell how many candidates are needed, and
            measure the recall.
        lengths: (rows, c), what the products with each row are divided by.
        about: what the queries depend on, such as the preconditioner: another one is measured again.
    """

    def __init__(
        self,
        store: Store,
        queries: Tensor,
        lengths: np.ndarray | None = None,
        about: dict[str, Any] | None = None,
    ) -> None:
        self._store, self._lengths = store, lengths
        of_rows = {} if lengths is None else dict(about or {})
        made = store.derived("approximate", self._made, **of_rows)
        self._basis: Tensor = made["basis"]  # (c·k, d)
        self._scale: Tensor = made["scale"]  # (n,)
        if not self._path.exists():
            raise IndexingError(
                f"{self._path} is missing: remove approximate.pt beside it, and query again"
            )
        measured = store.derived(
            "approximate-recall", lambda: self._measured(queries), **dict(about or {})
        )
        self.recall = float(measured["recall"])
        self.factor = int(measured["factor"])  # candidates for each row that is wanted

    @property
    def _path(self) -> Path:
        return self._store.path / "approximate.f16"

    def best(self, queries: Tensor, k: int) -> tuple[Best, Best]:
        """Returns about the k highest and the k lowest rows of each query, with exact scores."""
        return self._best(queries, k, self.factor)

    def _best(self, queries: Tensor, k: int, factor: int) -> tuple[Best, Best]:
        high, low = self._candidates(queries, min(len(self._store), factor * k))
        return (
            self._ranked(queries, high.rows, k, largest=True),
            self._ranked(queries, low.rows, k, largest=False),
        )

    def _candidates(self, queries: Tensor, count: int) -> tuple[Best, Best]:
        """Returns the rows with the highest and lowest products in the directions."""
        few = queries.flatten(1).float() @ self._basis / queries.shape[1]
        none = Best(torch.zeros(len(few), 0, dtype=torch.long), torch.zeros(len(few), 0))
        high, low = none, none
        held = torch.empty(_AT_ONCE, few.shape[1])
        for start, stored in self._blocks(few.shape[1]):
            rows = held[: len(stored)].copy_(torch.from_numpy(stored))
            scores = (few @ rows.T) * self._scale[start : start + len(rows)]
            numbers = torch.arange(start, start + len(rows)).expand(len(few), -1)
            high = merged(high, numbers, scores.nan_to_num(nan=-torch.inf), count, largest=True)
            low = merged(low, numbers, scores.nan_to_num(nan=torch.inf), count, largest=False)
        return high, low

    def _blocks(self, width: int) -> Iterator[tuple[int, np.ndarray]]:
        """Reads the projected rows into one buffer: a mapped file would stay in this process's memory."""
        buffer = np.empty((_AT_ONCE, width), np.float16)
        with self._path.open("rb", buffering=0) as file:
            for start in range(0, len(self._scale), _AT_ONCE):
                rows = buffer[: min(_AT_ONCE, len(self._scale) - start)]
                left = memoryview(rows.data).cast("B")
                while len(left):
                    got = file.readinto(left)
                    if not got:
                        raise IndexingError(
                            f"{self._path} ends too early: remove it and approximate.pt beside it, and "
                            "query again"
                        )
                    left = left[got:]
                yield start, rows

    def _ranked(self, queries: Tensor, candidates: Tensor, k: int, *, largest: bool) -> Best:
        """Multiplies the candidates of each query exactly, and takes the best."""
        rows, scores = [], []
        for query, own in zip(queries, candidates.numpy(), strict=True):
            held = self._read(own)
            products = torch.einsum("nck,ck->nc", held, query.to(held))
            if self._lengths is not None:
                products = products / self._divisors(own).to(products)
            score = products.mean(1).nan_to_num(nan=-torch.inf if largest else torch.inf)
            chosen = score.topk(min(k, len(score)), largest=largest)
            rows.append(torch.from_numpy(own)[chosen.indices])
            scores.append(chosen.values)
        return Best(torch.stack(rows), torch.stack(scores))

    def _read(self, numbers: np.ndarray) -> Tensor:
        """Reads single rows, (n, c, k)."""
        values, scale = self._store.at(numbers)
        return unscaled(values, scale, self._store.dtype)

    def _divisors(self, numbers: np.ndarray | slice) -> Tensor:
        assert self._lengths is not None
        tiny = torch.finfo(torch.float32).tiny
        return torch.from_numpy(self._lengths[numbers]).float().clamp(min=tiny)

    # -- how it is made

    def _made(self) -> dict[str, Any]:
        basis = self._directions()
        scales = []
        with replacing(self._path, durable=False) as unfinished, unfinished.open("wb") as file:
            for block in self._store.blocks():
                few, scale = encoded(self._flat(block) @ basis, "float16")
                file.write(np.ascontiguousarray(few.numpy()).data)
                scales.append(scale)
        return {"basis": basis, "scale": torch.cat([torch.zeros(0), *scales])}

    def _flat(self, block: Block) -> Tensor:
        """Returns rows of a block, (n, c·k) in float32, divided by their lengths."""
        kept = slice(None) if block.kept is None else block.kept
        rows = unscaled(block.rows[kept], block.facts.scale[kept], self._store.dtype)
        rows = rows.float().nan_to_num(0.0, 0.0, 0.0)
        if self._lengths is not None:
            own = self._divisors(slice(block.start, block.start + len(block)))
            rows = rows / own[:, :, None]
        return rows.flatten(1)

    def _directions(self) -> Tensor:
        """Returns principal directions of the rows, (c·k, d), by power iterations of their second moment."""
        store = self._store
        size = min(_DIRECTIONS, store.width)
        generator = torch.Generator().manual_seed(0)
        guess = torch.randn(store.width, size, generator=generator)
        every = max(1, len(store) // _MOST_ROWS)
        for _ in range(3):
            total = torch.zeros_like(guess)
            for block in store.blocks(every=every):
                rows = self._flat(block)
                # Rows count by their directions: otherwise a few of great length would take all of them.
                rows = torch.nn.functional.normalize(rows, dim=1)
                total += rows.T @ (rows @ guess)
            guess = torch.linalg.qr(total).Q
        return guess

    def _measured(self, queries: Tensor) -> dict[str, float]:
        """Finds how many candidates the queries need, and the share of the ten best rows that this finds."""
        some, k = queries[:_PROBES], min(_OF, len(self._store))
        exact = best_of(self._store, some, k, self._lengths)
        recall = factor = 0.0
        for factor in _FACTORS:
            near = self._best(some, k, int(factor))
            hits = [
                len({*a} & {*b})
                for wanted, found in zip(exact, near, strict=True)
                for a, b in zip(wanted.rows.tolist(), found.rows.tolist(), strict=True)
            ]
            recall = sum(hits) / (k * len(hits))
            if recall >= _ENOUGH or factor * k >= len(self._store):
                break
        return {"recall": recall, "factor": factor}
