"""`verify`: the per-sample gradients against a loop over a few samples and the ordinary gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.engine.checking.mixing import mixing
from pergrad.engine.checking.text_tables import text_table
from pergrad.engine.checking.trial import Trial, undisturbed
from pergrad.engine.intercepting.journal import Journal
from pergrad.engine.recording.options import LossReduction
from pergrad.errors import PergradError
from pergrad.runtime.tolerances import noise_floor, relative_error, tolerance_of_model

__all__ = ["Verification", "VerifyReport", "spread_out", "verdict_on", "verify"]


@dataclass(frozen=True)
class Verification:
    """One parameter: how it is computed and how far off it is."""

    name: str
    shape: tuple[int, ...]
    how: str
    error: float  # largest relative error against the loop and against the ordinary gradient
    verdict: str  # "ok", "wrong" or "untouched": no sample has a gradient for it


@dataclass(frozen=True)
class VerifyReport:
    """A row for each recorded parameter, and what is wrong with the whole; printing it shows the table."""

    rows: tuple[Verification, ...]
    samples: tuple[int, ...]  # those that the loop was run for
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems and all(row.verdict != "wrong" for row in self.rows)

    @property
    def untouched(self) -> tuple[str, ...]:
        return tuple(row.name for row in self.rows if row.verdict == "untouched")

    def __str__(self) -> str:
        table = text_table(
            ["parameter", "shape", "how", "error", "verdict"],
            [[r.name, str(r.shape), r.how, f"{r.error:.1e}", r.verdict] for r in self.rows],
        )
        wrong = sum(row.verdict == "wrong" for row in self.rows)
        verdict = "all right" if self.ok else f"{wrong} parameters wrong" if wrong else "not right"
        samples = ", ".join(map(str, self.samples))
        lines = [
            table,
            *(f"problem: {p}" for p in self.problems),
            *(f"note: {n}" for n in self.notes),
        ]
        return "\n".join([*lines, f"{verdict}: {len(self.rows)} parameters, samples {samples}"])


def verify(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *batch: Any,
    samples: int = 4,
    batch_size: int | None = None,
    loss_reduction: LossReduction = "sum",
    batch_first: bool = True,
    quiet: bool = False,
) -> VerifyReport:
    """Checks the per-sample gradients of one batch, prints a table and returns it; see `report.ok`.

    A few samples are run alone, one forward and backward each, and compared; the sum over all samples is
    compared with the ordinary gradient of the batch; and one sample is made NaN, which must leave all
    others as they are. A model that draws random numbers (dropout) is checked in eval mode, since a
    sample alone would draw others. The model is left as it was.

    Args:
        model: the model.
        loss_fn: as for `pergrad.grads`.
        batch: what loss_fn takes beside the model; tensors in it are cut to one sample.
        samples: how many samples to run alone.
        batch_size: as for `pergrad.grads`.
        loss_reduction: as for `pergrad.grads`.
        batch_first: as for `pergrad.grads`.
        quiet: do not print.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(2, 1).double()
    >>> x = torch.ones(3, 2, dtype=torch.float64)
    >>> pergrad.verify(model, lambda model, x: model(x).sum(1), x, quiet=True).ok
    True
    """
    run = Trial(model, loss_fn, batch, batch_size, loss_reduction, batch_first)
    with undisturbed(model), run.repeatable() as notes:
        report = _report(run, samples, notes)
    if not quiet:
        print(report)
    return report


def _report(run: Trial, samples: int, notes: list[str]) -> VerifyReport:
    journal = Journal()
    if not run.parameters:
        return VerifyReport(
            (), (), ("the model has no parameter that requires grad",), tuple(notes)
        )
    try:
        recorded_grads = run.per_sample(run.batch, journal)
    except PergradError as error:
        return VerifyReport((), (), (str(error),), tuple(notes))
    found = recorded_grads.result
    size = len(next(iter(found.values())))
    chosen = spread_out(samples, size)
    expected = [run.ordinary(run.sample(n, size)) for n in chosen]
    whole = run.ordinary(run.batch)
    parts = size if run.reduction == "mean" else 1
    floor = noise_floor(found)

    rows = []
    for name, grads in found.items():
        errors = [
            relative_error(grads[n], e[name], floor) for n, e in zip(chosen, expected, strict=True)
        ]
        errors.append(relative_error(grads.sum(0) / parts, whole[name], floor))
        precision = recorded_grads.precision.get(name, grads.dtype)
        rows.append(verdict_on(name, grads, journal.rung_of(name) or "-", errors, precision))
    problems = mixing(run, found, size, notes)
    return VerifyReport(tuple(rows), chosen, tuple(problems), tuple(notes))


def verdict_on(
    name: str, grads: Tensor, how: str, errors: list[float], precision: torch.dtype
) -> Verification:
    worst = max(errors) if all(e == e for e in errors) else float("nan")
    is_ok = worst <= tolerance_of_model(grads.dtype, precision)
    untouched = is_ok and not bool(grads.any())
    verdict = "untouched" if untouched else "ok" if is_ok else "wrong"
    return Verification(name, tuple(grads.shape[1:]), how, worst, verdict)


def spread_out(samples: int, size: int) -> tuple[int, ...]:
    """Samples to look at, from the first to the last."""
    return tuple(sorted({round(k * (size - 1) / max(samples - 1, 1)) for k in range(samples)}))
