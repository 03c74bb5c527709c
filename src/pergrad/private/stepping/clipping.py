"""Builds the clipped sum of a plan for the parameters of a model."""

from __future__ import annotations

import glob
import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from pergrad.errors import PrivacyError
from pergrad.private.drawing.streams import Stream
from pergrad.private.planning.plan import Adaptive, Plan
from pergrad.private.planning.plan_checks import LEAST_BOUND
from pergrad.quantities import ClippedSum

__all__ = ["Bound", "bounds_for"]


def bounds_for(plan: Plan, names: Iterable[str]) -> float | dict[str, float]:
    """Returns the bounds of a plan on these parameters; their joint sensitivity is the plan's."""
    names = list(names)
    if isinstance(plan.max_norm, Mapping):
        used = set()
        for name in names:
            pattern = next((p for p in plan.max_norm if fnmatchcase(name, p)), None)
            if pattern is None:
                raise PrivacyError(
                    f"no bound of the plan matches parameter {name!r}: there are {list(plan.max_norm)}; add "
                    "a pattern, or '*' for all others"
                )
            used.add(pattern)
        idle = [pattern for pattern in plan.max_norm if pattern not in used]
        if idle:
            raise PrivacyError(
                f"max_norm has bounds that no trained parameter is left for ({', '.join(map(repr, idle))}), "
                "and the noise is as large as if they were used: leave them out, or correct the pattern; "
                "the first one that matches counts"
            )
        return dict(plan.max_norm)
    if plan.clipping != "per-layer":
        return float(plan.max_norm)
    layers = dict.fromkeys(name.rpartition(".")[0] for name in names)
    bound = plan.max_norm / math.sqrt(len(layers))
    inner = {f"{glob.escape(layer)}.*": bound for layer in layers if layer}
    # The deepest first: "block.*" also matches what is in its inner modules. "*" is the model's own.
    ordered = dict(sorted(inner.items(), key=lambda item: -item[0].count(".")))
    return ordered | ({"*": bound} if "" in layers else {})


class Bound:
    """The bound of a run: fixed, or moved to a quantile of the norms by a noisy count.

    is_fixed: whether the bound cannot move, as in a compiled step.
    prefix: of the names of parameters where they are recorded.
    """

    def __init__(
        self, plan: Plan, names: Iterable[str], *, is_fixed: bool, prefix: str = ""
    ) -> None:
        self._plan = plan
        self._adaptive = plan.clipping if isinstance(plan.clipping, Adaptive) else None
        if self._adaptive is not None and is_fixed:
            raise PrivacyError(
                "an adaptive bound moves at each step, but a compiled step keeps the bound that it was "
                "traced with: use backend=None"
            )
        found = bounds_for(plan, names)
        self._bounds = (
            {prefix + pattern: bound for pattern, bound in found.items()}
            if isinstance(found, dict)
            else found
        )
        # A public number: how far a weight stays below the bound must not depend on the batch.
        self._total = math.ceil(plan.expected_batch_size or 1)
        self._moved = 1.0  # factor of an adaptive bound

    @property
    def sensitivity(self) -> float:
        return self._plan.sensitivity * self._moved

    def clipped_sum(self) -> ClippedSum:
        if self._plan.clipping == "automatic":
            return ClippedSum(
                self._bounds,
                weighting="normalize",
                stability=self._plan.stability,
                total=self._total,
            )
        bounds = self.sensitivity if self._adaptive is not None else self._bounds
        return ClippedSum(bounds, total=self._total)

    def centred_count(self, norms: Tensor) -> Tensor:
        """Returns Σ_n ([norm below the bound] - ½): every sample adds ±½."""
        if self._adaptive is None:
            return torch.zeros((), dtype=torch.float64, device=norms.device)
        return ((norms <= self.sensitivity).double() - 0.5).sum()

    def move(self, count: Tensor, stream: Stream) -> None:
        """Moves an adaptive bound by the noisy count of samples below it."""
        if self._adaptive is None:
            return
        noise, size = self._plan.count_noise, self._plan.expected_batch_size
        assert noise is not None
        assert size is not None
        if self._plan.noise_multiplier:
            count = count + noise * stream.normals(count)
        share = min(max(float(count) / size + 0.5, 0.0), 1.0)
        moved = self._moved * math.exp(-self._adaptive.rate * (share - self._adaptive.quantile))
        self._moved = max(moved, LEAST_BOUND / self._plan.sensitivity)

    def state_dict(self) -> dict[str, Any]:
        return {"moved": self._moved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._moved = float(state["moved"])
