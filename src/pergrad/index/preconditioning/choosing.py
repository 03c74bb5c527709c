"""Fits the preconditioner that an index asks for, and loads it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pergrad.audit.streaming.files import replacing
from pergrad.errors import IndexingError
from pergrad.index.preconditioning.base import Damping, OnGradients, OnRows
from pergrad.index.preconditioning.second_moment import SecondMoment, moments_of
from pergrad.index.store.store import Store

__all__ = ["Kind", "Preconditioning", "loaded_preconditioners"]

Kind = Literal["none", "second_moment"]
_DAMPING = {"none": 0.0, "second_moment": 1.0}


@dataclass(frozen=True)
class Preconditioning:
    """The kind of a preconditioner, and its damping."""

    kind: Kind = "second_moment"
    damping: float | None = None
    ridge: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            allowed = ", ".join(map(repr, get_args(Kind)))
            raise IndexingError(f"preconditioner must be one of {allowed}, got {self.kind!r}")
        self.amount  # noqa: B018  # checks the numbers

    @property
    def amount(self) -> Damping:
        """Returns the damping, or the default of the kind."""
        return Damping(_DAMPING[self.kind] if self.damping is None else self.damping, self.ridge)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def loaded_preconditioners(
    store: Store, chosen: Preconditioning
) -> Sequence[OnRows | OnGradients] | None:
    """Returns a preconditioner for each checkpoint; None if there is none."""
    match chosen.kind:
        case "none":
            return None
        case "second_moment":
            return [SecondMoment(moment, chosen.amount) for moment in _moments(store)]
        case _:
            raise IndexingError(f"unknown preconditioner {chosen.kind!r}")


def _moments(store: Store) -> list[Tensor]:
    """Returns the second moments of the rows, computed again once rows were added or deleted."""
    path = store.path / "second_moment.pt"
    key = {"rows": len(store), "positions": store.manifest.positions, "deleted": len(store.deleted)}
    if path.exists():
        try:
            found = torch.load(path, weights_only=True)
            if found["key"] == key:
                return list(found["moments"])
        except Exception:  # an unreadable cache is computed again
            path.unlink(missing_ok=True)
    moments = moments_of(store)
    with replacing(path) as unfinished:
        torch.save({"key": key, "moments": moments}, unfinished)
    return moments
