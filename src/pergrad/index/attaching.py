"""Ties an index that is opened to its model: checks fingerprints, loads states, remembers recent builds."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from pergrad.audit.streaming.fingerprint import fingerprint_of_function
from pergrad.audit.subject.reference import load_spec
from pergrad.audit.subject.spec import Spec
from pergrad.errors import IndexingError
from pergrad.index.building import row_maker
from pergrad.index.options import IndexOptions
from pergrad.index.rows.computing import RowMaker
from pergrad.index.store.manifest import Manifest
from pergrad.index.store.states import read_state
from pergrad.index.store.store import Store
from pergrad.index.subject import Placed, Subject, made_subject
from pergrad.runtime import internals

__all__ = [
    "Attached",
    "attached",
    "options_of",
    "referred",
    "remember",
    "remembered",
    "with_stored_states",
]

# Subjects of indexes that were built in this process, by folder: the last eight. Models and data sets are
# held weakly. Nothing is read from here but by `Index(path)` without a model.
_REMEMBERED: OrderedDict[Path, Callable[[], Subject | None]] = OrderedDict()
_MOST = 8


@dataclass(frozen=True)
class Attached:
    """The models of an index, proved to be those that it was built with, and what computes their rows."""

    subject: Subject
    placed: Placed
    maker: RowMaker
    versions: tuple[int, ...]

    def is_current(self) -> bool:
        """Whether no parameter has been written to since the fingerprints were taken."""
        return versions_of(self.subject.spec.model) == self.versions


def versions_of(model: nn.Module) -> tuple[int, ...]:
    return tuple(internals.version_of(p) for p in (*model.parameters(), *model.buffers()))


def options_of(manifest: Manifest) -> IndexOptions:
    """Returns the options that rows of this index are computed with."""
    identity = manifest.identity
    return IndexOptions(
        projection=identity["projection"],
        dim=identity["dim"],
        seed=identity["seed"],
        dtype=identity["dtype"],
        per=identity["per"],
        compute_dtype=identity["compute_dtype"] if identity["compute_dtype"] != "None" else None,
        device=identity["device"],
        batch_size=manifest.batch_size,
    )


def with_stored_states(store: Store, subject: Subject) -> Subject:
    """Returns the subject with the checkpoints that the index holds, if it has none of its own."""
    wanted = store.manifest.identity["models"]
    if subject.checkpoints or len(wanted) == 1:
        return subject
    states = [read_state(store.path, fingerprint) for fingerprint in wanted[:-1]]
    if any(state is None for state in states):
        raise IndexingError(
            f"the index {store.path} has rows of {len(wanted)} checkpoints, whose states it does not hold: "
            f"pass "
            "them as checkpoints="
        )
    return replace(subject, checkpoints=tuple(states))


def referred(manifest: Manifest) -> Subject | None:
    """Returns the subject that the reference of the build names; None if it had none."""
    found = manifest.about.get("reference")
    return None if found is None else made_subject(load_spec(found[0], found[1]))


def attached(store: Store, subject: Subject) -> Attached:
    """Checks that model, checkpoints and loss are those of the index; loads stored checkpoints."""
    manifest = store.manifest
    wanted = manifest.identity["models"]
    subject = with_stored_states(store, subject)
    options = options_of(manifest)
    placed = subject.placed(options)
    if placed.fingerprints != wanted:
        which = "model" if placed.fingerprints[-1:] != wanted[-1:] else "checkpoints"
        raise IndexingError(
            f"the index {store.path} was built with another {which} ({', '.join(wanted)}, now "
            f"{', '.join(placed.fingerprints)}): pass the one that it was built with, or build it again"
        )
    loss = fingerprint_of_function(subject.spec.loss)
    if loss != manifest.identity["loss"]:
        raise IndexingError(
            f"the index {store.path} was built with another loss ({manifest.identity['loss']}, now {loss}): "
            "pass the one that it was built with, or build it again"
        )
    # A query is a row, also of an index of tokens.
    maker = row_maker(subject, placed, replace(options, per="sample"))
    return Attached(subject, placed, maker, versions_of(subject.spec.model))


def remember(path: Path, subject: Subject) -> None:
    """Remembers the subject of an index that was built in this process, as long as its model lives."""
    key = path.resolve()
    spec = subject.spec
    model = weakref.ref(spec.model)
    dataset: Callable[[], Any]
    try:
        dataset = weakref.ref(spec.dataset)
    except TypeError:  # such as a list, which has no weak references
        dataset = lambda: None  # noqa: E731
    rest = {
        f.name: getattr(spec, f.name)
        for f in fields(Spec)
        if f.name not in ("model", "dataset", "checkpoints")
    }
    tokens, tokenizer = subject.tokens, subject.tokenizer

    def again() -> Subject | None:
        found, data = model(), dataset()
        if found is None:
            return None
        # Queries need no data; without it no sample is shown.
        return Subject(Spec(found, [] if data is None else data, **rest), (), tokens, tokenizer)

    _REMEMBERED.pop(key, None)
    _REMEMBERED[key] = again
    while len(_REMEMBERED) > _MOST:
        _REMEMBERED.popitem(last=False)


def remembered(path: Path) -> Subject | None:
    """Returns the subject of an index that was built in this process, if its model and data still live."""
    found: Any = _REMEMBERED.get(path.resolve())
    return None if found is None else found()
