"""Draws the noise of a step: independent Gaussian, or correlated over steps by a banded matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pergrad.errors import PrivacyError
from pergrad.private.drawing.streams import Streams
from pergrad.private.planning.banded import coefficients
from pergrad.private.planning.plan import Plan

__all__ = ["Noise"]


class Noise:
    """Adds noise of one standard deviation to the sums of all parameters.

    With bands, the noise of step t is ẑ_t = (z_t - Σ_j c_j ẑ_{t-j}) / c_0 for fresh z_t: a row of C⁻¹z. It
    takes the memory of `bands` - 1 copies of the parameters.
    """

    def __init__(self, plan: Plan, streams: Streams) -> None:
        self._streams = streams
        self._coefficients = coefficients(plan.bands, plan.steps) if plan.bands > 1 else None
        self._past: list[dict[str, Tensor]] = []  # the last first
        self._next: list[dict[str, Tensor]] = []  # `_past` of the next step

    def added(self, sums: Mapping[str, Tensor], number: int, scale: float) -> dict[str, Tensor]:
        """Returns sums + scale · noise of step `number`."""
        if scale == 0:
            return dict(sums)
        stream = self._streams("noise", number)
        fresh = {name: stream.normals(total) for name, total in sums.items()}
        if self._coefficients is not None:
            fresh = self._correlated(fresh)
        return {name: total.add(fresh[name], alpha=scale) for name, total in sums.items()}

    def _correlated(self, fresh: dict[str, Tensor]) -> dict[str, Tensor]:
        assert self._coefficients is not None
        first, *others = self._coefficients
        for past, c in zip(self._past, others, strict=False):
            for name, z in fresh.items():
                z.sub_(past[name], alpha=c)
        for z in fresh.values():
            z.div_(first)
        self._next = [fresh, *self._past][: len(others)]
        return fresh

    def commit(self) -> None:
        """Moves on to the next step; until then, `added` can be repeated."""
        self._past = self._next

    def state_dict(self) -> dict[str, Any]:
        return {"past": [dict(past) for past in self._past]}

    def load_state_dict(self, state: Mapping[str, Any], like: Mapping[str, Tensor]) -> None:
        past = state["past"]
        for kept in past:
            if kept.keys() != like.keys():
                raise PrivacyError("the noise of this state belongs to other parameters")
        self._past = self._next = [
            {name: z.to(like[name].device) for name, z in kept.items()} for kept in past
        ]
