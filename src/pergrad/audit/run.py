"""Runs an audit from its spec to its results folder: start or resume, stream, analyse, write."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.distributed import Store

import pergrad
from pergrad.audit.streaming.chunks import Chunk, Span, gaps, kept_spans
from pergrad.audit.streaming.folder import ResultsFolder
from pergrad.audit.streaming.gradients import Gradients
from pergrad.audit.streaming.loading import Loaded, Loader, drawing_from
from pergrad.audit.streaming.losses import loss_of_samples
from pergrad.audit.streaming.memory import (
    bytes_kept,
    fitting_batch_size,
    free_bytes,
    is_out_of_memory,
)
from pergrad.audit.streaming.queue import Beats, Queue, shared_items, together_alive
from pergrad.audit.streaming.ranks import Ranks, joined_ranks
from pergrad.audit.streaming.stream import Stream, Watch, Work, batches_in, shard
from pergrad.audit.streaming.task import (
    Task,
    made_task,
    refuse_different_ranks,
    with_buckets,
    with_one_hash,
)
from pergrad.audit.subject.checks import (
    TRAINING,
    notes_of_mode,
    notes_of_randomness,
    refuse_divided_loss,
)
from pergrad.audit.subject.dtypes import placed
from pergrad.audit.subject.options import AuditOptions
from pergrad.audit.subject.sharding import is_sharded_model, refuse_other_sharding
from pergrad.audit.subject.spec import Spec
from pergrad.audit.subject.texts import as_line
from pergrad.audit.writing.finishing import finish
from pergrad.errors import AuditError, InterruptedAuditError

__all__ = ["run_audit"]

_CERTIFIED = 8  # samples whose gradients are proved before the audit begins
_WINDOWS = 4  # tries to find samples whose gradients are finite
_PROBED = 2  # samples whose forward measures the activation memory of one
_WHOLE = 3  # times the whole model that a proof takes in each process: its values and two gradients

T = TypeVar("T")


class _Silent:
    def begin(self, samples: int, done: int) -> None: ...
    def advance(self, samples: int) -> None: ...
    def say(self, message: str) -> None: ...


def run_audit(
    spec: Spec,
    folder: str | Path,
    options: AuditOptions | None = None,
    *,
    command: str | None = None,
    watch: Watch | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Audits the samples, writes all results but the report into the folder, and returns the summary.

    Resumes if the folder holds a part of the same audit. If it holds all of it, computes no gradient: another
    `show`, `label`, `known_wrong` or name of the spec, or `shown` or `duplicates` of the options, changes the
    tables in seconds. Under `torchrun` every process computes a part, and the first one writes the results.

    Args:
        spec: the model, the data set and the loss.
        folder: the results folder; new, empty, or of the same audit.
        options: options of the audit.
        command: the command line, stored in the summary.
        watch: receives progress.
        force: removes the rows of an audit in this folder, also of another one, and computes them again.

    >>> import tempfile, torch
    >>> from torch.utils.data import TensorDataset
    >>> from pergrad.audit import Spec, run_audit
    >>> data = TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
    >>> spec = Spec(torch.nn.Linear(3, 1), data, lambda model, x, y: (model(x) - y).square().sum(1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     summary = run_audit(spec, folder)
    >>> summary["samples"]
    8
    """
    options = options or AuditOptions()
    watch = watch or _Silent()
    refuse_other_sharding(spec.model, spec.checkpoints)  # before any process locks the folder
    results = ResultsFolder(Path(folder))
    with joined_ranks(by_group=is_sharded_model(spec.model)) as ranks:
        ranks.together(results.open)
        with results.locked() if ranks.is_first else nullcontext():
            if force:
                ranks.first_decides(results.clear)
            made = ranks.together(lambda: made_task(spec, options, ranks))
            task = with_buckets(with_one_hash(made, ranks), ranks)
            refuse_different_ranks(task, ranks)
            is_new, batch_size = ranks.first_decides(lambda: _state(results, task))
            if is_new:
                batch_size = _begun(results, task, ranks, watch, batch_size)
            if batch_size is None:
                ranks.first_decides(lambda: _made_again(results, task, ranks, command, watch))
            else:
                with together_alive(ranks) as (store, beats):
                    written = _streamed(results, task, ranks, batch_size, watch, store, beats)
                    if ranks.is_first:
                        finish(results, task, ranks, command, written)
                    ranks.all_agree(None)  # the results are written
            return ranks.first_decides(lambda: _summary_in(results))


def _state(results: ResultsFolder, task: Task) -> tuple[bool, int | None]:
    """Returns whether the folder holds no rows yet, and its batch size; None: it has none, or is finished."""
    about = results.open()
    if about is not None and (results.is_finished or kept_spans(results.chunks)):
        identity = dict(task.identity)
        if identity["batch_size"] in (None, about["batch_size"]):
            identity["batch_size"] = about["identity"]["batch_size"]
        results.refuse_another(about, identity)
        return False, None if results.is_finished else results.batch_size(about)
    # An audit that failed before its first rows, as by an error in the spec, starts again: nothing is lost.
    is_again = about is not None and about["identity"] == task.identity
    return True, results.batch_size(about) if about is not None and is_again else None


def _begun(results: ResultsFolder, task: Task, ranks: Ranks, watch: Watch, most: int | None) -> int:
    """Starts the audit; returns its batch size, at most that of an earlier run that ran out of memory.

    The first process finds out what there is to know of the first samples; of a sharded model, all do.
    """

    def found(of_samples: Callable[[], T]) -> list[T]:
        def what() -> T:
            with _told_of_memory():
                return of_samples()

        if task.is_sharded:
            return ranks.all_agree(ranks.together(what))
        return [ranks.first_decides(what)]

    if task.options.tokens is not None:
        size = task.options.tokens
    else:
        size = task.options.batch_size or min(found(lambda: _found_batch_size(task, ranks)))
        size = min(size, len(task.indices))
    size = size if most is None else min(size, most)
    about = {"pergrad": pergrad.__version__, "identity": task.identity, "batch_size": size}
    of_all = found(lambda: notes_of_mode(_model(task)))
    notes = list(dict.fromkeys(note for of_one in of_all for note in of_one))
    notes = notes or found(lambda: _notes_of_losses(task, min(_CERTIFIED, size)))[0]
    for note in notes if ranks.is_first else ():
        if TRAINING not in note:  # BatchNorm is refused, by an error of its own
            watch.say(f"warning: {note}")
    certificate = _certificate(task, size, found)
    about |= {"notes": notes, "certificate": certificate}
    ranks.first_decides(lambda: results.begin(about))
    return size


@contextmanager
def _told_of_memory() -> Iterator[None]:
    """Says so if there is no memory for the first samples, which are too few to be halved."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise InterruptedAuditError(
            f"out of memory with the first samples ({as_line(str(error))}): free memory and run the same "
            "command again"
        ) from error


def _notes_of_losses(task: Task, count: int) -> list[str]:
    """Finds random losses; refuses a loss that is divided by the size of the batch."""
    loaded, model = _first(task, count), _model(task)
    arguments = _gradients(task, model).arguments(loaded.arguments)
    notes = notes_of_randomness(task.spec.loss, model, arguments, task.options.seed)
    if not notes:
        with drawing_from(task.options.seed, 0):
            refuse_divided_loss(task.spec.loss, model, arguments, loaded.count)
    return notes


def _made_again(
    results: ResultsFolder, task: Task, ranks: Ranks, command: str | None, watch: Watch
) -> None:
    """Writes the tables of a finished audit again if what may change without gradients has changed."""
    where = f"this audit is already finished in {results.path}"
    summary = _summary_in(results)
    if summary.get("presentation") == json.loads(json.dumps(task.presentation)):
        watch.say(f"{where}: nothing to compute")
    elif not kept_spans(results.chunks):
        watch.say(
            f"{where}, and its rows were removed: the report stays as it is (force computes them again)"
        )
    else:
        watch.say(f"{where}: only what the report shows is made again")
        finish(results, task, ranks, command or summary.get("command"), {}, before=summary)


def _certificate(
    task: Task, batch_size: int, found: Callable[[Callable[[], Any]], list[Any]]
) -> dict[str, Any]:
    """Proves the gradients of the first samples, or says why they are not proved."""
    if not task.options.certify:
        return {"ok": False, "reason": "certify is off"}
    gathers = not task.is_sharded or max(found(lambda: _missing_bytes(task))) <= 0
    count = min(_CERTIFIED, batch_size)

    def proved(start: int) -> dict[str, Any]:
        loaded = _first(task, count, start)
        with drawing_from(task.options.seed, 0):
            return _gradients(task, _model(task)).certified(
                loaded.arguments, loaded.count, gathers=gathers
            )

    certificate: dict[str, Any] = {}
    # Samples that are not finite prove nothing: try the next ones.
    for start in range(0, min(_WINDOWS * count, len(task.indices)), count):
        of_all = found(partial(proved, start))
        certificate = next((one for one in of_all if not one["ok"]), of_all[0])
        if certificate["ok"] or "not finite" not in certificate["reason"]:
            break
    return certificate


def _missing_bytes(task: Task) -> int:
    """Returns how much memory this process lacks to gather a model: parameters, and two gradients."""
    whole = sum(p.numel() * p.element_size() for p in task.spec.model.parameters())
    shares = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if task.device.type == "cpu" else 1
    return _WHOLE * whole - free_bytes(task.device) // shares


def _first(task: Task, count: int, begin: int = 0) -> Loaded:
    """Loads the first samples from position `begin` on that can be read."""
    loader = Loader(task.spec, task.indices, task.options.seed, strict=task.options.strict)
    skipped: dict[int, str] = {}
    batches = batches_in([(begin, len(task.indices))], count)
    if task.options.tokens is not None:
        batches = batches_in(batches, task.options.tokens, task.padded)
    for start, stop in batches:
        loaded = loader.load(start, stop)
        if loaded.count:
            return loaded
        skipped |= loaded.skipped
    raise AuditError(
        f"none of the {len(skipped):,} items can be read: {next(iter(skipped.values()))}"
    )


def _model(task: Task) -> nn.Module:
    return placed(task.spec.model, task.device, task.options.dtype)


def _gradients(task: Task, model: nn.Module) -> Gradients:
    options = task.options
    return Gradients(
        model,
        task.spec,
        task.groups,
        sketch_dim=options.sketch_dim,
        seed=options.seed,
        free_dim=options.free_dim,
        checkpoints=task.checkpoints,
    )


def _found_batch_size(task: Task, ranks: Ranks) -> int:
    model = _model(task)
    count = min(_PROBED, len(task.indices))
    loaded = _first(task, count)
    arguments, count = _gradients(task, model).arguments(loaded.arguments), loaded.count

    with drawing_from(task.options.seed, 0):
        kept = bytes_kept(model, lambda: loss_of_samples(task.spec.loss, model, arguments, count))
    on_cpu = task.device.type == "cpu"
    free = free_bytes(task.device) // (ranks.count if on_cpu else 1)
    return fitting_batch_size(-(-kept // count), free, len(task.indices), on_cpu=on_cpu)


def _streamed(
    results: ResultsFolder,
    task: Task,
    ranks: Ranks,
    batch_size: int,
    watch: Watch,
    store: Store | None,
    beats: Beats | None,
) -> dict[Span, Chunk]:
    """Computes and writes this process's part of the missing rows; returns the chunks it has written."""
    options = task.options
    # Decided before any process adds chunks.
    left = ranks.first_decides(lambda: gaps(kept_spans(results.chunks), len(task.indices)))
    batches = batches_in(left, batch_size, task.padded)
    items = shared_items(batches, ranks.count)
    todo = sum(stop - start for start, stop in items)
    watch.begin(len(task.indices), len(task.indices) - todo)
    queue = Queue(items, store)
    stream = Stream(
        results,
        Loader(task.spec, task.indices, options.seed, strict=options.strict),
        _gradients(task, _model(task)),
        task.indices,
        seed=options.seed,
        workers=options.workers,
        save_every=options.save_every,
        watch=watch,
        finished=queue.finished,
        check=beats.check if beats is not None else lambda: None,
    )
    if task.is_sharded:
        own = shard(batches, ranks.number, ranks.count)
        stand_in = ranks.together(lambda: _first(task, 1))
        stream.run_together(own, stand_in, ranks, batch_size)
    else:
        stream.run(Work(queue.claim, task.padded), batch_size)
    ranks.all_agree(None)  # all have written
    return stream.written


def _summary_in(results: ResultsFolder) -> dict[str, Any]:
    path = results.path / "summary.json"
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise AuditError(
            f"{path} is corrupt ({type(error).__name__}: {error}): remove this file and run the same command "
            "to write it again"
        ) from error
