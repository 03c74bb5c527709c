"""Computes the cells of the benchmark: a data set, a noise and a seed, at three states of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks.ranking.data import CHOSEN_ON, DATA, FEW_COLUMNS, NEW, USED
from benchmarks.ranking.planting import (
    CHOSEN_WITH,
    NOISES,
    with_duplicates,
    with_other_outliers,
    with_outliers,
)
from benchmarks.ranking.training import STATES, cross_validated, trained
from pergrad.attribution import (
    Findings,
    Samples,
    analyse,
    average_precision,
    label_errors,
)
from pergrad.audit import Spec
from pergrad.audit.streaming.gradients import Gradients, Rows, joined_rows
from pergrad.audit.subject.losses import LossOfLogits
from pergrad.audit.subject.spec import grouped_parameters

try:
    from cleanlab.rank import get_normalized_margin_for_each_label
except ModuleNotFoundError:  # its formula alone is compared
    get_normalized_margin_for_each_label = None

__all__ = ["Cell", "cells", "computed", "fresh_cells"]

_AT_ONCE = 512
# Outliers and near-duplicates instead of wrong labels; the second kind was not used to choose the method.
_PLANTED, _PLANTED_ANEW = "planted", "planted anew"


@dataclass(frozen=True)
class Cell:
    """One training run to measure."""

    data: str
    noise: str
    seed: int

    @property
    def is_new(self) -> bool:
        """Whether its data set or its noise was not used to choose the method."""
        return self.data not in USED or self.noise not in (*CHOSEN_WITH, _PLANTED)


def cells(seeds: int) -> list[Cell]:
    """Returns the older cells, more new ones, and those with outliers and duplicates."""
    older = [Cell(d, n, s) for d in CHOSEN_ON for n in CHOSEN_WITH for s in range(seeds)]
    new = [Cell(d, n, 100 + s) for d in DATA for n in NOISES for s in range(seeds)]
    new = [cell for cell in new if cell.is_new]
    planted = [Cell(d, _PLANTED, 0) for d in CHOSEN_ON]
    planted += [Cell(d, _PLANTED, 100) for d in NEW]
    planted += [Cell(d, _PLANTED_ANEW, 100) for d in DATA]
    return [*older, *new, *planted]


def fresh_cells(first: int, seeds: int) -> list[Cell]:
    """Returns cells of all data sets, noises and kinds of planting, at the seeds from `first` on.

    Data of few columns have near-duplicates alone.
    """
    noises = (*NOISES, _PLANTED, _PLANTED_ANEW)
    found = [Cell(d, n, first + s) for d in DATA for n in noises for s in range(seeds)]
    return found + [Cell(d, _PLANTED, first + s) for d in FEW_COLUMNS for s in range(seeds)]


def computed(cell: Cell) -> list[dict[str, Any]]:
    """Returns a row for each state of training."""
    torch.set_num_threads(1)
    return _planted(cell) if cell.noise in (_PLANTED, _PLANTED_ANEW) else _noisy(cell)


def _audited(
    x: torch.Tensor, y: torch.Tensor, model: torch.nn.Module, checkpoints: list[torch.nn.Module]
) -> Rows:
    """Returns the rows of an audit, as `pergrad audit` computes them."""
    loss = LossOfLogits(_logits, lambda out, x, y: F.cross_entropy(out, y, reduction="none"))
    spec = Spec(model, TensorDataset(x, y), loss, logits=_logits, target=lambda x, y: y)
    gradients = Gradients(
        model, spec, grouped_parameters(spec), sketch_dim=256, seed=0, checkpoints=checkpoints
    )
    parts = torch.arange(len(y)).split(_AT_ONCE)
    return joined_rows([gradients.rows((x[rows], y[rows]), len(rows)) for rows in parts])


def _logits(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x)


def _findings(rows: Rows) -> Findings:
    index = np.arange(len(rows))
    free = None if rows.free is None else rows.free[:, -1:]  # the model alone: method A
    return analyse(
        Samples(
            *(index, rows.loss, rows.norm, {}, rows.sketch, free),
            *(rows.target, rows.predicted, rows.probability),
        )
    )


def _noisy(cell: Cell) -> list[dict[str, Any]]:
    data = DATA[cell.data](cell.seed)
    generator = np.random.default_rng([cell.seed, 17])
    given = NOISES[cell.noise](data.x.numpy(), data.y, data.classes, generator)
    wrong, y = given != data.y, torch.from_numpy(given)
    models = trained(data.network, data.x, y, cell.seed)
    shares = cross_validated(data.network, data.x, y, data.classes, cell.seed)
    found = []
    for state in STATES:
        at = models[state]
        rows = _audited(data.x, y, at.model, at.checkpoints[:-1])
        findings = _findings(rows)
        a, free = findings.labels, rows.free
        assert a is not None
        assert free is not None
        b = label_errors([free[:, n] for n in range(free.shape[1])], given)
        assert b is not None
        margin = _margin(shares[state], given)
        scores = {
            "A": a.doubt,
            "B": b.doubt,
            "loss": rows.loss,
            "suspicion": findings.suspicion,
            "margin": -margin,
        }
        memory = findings.memorised
        found.append(
            {
                **_about(cell, state),
                "samples": len(y),
                "wrong": int(wrong.sum()),
                "ap": {name: average_precision(score, wrong) for name, score in scores.items()},
                "count": {"A": [a.low, a.expected, a.high], "B": [b.low, b.expected, b.high]},
                "margin_count": int((margin < 0).sum()),
                "suggested_right": float((a.suggested[wrong] == data.y[wrong]).mean()),
                "says_memorised": memory is not None and memory.is_so,
                "predicts_given": float(np.mean(rows.predicted == given)),
            }
        )
    return found


def _margin(shares: np.ndarray, given: np.ndarray) -> np.ndarray:  # (n, c), (n,) -> (n,)
    """p(given) − max p(other), by cleanlab where it is installed; both are the same ranking."""
    rows = np.arange(len(given))
    others = shares.copy()
    others[rows, given] = -1
    margin = shares[rows, given] - others.max(axis=1)
    if get_normalized_margin_for_each_label is not None:
        theirs = get_normalized_margin_for_each_label(given, shares)
        np.testing.assert_allclose(theirs, (margin + 1) / 2, atol=1e-9)
    return np.asarray(margin)


def _planted(cell: Cell) -> list[dict[str, Any]]:
    data = (DATA | FEW_COLUMNS)[cell.data](cell.seed)
    generator = np.random.default_rng([cell.seed, 18])
    is_new = cell.noise == _PLANTED_ANEW
    x, outliers = (with_other_outliers if is_new else with_outliers)(data.x, generator)
    x, labels, pairs = with_duplicates(x, data.y, generator, scaled=is_new)
    y = torch.from_numpy(labels)
    is_outlier = np.zeros(len(y), dtype=bool)
    is_outlier[outliers] = True
    for a, b in pairs:
        is_outlier[b] = is_outlier[a]
    found = []
    for state, at in trained(data.network, x, y, cell.seed).items():
        rows = _audited(x, y, at.model, [])
        findings = _findings(rows)
        alike = findings.duplicates
        named = set(zip(alike.index_a.tolist(), alike.index_b.tolist(), strict=True))
        hits = len(named & pairs)
        assert findings.outlier is not None
        scores = {
            "label-free self-influence": findings.outlier,
            "loss": rows.loss,
            "suspicion": findings.suspicion,
        }
        outlying = {name: average_precision(score, is_outlier) for name, score in scores.items()}
        found.append(
            {
                **_about(cell, state),
                "samples": len(y),
                # Of few columns, shuffled entries and other scales are not unusual.
                **({"outliers": outlying} if cell.data in DATA else {}),
                "duplicates": {
                    "recall": hits / len(pairs),
                    "precision": hits / len(named) if named else 1.0,
                },
            }
        )
    return found


def _about(cell: Cell, state: str) -> dict[str, Any]:
    return {
        "data": cell.data,
        "noise": cell.noise,
        "seed": cell.seed,
        "state": state,
        "new": cell.is_new,
    }
