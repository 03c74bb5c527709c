"""Defines `ClippedSum`: sums of clipped, or otherwise weighted, per-sample gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from pergrad.distributed.groups import Summing
from pergrad.distributed.pipelines import PIPELINES
from pergrad.errors import PergradError
from pergrad.quantities.base import Batch, SampleReport, norms_of, or_zeros
from pergrad.quantities.sums import AssignableSum
from pergrad.reductions import SampleGradients, SquaredNorms, weighted_sums
from pergrad.runtime import computed_once, wide

__all__ = ["ClippedSum"]

Weighting = Literal["clip", "normalize"] | Callable[[Tensor], Tensor]
_WEIGHTINGS = ("clip", "normalize")
Memory = Literal["kept", "low", "high"]
_MEMORY = get_args(Memory)
_Weighed: TypeAlias = tuple[list[str], Tensor, Tensor, float]  # names, norms, weights, margin


class ClippedSum(AssignableSum[Any]):
    """Σ_n min(1, max_norm / |g_n|) g_n: `.result[name]` of the parameter's shape, in float32 or float64.

    `.norms` are the norms before clipping, (B,); `.assign()` writes the result to the parameters' `.grad`, in
    their dtype, and `.assign(add=True)` adds it. A sample whose gradient is not finite adds nothing. `a += b`
    adds the sums and concatenates the norms.

    The norm of the result is at most B · max_norm, whatever the dtype of the parameters; only `assign` rounds
    it to less than float32. What a sample adds has at most the norm max_norm, up to the rounding of its norm:
    a relative 1e-6 in float32, 1e-15 in float64. For this, weights below 1 are smaller than max_norm / |g_n|,
    by a relative (4 + B / 2) · eps of the result's dtype, which is what a sum of B terms may round. A GPU
    multiplies gradients in half precision by their weights in that precision: there, such weights are
    smaller by its eps too (0.8 % in bfloat16, 0.1 % in float16).

    Args:
        max_norm: the bound on the norm of each sample's gradient; or bounds by patterns of names, such as
            `{"encoder.*": 1.0, "head.*": 0.5}`: the parameters of a pattern (the first that matches)
            are then clipped by their joint norm, separately from the others.
        weighting: "clip"; "normalize" for max_norm / (|g_n| + stability), which needs no tuning of the
            bound (automatic clipping); or a function from norms (B,) to weights (B,).
        stability: the constant of "normalize".
        memory: "kept" runs one backward and keeps activations and their gradients until all norms are
            known. "low" keeps nothing and runs the backward twice, which saves memory on a CPU and in
            MLPs. "high" keeps float32 gradients of all samples, which is the fastest if they fit into
            memory. The results are the same; but with "low", hooks on tensors are called twice, and
            `retain_grad` accumulates twice the gradient.
        accumulate: add the sums of further blocks, and append their norms.
        total: the number of samples of the whole sum, where blocks are parts of it: weights leave room for
            what a sum of so many may round.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> with pergrad.record(model, pergrad.ClippedSum(1.0)) as clipped:
    ...     model(torch.tensor([[3.0, 4.0], [0.5, 0.0]])).sum().backward()
    >>> clipped.result["weight"], clipped.norms
    (tensor([[1.1000, 0.8000]]), tensor([5.0000, 0.5000]))
    """

    priority: ClassVar[int] = 1

    def __init__(
        self,
        max_norm: float | Mapping[str, float] | None = None,
        *,
        weighting: Weighting = "clip",
        stability: float = 0.01,
        memory: Memory = "kept",
        accumulate: bool = False,
        total: int | None = None,
    ) -> None:
        super().__init__(accumulate=accumulate)
        if total is not None and (not isinstance(total, int) or total < 1):
            raise PergradError(f"total must be a positive number of samples, got {total!r}")
        bounds = dict(max_norm) if isinstance(max_norm, Mapping) else {"*": max_norm}
        for pattern, bound in bounds.items():
            if bound is None and callable(weighting):
                continue
            if not isinstance(bound, int | float) or not bound > 0:
                raise PergradError(
                    f"max_norm must be a positive number, got {bound!r} for {pattern!r}"
                )
        if not stability >= 0:
            raise PergradError(f"stability must not be negative, got {stability!r}")
        if not callable(weighting) and weighting not in _WEIGHTINGS:
            raise PergradError(
                f"weighting must be one of {_WEIGHTINGS} or a function of the norms, got {weighting!r}"
            )
        if memory not in _MEMORY:
            raise PergradError(f"memory must be one of {_MEMORY}, got {memory!r}")
        self._weighed: dict[str, _Weighed] = {}  # by pattern
        self._bounds = bounds
        self._weighting = weighting
        self._stability = stability
        self._memory = memory
        self._total = total
        self.passes = 2 if memory == "low" else 1

    @property
    def result(self) -> dict[str, Tensor]:
        sums, _ = self._of_ended(self._result)
        dtypes = {name: wide(self._parameters[name].dtype) for name in sums}
        return {  # `to` is slow even if there is nothing to do
            name: t if t.dtype is dtypes[name] else t.to(dtypes[name]) for name, t in sums.items()
        }

    @property
    def norms(self) -> Tensor:
        norms: Tensor = self._of_ended(self._result)[1]
        return norms

    def _sums(self) -> dict[str, Tensor]:
        return self.result

    @property
    def settings(self) -> tuple[Any, ...]:
        # The order matters: the first pattern that matches counts.
        return (list(self._bounds.items()), self._weighting, self._stability)

    def _shown_settings(self) -> list[str]:
        bound = next(iter(self._bounds.values())) if [*self._bounds] == ["*"] else self._bounds
        shown = [] if bound is None else [str(bound)]
        if self._weighting != "clip":
            name = getattr(self._weighting, "__name__", self._weighting)
            shown.append(f"weighting={name!r}" if name == self._weighting else f"weighting={name}")
        if self._memory != "kept":
            shown.append(f"memory={self._memory!r}")
        return [*shown, *super()._shown_settings()]

    # -- the backward

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        if batch.spread.pipeline is not None and self.passes > 1:
            raise PergradError(
                f'memory="low" runs the backward of a stage twice, which {PIPELINES} does not: use '
                'memory="kept" or "high"'
            )
        for name in batch.parameters:
            pattern = next((p for p in self._bounds if fnmatchcase(name, p)), None)
            if pattern is None:
                raise PergradError(
                    f"no bound for parameter {name!r}: none of the patterns {list(self._bounds)} "
                    "matches it; add one, or '*' for all others"
                )
            if pattern not in self._groups:
                norms = SquaredNorms(
                    batch.queue,
                    keeps_factors=self._memory != "low",
                    as_gradients=self._memory == "high",
                )
                self._groups[pattern] = _Group(self._bounds[pattern], norms)
            group = self._group_of[name] = self._groups[pattern]
            group.missing += 1

    def clear(self) -> None:
        self._totals: dict[str, Tensor] = {}
        self._groups: dict[str, _Group] = {}  # by pattern
        self._group_of: dict[str, _Group] = {}  # by parameter

    def consume(self, name: str, gradients: SampleGradients) -> None:
        group = self._group_of[name]
        if gradients.dtype in (torch.bfloat16, torch.float16):
            group.rounding = max(group.rounding, torch.finfo(gradients.dtype).eps)
        if group.weights is not None:  # the second backward
            self._add(name, gradients.weighted_sum(group.weights))
            return
        if self.passes == 1:
            group.kept[name] = gradients
        group.norms.add(name, gradients)
        group.missing -= 1
        is_local = self._spread.shards is None and not self._spread.is_joined
        if self.passes == 1 and not group.missing and is_local:
            self._finish(group)

    def sum_over_ranks(self, name: str) -> None:
        if self.passes > 1:  # else the sums are made when the block ends
            self._totals[name] = self.shard_of_sum(name, self._totals.get(name))

    def end_pass(self) -> None:
        for group in self._groups.values():
            self._weigh(group)

    def _weigh(self, group: _Group) -> None:
        """Computes the weights of a group whose norms are complete, if any gradient reached it."""
        if group.weights is not None:
            return
        if group.squares is None:
            names, found = group.norms.found()
            if found is None:
                return
            group.squares = self._spread.joined(names, found).sum(0)
        # A kernel of its own: one that sums two rows and stores roots in two types crashed Triton 3.6.
        group.squares = computed_once(group.squares)
        norms = group.squares.sqrt()
        margin = self._margin(group.rounding)
        group.weights = computed_once(self._applied(norms, group.bound, margin))
        group.margin = margin

    def _margin(self, rounding: float) -> float:
        """Returns how far weights stay below the bound.

        Rounding must push neither a gradient over its bound nor the sum over that of all samples.
        """
        samples = max(self.batch.size, self._total or 0)
        margin = (4 + samples / 2) * torch.finfo(self.batch.dtype).eps
        return margin + rounding if self.batch.device.type == "cuda" else margin

    def _applied(self, norms: Tensor, bound: float | None, margin: float) -> Tensor:
        """Computes the weights of samples from their norms; zero for a gradient that is not finite."""
        weights = self._weights(norms, bound, margin)
        if not isinstance(weights, Tensor) or weights.shape != norms.shape:
            is_tensor = isinstance(weights, Tensor)
            got = f"shape {tuple(weights.shape)}" if is_tensor else type(weights).__name__
            raise PergradError(
                f"weighting must return one weight for each of {len(norms)} samples, got {got}"
            )
        weights = weights.detach().to(norms)
        # A zero gradient stays zero even if its weight is infinite, as 1 / norm is.
        is_used = norms.isfinite() & ((norms > 0) | weights.isfinite())
        return weights.where(is_used, 0)

    def _weights(self, norms: Tensor, bound: float | None, margin: float) -> Tensor:
        if callable(self._weighting):
            return self._weighting(norms)
        assert bound is not None
        safe = (1 - margin) * bound
        if self._weighting == "normalize":
            return safe / (norms + self._stability)
        return (safe / norms).where(norms > bound, 1)

    def _join_stages(self, zeros: Tensor) -> Tensor:
        """Adds the norms of the other stages of a pipeline; returns those of groups that this one lacks."""
        own = []
        for pattern in self._bounds:
            group = self._groups.get(pattern)
            names, found = ([], None) if group is None else group.norms.found()
            own.append(zeros if found is None else self._spread.joined(names, found).sum(0))
        of_others = zeros
        for pattern, squares in zip(
            self._bounds, self._spread.over_stages(torch.stack(own)), strict=True
        ):
            if pattern in self._groups:
                self._groups[pattern].squares = squares
            else:
                of_others = of_others + squares
        return of_others

    def _finish(self, group: _Group) -> None:
        self._weigh(group)
        shards = self._spread.shards
        if shards is not None and self.passes == 1:
            names = [name for name, own in self._group_of.items() if own is group]
            for some in shards.groups_of(names):  # one module's at a time, which is less memory
                kept = {name: group.kept.pop(name) for name in some if name in group.kept}
                self._add_sums(kept, group.weights)
                for name in some:
                    self._totals[name] = self.shard_of_sum(name, self._totals.get(name))
        self._add_sums(group.kept, group.weights)

    def _add_sums(self, kept: dict[str, SampleGradients], weights: Tensor | None) -> None:
        if weights is not None:
            for name, total in weighted_sums(kept, weights):
                self._add(name, total)

    def _add(self, name: str, total: Tensor) -> None:
        self._totals[name] = self.batch.stored(total)

    def finish(self) -> tuple[dict[str, Tensor], Tensor]:
        batch = self.batch
        squares = torch.zeros(batch.size, dtype=torch.float64, device=batch.device)
        of_others = self._join_stages(squares) if self._spread.pipeline is not None else squares
        self._weighed = {}
        for pattern, group in self._groups.items():
            self._finish(group)
            if group.squares is not None and group.weights is not None:
                squares = squares + group.squares
                names = [name for name, own in self._group_of.items() if own is group]
                self._weighed[pattern] = (
                    names,
                    group.squares.sqrt(),
                    group.weights,
                    group.margin,
                )
        sums = or_zeros(self._totals, batch, of_shards=True)
        squares = squares + of_others
        return sums, batch.stored(squares.sqrt().to(batch.dtype))

    def sample_report(self, number: int, gradient: Mapping[str, Tensor]) -> SampleReport:
        found = [self.norms[number].double()]
        expected = [norms_of(gradient).norm()]
        for pattern, (names, norms, weights, margin) in self._weighed.items():
            own = norms.clone()
            own[number] = norms_of({name: gradient[name] for name in names}).norm()
            wanted = self._applied(own, self._bounds[pattern], margin)
            for reported, right in ((norms, own), (weights * norms, wanted * own)):
                found.append(reported[number].double())
                expected.append(right[number].double())
        device = found[0].device
        return SampleReport(
            torch.stack([t.to(device) for t in found]),
            torch.stack([t.to(device) for t in expected]),
        )

    def reduced(self, group: Summing) -> tuple[dict[str, Tensor], Tensor]:
        return group.sum(self.result), self.norms

    def merge(self, other: ClippedSum) -> None:
        sums, norms = self._of_ended(self._result)
        others, more = other._of_ended(other._result)
        self._weighed = {}  # of one batch alone
        self._is_assigned = False
        self._result = (
            {name: total + others[name] for name, total in sums.items()},
            torch.cat([norms, more]),
        )


class _Group:
    """Holds the state of parameters that are clipped by their joint norm."""

    def __init__(self, bound: float | None, norms: SquaredNorms) -> None:
        self.bound = bound
        self.rounding = 0.0  # eps of the coarsest half precision among its gradients
        self.missing = 0  # parameters whose gradients have not arrived
        self.kept: dict[str, SampleGradients] = {}
        self.norms = norms
        self.squares: Tensor | None = None  # of all its parameters
        self.weights: Tensor | None = None
        self.margin = 0.0  # see `ClippedSum._margin`
