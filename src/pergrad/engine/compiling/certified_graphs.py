"""Certifies a compiled step: what its graph gives is what a certified run of the same batch gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pergrad.engine.checking.attribution import Judge
from pergrad.engine.recording.arguments import leaves
from pergrad.errors import PergradError
from pergrad.quantities import Quantity

__all__ = ["check_graph", "copies_of"]

Attributes = Sequence[Mapping[str, Any]]  # of each quantity, those that a step sets


def copies_of(quantities: Sequence[Quantity]) -> list[Quantity]:
    """Copies quantities, for a second run to fill."""
    return [copy.copy(quantity) for quantity in quantities]


def check_graph(
    losses: tuple[Tensor, Tensor],
    quantities: Sequence[Quantity],
    certified: Sequence[Quantity],
    attributes: Attributes,
    dtype: torch.dtype,
) -> None:
    """Raises where results of a graph are not those of certified quantities, sample by sample.

    Args:
        losses: of the graph, and of the certified run.
        quantities: filled by the graph.
        certified: the same ones, filled by the certified run.
        attributes: the attributes of each that a step sets.
        dtype: the coarsest that the step computed in.
    """
    judge = Judge(dtype)
    own, other = _tensors(losses[0]), _tensors(losses[1])
    size = len(other[0])
    problems = _differences("the losses", own, other, size, judge)
    for found, wanted, names in zip(quantities, certified, attributes, strict=True):
        for name in names:
            own, other = _tensors(vars(found)[name]), _tensors(vars(wanted)[name])
            problems += _differences(type(found).__name__, own, other, size, judge)
    if problems:
        raise PergradError(
            "the compiled step is wrong: its results are not those of the certified, uncompiled one: "
            + "; ".join(dict.fromkeys(problems))
        )


def _tensors(value: Any) -> list[Tensor]:
    return [t.detach() for t in leaves(value) if isinstance(t, Tensor)]


def _differences(
    what: str, found: Sequence[Tensor], wanted: Sequence[Tensor], size: int, judge: Judge
) -> list[str]:
    if len(found) != len(wanted):
        return [f"{what}: {len(found)} tensors, not {len(wanted)}"]
    worst = max(
        (error for a, b in zip(found, wanted, strict=True) for error in _errors(a, b, size, judge)),
        key=lambda error: float("inf") if error != error else error,
        default=0.0,
    )
    return [] if worst <= judge.tolerance_of_reports else [f"{what} differ by {worst:.1e}"]


def _errors(found: Tensor, wanted: Tensor, size: int, judge: Judge) -> Iterator[float]:
    if not (wanted.is_floating_point() or wanted.is_complex()) or found.shape != wanted.shape:
        yield 0.0 if torch.equal(found, wanted) else float("inf")
        return
    is_finite = wanted.isfinite()
    if not torch.equal(found.isfinite(), is_finite):
        yield float("inf")
        return
    found, wanted = found.where(is_finite, 0), wanted.where(is_finite, 0)
    most = float(wanted.abs().max()) if wanted.numel() else 0.0
    by_sample = wanted.dim() > 0 and len(wanted) == size
    rows: Callable[[Tensor], Sequence[Tensor]] = Tensor.unbind if by_sample else lambda t: [t]
    for a, b in zip(rows(found), rows(wanted), strict=True):
        yield judge.error(a, b, most)
