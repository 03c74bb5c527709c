"""Builds an index and appends to it: one pass over the data, chunk by chunk, by any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import pergrad
from pergrad.audit.streaming.fingerprint import fingerprint_of_data
from pergrad.audit.streaming.loading import Loaded, Loader, drawing_from
from pergrad.audit.streaming.losses import loss_of_samples
from pergrad.audit.streaming.memory import bytes_kept, fitting_batch_size, free_bytes
from pergrad.audit.streaming.ranks import Ranks, joined_ranks
from pergrad.audit.streaming.stream import Watch, batches_in, shard
from pergrad.audit.subject.options import chosen_indices
from pergrad.errors import AuditError, IndexingError
from pergrad.index.chunking import ChunkMaker
from pergrad.index.options import IndexOptions
from pergrad.index.preconditioning.fitting import FitData
from pergrad.index.rows.computing import RowMaker
from pergrad.index.store.manifest import MANIFEST, Manifest, Part
from pergrad.index.store.numbers import bytes_each
from pergrad.index.store.states import write_states
from pergrad.index.store.store import Store, refuse_other_files
from pergrad.index.subject import Placed, Subject, identity_of, in_eval_mode

__all__ = ["append_rows", "build_rows", "row_maker"]

_CERTIFIED = 8  # samples whose gradients are proved before the build begins
_PROBED = 2  # samples whose forward measures the activation memory of one
_CHUNKS = 16  # files that the data is split into, if they are not too large
_MOST_BYTES = 32 * 2**20  # of a chunk
_WORTH = 100  # batches on a GPU from which compiling a step pays


def row_maker(subject: Subject, placed: Placed, options: IndexOptions) -> RowMaker:
    """Returns what computes the rows of an index with these options."""
    mask = subject.tokens if options.per == "token" else None
    return RowMaker(
        placed.models,
        subject.spec.loss,
        options.projection,
        options.width,
        options.seed,
        mask,
        compiles=False if options.compile is None else options.compile,
        norms=options.norms,
    )


After = Callable[[Store, FitData], None]


def build_rows(
    subject: Subject, path: Path, options: IndexOptions, watch: Watch, after: After | None = None
) -> Store:
    """Writes the rows of a data set, or those that are missing; under torchrun each process writes a part.

    The first process calls `after` when all rows are written.
    """
    return _written(subject, path, options, watch, after, appending=False)


def append_rows(subject: Subject, path: Path, options: IndexOptions, watch: Watch) -> Store:
    """Writes the rows of another data set behind those that are there."""
    return _written(subject, path, options, watch, None, appending=True)


def _written(
    subject: Subject,
    path: Path,
    options: IndexOptions,
    watch: Watch,
    after: After | None,
    *,
    appending: bool,
) -> Store:
    with joined_ranks() as ranks:
        ranks.together(lambda: refuse_other_files(path))
        with Store.locked(path) if ranks.is_first else nullcontext():
            placed = ranks.together(lambda: subject.placed(options, ranks.local))
            with in_eval_mode(placed.models):
                maker = ranks.together(lambda: row_maker(subject, placed, options))
                task = _Task(subject, placed, options, maker, path, ranks, watch)
                ranks.together(task.refuse_different_ranks)
                ranks.first_decides(task.begin_append if appending else task.begin)
                task.stream()
                ranks.all_agree(None)  # all have written
                if after is not None:
                    finish = after
                    ranks.first_decides(lambda: finish(Store(path), task.fit_data()))
            return Store(path)


class _Task:
    """One pass over a data set in one process."""

    def __init__(
        self,
        subject: Subject,
        placed: Placed,
        options: IndexOptions,
        maker: RowMaker,
        path: Path,
        ranks: Ranks,
        watch: Watch,
    ) -> None:
        self._subject, self._placed, self._options = subject, placed, options
        self._maker, self._path, self._ranks, self._watch = maker, path, ranks, watch
        spec = subject.spec
        self._indices = chosen_indices(options.subset, len(spec.dataset), options.seed)
        self._data, self._repeats = fingerprint_of_data(spec.dataset, options.seed)
        self._identity = identity_of(subject, placed, options)
        self._loader = Loader(spec, self._indices, options.seed, strict=options.strict)

    def refuse_different_ranks(self) -> None:
        own = {**self._identity, "data": self._data}
        for number, other in enumerate(self._ranks.all_agree(own)):
            for key, value in other.items():
                if value != own[key]:
                    raise IndexingError(
                        f"processes {self._ranks.number} and {number} differ in {key}: seed all random "
                        f"draws, "
                        "so that every process builds the same model and data"
                    )

    # -- begin or resume

    def begin(self) -> None:
        """Makes a new index, or checks that the one that is there is of the same model and data."""
        if (self._path / MANIFEST).exists():
            store = Store(self._path)
            self._refuse_another(store)
            first = store.manifest.parts[0]
            for key, now in (("data", self._data), ("subset", self._options.subset)):
                if getattr(first, key) != now:
                    raise self._another("data set" if key == "data" else key)
            store.clean()
            if not store.missing():
                self._watch.say(
                    f"this index is already finished in {self._path}: nothing to compute"
                )
            elif len(store.manifest.parts) > 1:
                raise IndexingError(
                    f"an append to {self._path} was interrupted: run the same append again to resume"
                )
            self._keep_states()  # the build may have ended before it had written them
            return
        count = len(self._indices)
        size = min(self._options.batch_size or self._found_batch_size(), count)
        manifest = Manifest(
            self._identity,
            (self._part(0, 0),),
            size,
            self._options.chunk or self._chunk(size, count),
            count,
            self._maker.width,
            about=self._about(size),
        )
        Store.begin(self._path, manifest).clean()
        self._keep_states()

    def _keep_states(self) -> None:
        if self._options.keep_states:
            write_states(self._path, self._placed.models, self._placed.fingerprints)

    def begin_append(self) -> None:
        """Adds a part to the index, unless it is there and was interrupted."""
        store = Store(self._path)
        self._refuse_another(store)
        store.clean()
        manifest = store.manifest
        last = manifest.parts[-1]
        left = store.missing()
        part = self._part(manifest.positions, last.offset + last.size)
        if left:
            is_last = left[0][0] >= last.start and len(manifest.parts) > 1
            if is_last and (last.data, last.subset) == (part.data, part.subset):
                return
            what = "append" if is_last else "build"
            told = ", or drop it with `pergrad index abandon`" if is_last else ""
            raise IndexingError(
                f"the index {self._path} is not finished: run the {what} that was interrupted again "
                f"first{told}"
            )
        self._try_first(manifest.batch_size)
        store.change(
            **{name: getattr(manifest.with_part(part), name) for name in ("parts", "positions")}
        )

    def _try_first(self, batch_size: int) -> None:
        """Computes the rows of some samples: data of another kind must not leave the index unfinished."""
        loaded = self._first(min(_CERTIFIED, batch_size))
        try:
            with drawing_from(self._options.seed, loaded.start):
                self._maker.rows(loaded.arguments, loaded.count)
        except AuditError as error:
            raise IndexingError(
                f"this data set cannot be appended to {self._path}: {error}"
            ) from error

    def _part(self, start: int, offset: int) -> Part:
        spec = self._subject.spec
        return Part(
            start,
            start + len(self._indices),
            offset,
            len(spec.dataset),
            self._data,
            spec.title,
            self._options.subset,
        )

    def _refuse_another(self, store: Store) -> None:
        began = store.manifest.identity
        for key, now in self._identity.items():
            if began.get(key) != now:
                raise self._another(
                    {"models": "model"}.get(key, key).replace("_", " "), began.get(key), now
                )

    def _another(self, what: str, before: Any = None, now: Any = None) -> IndexingError:
        told_values = "" if before is None else f" ({before}, now {now})"
        return IndexingError(
            f"the folder {self._path} holds an index with another {what}{told_values}: choose another "
            f"folder, "
            "or remove this one"
        )

    def _about(self, batch_size: int) -> dict[str, Any]:
        model = self._placed.models[-1]
        sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
        return {
            "pergrad": pergrad.__version__,
            "torch": torch.version.__version__,
            "model": type(model).__name__,
            "parameters": sum(sizes.values()),
            "repeats": self._repeats,
            "certificate": self._certificate(batch_size),
        }

    def _certificate(self, batch_size: int) -> dict[str, Any]:
        if not self._options.certify:
            return {"ok": False, "reason": "certify is off"}
        loaded = self._first(min(_CERTIFIED, batch_size))
        with drawing_from(self._options.seed, 0):
            return self._maker.certified(loaded.arguments, loaded.count)

    def _first(self, count: int) -> Loaded:
        """Loads the first samples that can be read."""
        why = ""
        for start in range(0, len(self._indices), count):
            loaded = self._loader.load(start, min(start + count, len(self._indices)))
            if loaded.count:
                return loaded
            why = why or next(iter(loaded.skipped.values()))
        raise IndexingError(f"none of the {len(self._indices):,} items can be read: {why}")

    def _found_batch_size(self) -> int:
        loaded = self._first(min(_PROBED, len(self._indices)))
        arguments, model = self._maker.arguments(loaded.arguments), self._placed.models[-1]
        loss, count = self._subject.spec.loss, loaded.count
        with drawing_from(self._options.seed, 0):
            kept = bytes_kept(model, lambda: loss_of_samples(loss, model, arguments, count))
        on_cpu = self._placed.device.type == "cpu"
        free = free_bytes(self._placed.device) // (self._ranks.count if on_cpu else 1)
        return fitting_batch_size(-(-kept // count), free, len(self._indices), on_cpu=on_cpu)

    def _chunk(self, batch_size: int, count: int) -> int:
        """Returns the samples of a chunk: whole batches, a 16th of the data, at most some megabytes."""
        row = self._maker.width * len(self._placed.models) * bytes_each(self._options.dtype)
        loaded = self._first(min(_PROBED, count))
        sample = row * max(1, self._maker.rows_each(loaded.arguments, loaded.count))
        wanted = min(-(-count // _CHUNKS), max(1, _MOST_BYTES // sample))
        return max(1, -(-wanted // batch_size)) * batch_size

    def fit_data(self) -> FitData:
        """Returns the batches of the data set, for preconditioners."""
        size = Store(self._path).manifest.batch_size
        spans = batches_in([(0, len(self._indices))], size)

        def batches() -> Iterator[tuple[int, tuple[Any, ...], int]]:
            for loaded in self._loader.batches(spans, self._options.workers):
                if loaded.count:
                    yield loaded.start, self._maker.arguments(loaded.arguments), loaded.count

        return FitData(self._maker, batches, self._options.seed)

    # -- the pass

    def stream(self) -> None:
        """Computes and writes this process's chunks of those that are missing."""
        store = Store(self._path)
        manifest = store.manifest
        part = manifest.parts[-1]
        left = self._ranks.first_decides(store.missing)
        # Chunks lie at multiples from the start of their part, wherever a build resumes.
        base = part.start
        inside = [(max(a, base) - base, b - base) for a, b in left if b > base]
        chunks = batches_in(inside, manifest.chunk)
        mine = shard(chunks, self._ranks.number, self._ranks.count)
        total = sum(stop - start for start, stop in mine)
        whole = -(-(part.stop - part.start) // self._ranks.count)
        self._watch.begin(max(whole, total), max(0, whole - total))
        if self._options.compile is None:
            self._maker.compiles = (
                self._placed.device.type == "cuda" and total >= _WORTH * manifest.batch_size
            )
        chunks_of = ChunkMaker(
            self._subject.spec, self._loader, self._maker, self._indices, self._options, self._watch
        )
        for span in mine:
            store.add(chunks_of.made(span, base, part.offset, manifest.batch_size))
