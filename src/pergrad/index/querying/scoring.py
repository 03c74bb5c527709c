"""Multiplies queries with all rows of a store, block by block, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pergrad.index.store.numbers import from_stored
from pergrad.index.store.store import Block, Store

_BLOCK = 4 * 2**20  # bytes of rows that are multiplied at once

__all__ = ["Best", "best_of", "merged", "score_blocks"]


def score_blocks(
    store: Store, queries: Tensor, lengths: np.ndarray | None = None
) -> Iterator[tuple[Block, Tensor]]:
    """Yields blocks of rows and the scores of all queries with them, (q, n).

    Args:
        store: the rows.
        queries: preconditioned queries at each checkpoint, (q, c, k); scores are means over the checkpoints.
        lengths: (rows, c), what the products with each row are divided by.
    """
    checkpoints = store.manifest.checkpoints
    wide = torch.float64 if store.dtype == "float64" else torch.float32
    left = [queries[:, c].to(wide).contiguous() for c in range(checkpoints)]
    width = store.manifest.width
    held = torch.empty(0, width, dtype=wide)
    for block in store.blocks(size=_BLOCK):
        stored = from_stored(block.rows, store.dtype)
        if block.kept is not None:
            stored = stored[torch.from_numpy(block.kept)]
        scale = torch.from_numpy(block.facts.scale).to(wide)
        scale = scale if block.kept is None else scale[torch.from_numpy(block.kept)]
        if lengths is not None:
            some = lengths[block.start : block.start + len(block)]
            # A row of zeros has no direction: its score is zero.
            scale = scale / torch.from_numpy(some).to(wide).clamp(min=torch.finfo(wide).tiny)
        scores = torch.zeros(len(queries), len(stored), dtype=wide)
        for c, query in enumerate(left):
            rows = stored[:, c * width : (c + 1) * width]
            if rows.dtype != wide:
                # One buffer for all blocks, small enough for the cache: fresh memory takes three times as
                # long.
                held = held if len(held) >= len(rows) else torch.empty(len(rows), width, dtype=wide)
                rows = held[: len(rows)].copy_(rows)
            scores += (query @ rows.T) * scale[:, c]
        yield block, scores / checkpoints


@dataclass(frozen=True)
class Best:
    """The best rows of each query: numbers among the rows that are kept, and scores, both (q, k)."""

    rows: Tensor
    scores: Tensor


def best_of(
    store: Store, queries: Tensor, k: int, lengths: np.ndarray | None = None
) -> tuple[Best, Best]:
    """Returns the k rows with the highest, and the k with the lowest scores of each query.

    Scores that are not a number never count.
    """
    q = len(queries)
    high = Best(torch.zeros(q, 0, dtype=torch.long), torch.zeros(q, 0))
    low = high
    for block, scores in score_blocks(store, queries, lengths):
        numbers = torch.arange(block.start, block.start + scores.shape[1]).expand(q, -1)
        high = merged(high, numbers, scores.nan_to_num(nan=-torch.inf), k, largest=True)
        low = merged(low, numbers, scores.nan_to_num(nan=torch.inf), k, largest=False)
    return high, low


def merged(best: Best, numbers: Tensor, scores: Tensor, k: int, *, largest: bool) -> Best:
    """Returns the k best of what was found and of other rows, with their numbers and scores, (q, n)."""
    if scores.shape[1] > k:
        scores, chosen = scores.topk(k, dim=1, largest=largest)
        numbers = numbers.gather(1, chosen)
    rows = torch.cat([best.rows, numbers], 1)
    both = torch.cat([best.scores.to(scores), scores], 1)
    both, order = both.sort(dim=1, descending=largest, stable=True)
    return Best(rows.gather(1, order)[:, :k], both[:, :k])
