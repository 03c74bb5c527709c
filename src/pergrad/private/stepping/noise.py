"""Draws the noise of a step: independent Gaussian, on an integer grid, or correlated over steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pergrad.distributed.sharding import is_sharded
from pergrad.errors import PrivacyError
from pergrad.private.drawing.discrete import DEVIATION, discrete_normals
from pergrad.private.drawing.streams import Stream, Streams
from pergrad.private.planning.banded import coefficients
from pergrad.private.planning.plan import Plan

__all__ = ["Noise", "local_of"]

_ROUNDING = 1.001  # how much more than ½ the rounding of a quotient may be


class Noise:
    """Adds noise of one standard deviation to the sums of all parameters, to each real number of them.

    With bands, the noise of step t is ẑ_t = (z_t - Σ_j c_j ẑ_{t-j}) / c_0 for fresh z_t: a row of C⁻¹z. It
    takes the memory of `bands` - 1 copies of the parameters. A sharded sum gets the noise of each shard from
    a stream of its own; ranks that hold the same shard draw the same.
    """

    def __init__(self, plan: Plan, streams: Streams) -> None:
        self._streams = streams
        self._is_discrete = plan.noise == "discrete"
        self._multiplier = plan.gradient_noise_multiplier
        self._coefficients = coefficients(plan.bands, plan.steps) if plan.bands > 1 else None
        self._past: list[dict[str, Tensor]] = []  # the last first
        self._next: list[dict[str, Tensor]] = []  # `_past` of the next step

    def added(
        self, sums: Mapping[str, Tensor], number: int, scale: float, run: str = ""
    ) -> dict[str, Tensor]:
        """Returns sums + scale · noise of step `number`, as new tensors.

        run: names the batches and the optimizer's settings: other ones never get the same noise.
        """
        if scale == 0:
            return dict(sums)
        purpose = f"noise {run}" if run else "noise"
        shards = {name: _shard_of(t) for name, t in sums.items()}
        by_shard = {shard: self._streams(purpose + shard, number) for shard in shards.values()}
        streams = {name: by_shard[shard] for name, shard in shards.items()}
        if self._is_discrete:
            return self._on_grid(sums, streams, scale)
        fresh = {name: streams[name].normals(_real(t)) for name, t in sums.items()}
        if self._coefficients is not None:
            fresh = self._correlated(fresh)
        return {name: _like(t, _real(t).add(fresh[name], alpha=scale)) for name, t in sums.items()}

    def _on_grid(
        self, sums: Mapping[str, Tensor], streams: Mapping[str, Stream], scale: float
    ) -> dict[str, Tensor]:
        """Rounds sums to multiples of a step, and adds integers: no bit of the result is unsafe.

        Rounding d numbers may move neighbouring sums apart by √d steps; the step is so much larger that the
        noise, of DEVIATION steps, covers it.
        """
        numbers = sum((2 if t.is_complex() else 1) * t.numel() for t in sums.values())
        steps = DEVIATION / self._multiplier - _ROUNDING * math.sqrt(numbers)  # of the bound
        if steps < DEVIATION / self._multiplier / 2:
            raise PrivacyError(
                f"{numbers} numbers with noise_multiplier {self._multiplier:g} are too many for a grid of "
                f"{DEVIATION} steps: use noise='gaussian'"
            )
        step = scale / self._multiplier / steps
        found = {}
        for name, t in sums.items():
            here = _real(t)
            places = (here.double() / step).round().long()
            drawn = discrete_normals(streams[name], here.numel()).to(here.device).view(here.shape)
            found[name] = _like(t, ((places + drawn).double() * step).to(here.dtype))
        return found

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
            if not kept.keys() <= like.keys() or any(
                z.shape != _real(like[name]).shape for name, z in kept.items()
            ):
                raise PrivacyError(
                    "the noise of this state belongs to other parameters: load it into a Step of the model "
                    "that it was saved with"
                )
        self._past = self._next = [
            {name: z.to(like[name].device) for name, z in kept.items()} for kept in past
        ]


def local_of(t: Tensor) -> Tensor:
    """Returns the part of a tensor that is on this rank."""
    if not is_sharded(t):
        return t
    local: Tensor = t.to_local()  # type: ignore[attr-defined]
    return local


def _real(t: Tensor) -> Tensor:
    t = local_of(t.detach())
    return torch.view_as_real(t) if t.is_complex() else t


def _like(t: Tensor, numbers: Tensor) -> Tensor:
    """Returns numbers as a tensor of the kind of `t`: complex, or sharded."""
    numbers = torch.view_as_complex(numbers) if t.is_complex() else numbers
    if not is_sharded(t):
        return numbers
    made: Any = torch.empty_like(t)
    made.to_local().copy_(numbers)
    return made


def _shard_of(t: Tensor) -> str:
    """Names the part of a tensor that is on this rank, the same on all ranks that hold it."""
    if not is_sharded(t):
        return ""
    where = t.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    places = zip(where, t.placements, strict=True)  # type: ignore[attr-defined]
    return " shard " + "-".join(str(k) for k, place in places if place.is_shard())
