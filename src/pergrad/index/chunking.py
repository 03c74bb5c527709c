"""Computes chunks of an index batch by batch; on a GPU, batches are computed while the last are copied."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pergrad.audit.streaming.chunks import Span
from pergrad.audit.streaming.loading import Loaded, Loader, drawing_from
from pergrad.audit.streaming.memory import is_out_of_memory
from pergrad.audit.streaming.stream import Watch, batches_in
from pergrad.audit.subject.places import told
from pergrad.audit.subject.spec import Spec
from pergrad.errors import AuditError, IndexingError, InterruptedAuditError, PergradError
from pergrad.index.options import IndexOptions
from pergrad.index.rows.computing import RowMaker
from pergrad.index.rows.transferring import Transfer
from pergrad.index.store.chunks import Chunk, Facts, joined_facts
from pergrad.index.store.numbers import as_arrays, encoded

__all__ = ["ChunkMaker"]

_AHEAD = 2  # batches that a GPU computes while the host waits for an earlier one
_Part = tuple[np.ndarray, Facts]


class ChunkMaker:
    """Computes the rows of consecutive samples; halves the batch when memory runs out."""

    def __init__(
        self,
        spec: Spec,
        loader: Loader,
        maker: RowMaker,
        indices: np.ndarray,
        options: IndexOptions,
        watch: Watch,
    ) -> None:
        self._spec, self._loader, self._maker = spec, loader, maker
        self._indices, self._options, self._watch = indices, options, watch
        self._is_told = False  # why steps are not compiled

    def made(self, span: Span, base: int, offset: int, batch_size: int) -> Chunk:
        """Returns the chunk of the samples at positions `span`, counted from `base`.

        `offset` is added to their indices in the data set.
        """
        size = batch_size
        while True:
            try:
                found = self._parts(batches_in([span], size), offset)
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            if size == 1:
                raise InterruptedAuditError(
                    "out of memory with a batch of one sample; all rows so far are kept: free memory and run "
                    "the same build to resume"
                )
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            size //= 2
            self._watch.say(f"out of memory; this chunk is computed in batches of {size}")
        rows = [rows for rows, _ in found if len(rows)]
        width = self._maker.width * len(self._maker.models)
        stored = np.concatenate(rows) if rows else np.zeros((0, width), np.float16)
        return Chunk(
            (base + span[0], base + span[1]), stored, joined_facts([facts for _, facts in found])
        )

    def _parts(self, spans: Sequence[Span], offset: int) -> list[_Part]:
        """Computes batches; reads each when the next ones are on their way."""
        waiting: list[tuple[Callable[[], _Part], int]] = []
        found: list[_Part] = []

        def take() -> None:
            part, samples = waiting.pop(0)
            found.append(part())
            self._watch.advance(samples)

        for loaded in self._loader.batches(spans, self._options.workers):
            waiting.append((self._begun(loaded, offset), loaded.stop - loaded.start))
            if len(waiting) > (_AHEAD if self._maker.device.type == "cuda" else 0):
                take()
        while waiting:
            take()
        return found

    def _begun(self, loaded: Loaded, offset: int) -> Callable[[], _Part]:
        """Begins to compute a batch; returns a function that waits for its rows and facts."""
        skipped = {index + offset: why for index, why in loaded.skipped.items()}
        if not loaded.count:
            empty = Facts(**{**vars(joined_facts([])), "skipped": skipped})
            return lambda: (np.zeros((0, 0)), empty)
        try:
            with drawing_from(self._options.seed, loaded.start):
                found = self._maker.rows(loaded.arguments, loaded.count)
        except Exception as error:
            if is_out_of_memory(error) or (
                isinstance(error, PergradError) and not isinstance(error, AuditError)
            ):
                raise
            own = isinstance(error, AuditError)
            what = str(error) if own else f"the backward raised {told(error)}"
            first, last = self._indices[loaded.start], self._indices[loaded.stop - 1]
            raise IndexingError(f"{what} (samples {first} to {last})") from error
        if self._maker.why_uncompiled is not None and not self._is_told:
            self._is_told = True
            self._watch.say(f"steps are not compiled: {self._maker.why_uncompiled}")
        stored = [encoded(rows, self._options.dtype) for rows in found.rows]
        index = self._indices[loaded.start : loaded.stop]
        index = index[~np.isin(index, list(loaded.skipped))] + offset
        labels = self._labels(loaded)
        places = [] if found.owner is None or found.token is None else [found.owner, found.token]
        transfer = Transfer(
            [*(t for pair in stored for t in pair), found.loss, found.norm, *places]
        )

        def finished() -> _Part:
            arrived = transfer.arrived()
            count = 2 * len(stored)
            arrays = [as_arrays(*arrived[n : n + 2]) for n in range(0, count, 2)]
            loss, norm, *where = (t.numpy() for t in arrived[count:])
            of_rows: Any = slice(None)
            token = None
            if where:
                of_rows, token = where[0], where[1].astype(np.int32)
            facts = Facts(
                index[of_rows],
                loss[of_rows],
                norm,
                np.stack([scale for _, scale in arrays], 1),
                token,
                labels if labels is None or not where else [labels[n] for n in of_rows],
                skipped,
            )
            return np.concatenate([rows for rows, _ in arrays], 1), facts

        return finished

    def _labels(self, loaded: Loaded) -> list[str] | None:
        """Returns the labels of a batch: those of the spec, or else its classes."""
        if loaded.labels is not None:
            return loaded.labels
        if self._spec.target is None:
            return None
        classes: Sequence[Any] = self._spec.target(*loaded.arguments).tolist()
        names = self._spec.classes
        return [
            str(n) if names is None or not 0 <= n < len(names) else str(names[n]) for n in classes
        ]
