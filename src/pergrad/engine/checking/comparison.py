"""Compares per-sample gradients with expected ones: a row for each parameter, and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pergrad.engine.checking.text_tables import text_table
from pergrad.engine.recording.options import LossReduction
from pergrad.quantities import Grads
from pergrad.runtime.tolerances import noise_floor, relative_error, tolerance_of_model

__all__ = ["Verification", "VerifyReport", "compare", "spread_out"]


@dataclass(frozen=True)
class Verification:
    """One parameter: how its gradients were computed, and how far off they are."""

    name: str
    shape: tuple[int, ...]
    how: str
    error: float  # the largest relative error against single samples and the ordinary gradient
    verdict: str  # "ok", "wrong" or "untouched": no sample has a gradient for it


@dataclass(frozen=True)
class VerifyReport:
    """A row for each recorded parameter, and the problems of the whole model; prints as a table."""

    rows: tuple[Verification, ...]
    samples: tuple[int, ...]  # the samples that were run alone
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


def compare(
    found: Grads,
    expected: Mapping[int, Mapping[str, Tensor | None]],
    *,
    ordinary: Mapping[str, Tensor] | None = None,
    loss_reduction: LossReduction = "sum",
    how: Callable[[str], str | None] = lambda name: None,
) -> VerifyReport:
    """Compares per-sample gradients with those of some samples alone, and their sum with the ordinary one.

    Args:
        found: the gradients of all samples.
        expected: the gradients of some samples, by their number; None stands for zeros.
        ordinary: the gradient of the whole batch's loss, if known.
        loss_reduction: whether that loss is the sum or the mean of the samples' losses.
        how: names the way in which a parameter's gradients were computed, for its row.
    """
    floor = noise_floor(found.result)
    rows = []
    for name, grads in found.result.items():
        pairs = [(grads[n], alone[name]) for n, alone in expected.items()]
        if ordinary is not None:
            divisor = len(grads) if loss_reduction == "mean" else 1
            pairs.append((grads.sum(0) / divisor, ordinary[name]))
        errors = [
            relative_error(g, torch.zeros_like(g) if wanted is None else wanted, floor)
            for g, wanted in pairs
        ]
        worst = max(errors) if all(e == e for e in errors) else float("nan")
        is_ok = worst <= tolerance_of_model(grads.dtype, found.precision.get(name, grads.dtype))
        verdict = "wrong" if not is_ok else "ok" if bool(grads.any()) else "untouched"
        rows.append(Verification(name, tuple(grads.shape[1:]), how(name) or "-", worst, verdict))
    return VerifyReport(tuple(rows), tuple(expected), (), ())


def spread_out(samples: int, size: int) -> tuple[int, ...]:
    """Chooses up to `samples` of `size` samples, evenly spaced from the first to the last.

    >>> spread_out(4, 10)
    (0, 3, 6, 9)
    """
    return tuple(sorted({round(k * (size - 1) / max(samples - 1, 1)) for k in range(samples)}))
