"""Fits the preconditioner that an index asks for, and loads it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from pergrad.errors import IndexingError
from pergrad.index.preconditioning.adam import Adam, adam_state
from pergrad.index.preconditioning.base import Damping, OnGradients, OnRows
from pergrad.index.preconditioning.fitting import FitData, Labels
from pergrad.index.preconditioning.gauss_newton import GaussNewton, fit_gauss_newton, refuse_large
from pergrad.index.preconditioning.kronecker import Kronecker, biases_of, fit_kronecker
from pergrad.index.preconditioning.second_moment import SecondMoment, moments_of
from pergrad.index.store.saved import save_whole
from pergrad.index.store.store import Store

__all__ = [
    "Kind",
    "Preconditioning",
    "fit_preconditioners",
    "loaded_from",
    "loaded_preconditioners",
]

Kind = Literal["none", "second_moment", "ekfac", "adam", "gauss_newton"]
_DAMPING = {"none": 0.0, "second_moment": 1.0, "ekfac": 0.1, "adam": 0.0, "gauss_newton": 0.1}
_FITTED = ("ekfac", "adam", "gauss_newton")  # to the data or by the optimizer, not from the rows


@dataclass(frozen=True)
class Preconditioning:
    """The kind of a preconditioner, its damping, and the labels that it is fitted with."""

    kind: Kind = "second_moment"
    damping: float | None = None
    ridge: float = 0.0
    labels: Labels = "given"
    unit_norm: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("kind", get_args(Kind)), ("labels", get_args(Labels))):
            if getattr(self, name) not in allowed:
                what = {"kind": "preconditioner", "labels": "labels"}[name]
                names = ", ".join(map(repr, allowed))
                raise IndexingError(f"{what} must be one of {names}, got {getattr(self, name)!r}")
        self.amount  # noqa: B018  # checks the numbers
        if self.unit_norm and self.is_fitted:
            raise IndexingError(
                f"unit_norm needs lengths of all rows, which preconditioner={self.kind!r} does not give: "
                f"take "
                "'second_moment' or 'none'"
            )

    @property
    def amount(self) -> Damping:
        """Returns the damping, or the default of the kind."""
        return Damping(_DAMPING[self.kind] if self.damping is None else self.damping, self.ridge)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_fitted(self) -> bool:
        return self.kind in _FITTED

    def file(self, folder: Path, number: int) -> Path:
        """Returns where the fit to a checkpoint is stored; damping is applied when it is loaded."""
        how = f"{self.kind}-{self.labels}" if self.kind == "ekfac" else self.kind
        return folder / "preconditioner" / f"{how}-{number}.pt"


def refuse_unfit(folder: Path, chosen: Preconditioning, model: nn.Module, optimizer: Any) -> None:
    """Refuses what could not be fitted once all rows are computed, unless it is stored already."""
    if chosen.file(folder, 0).exists():
        return
    if chosen.kind == "gauss_newton":
        refuse_large(sum(p.numel() for p in model.parameters() if p.requires_grad))
    if chosen.kind == "adam" and not isinstance(optimizer, list | tuple):
        adam_state(model, optimizer)


def fit_preconditioners(
    folder: Path, chosen: Preconditioning, data: FitData, optimizer: Any = None
) -> None:
    """Fits the preconditioner of each checkpoint that is not stored yet, and stores it."""
    if not chosen.is_fitted:
        return
    (folder / "preconditioner").mkdir(exist_ok=True)
    optimizers = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    models = data.maker.models
    if len(optimizers) not in (1, len(models)):
        raise IndexingError(
            f"pass one optimizer, or one for each of {len(models)} checkpoints, got {len(optimizers)}"
        )
    is_another = False
    for number, model in enumerate(models):
        path = chosen.file(folder, number)
        if path.exists() and (chosen.kind != "adam" or optimizer is None):
            continue
        fitted: Any
        if chosen.kind == "ekfac":
            fitted = fit_kronecker(data, number, chosen.labels)
        elif chosen.kind == "gauss_newton":
            fitted = fit_gauss_newton(data, number)
        else:
            which = optimizers[number if len(optimizers) > 1 else 0]
            fitted = adam_state(model if len(optimizers) > 1 else models[-1], which)
        before = path.read_bytes() if path.exists() else None  # of another optimizer
        save_whole(fitted, path)
        is_another |= before is not None and before != path.read_bytes()
    if is_another:
        Store(folder).forget_derived()


def loaded_preconditioners(
    store: Store, chosen: Preconditioning, models: Sequence[nn.Module]
) -> Sequence[OnRows | OnGradients] | None:
    """Returns a preconditioner for each checkpoint; None if there is none."""
    if chosen.kind == "none":
        return None
    if chosen.kind == "second_moment":
        return [SecondMoment(moment, chosen.amount) for moment in _moments(store)]
    return loaded_from(store.path, chosen, models)


def loaded_from(
    folder: Path, chosen: Preconditioning, models: Sequence[nn.Module]
) -> Sequence[OnGradients] | None:
    """Returns the preconditioners on whole gradients that a folder holds; None if there are none."""
    if not chosen.is_fitted:
        return None
    found: list[OnGradients] = []
    for number, model in enumerate(models):
        path = chosen.file(folder, number)
        try:
            fitted = torch.load(path, weights_only=True)
        except FileNotFoundError as error:
            raise IndexingError(
                f"the index {folder} has no {chosen.kind} preconditioner yet: run the same build with "
                f"preconditioner={chosen.kind!r}"
            ) from error
        except Exception as error:
            raise IndexingError(f"{path} is corrupt ({type(error).__name__}: {error})") from error
        if chosen.kind == "ekfac":
            found.append(Kronecker(fitted, biases_of(model), chosen.amount))
        elif chosen.kind == "gauss_newton":
            found.append(GaussNewton(fitted, chosen.amount))
        else:
            found.append(Adam(fitted, chosen.amount))
    return found


def _moments(store: Store) -> list[Tensor]:
    return list(store.derived("second_moment", lambda: moments_of(store)))
