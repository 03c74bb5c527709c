"""Defines `Sum`, and how sums of gradients are written to `.grad` for an optimizer to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pergrad.distributed.groups import Ranks, Summing
from pergrad.distributed.sharding import grad_of
from pergrad.errors import ScopeError
from pergrad.quantities.base import Batch, LossUnits, or_zeros
from pergrad.quantities.over_ranks import OverRanks
from pergrad.reductions import SampleGradients
from pergrad.runtime import internals

__all__ = ["AssignableSum", "Sum"]

R = TypeVar("R")
_ASSIGNED = "_pergrad_assigned"  # the attribute of a `.grad` that `assign` wrote
_PROBES = 2  # parameters whose values are kept: fused optimizers write past autograd's versions


class AssignableSum(OverRanks[R]):
    """Holds a sum over the samples for each parameter, of its shape, and writes it to `.grad`."""

    _is_assigned = False

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self._parameters = batch.parameters
        self._units: LossUnits = batch.units
        self._is_assigned = False

    def reset(self) -> None:
        super().reset()
        self._is_assigned = False

    def _sums(self) -> dict[str, Tensor]:
        """Returns what `assign` writes."""
        raise NotImplementedError

    def assign(self, add: bool = False, reduce: bool = False, group: Ranks = None) -> None:
        """Writes the result to the parameters' `.grad`, in their dtype.

        If a gradient scaler (`torch.amp.GradScaler`) has multiplied the loss, its factor is on `.grad`, and
        not on the result: `scaler.step` or `scaler.unscale_` takes it off again.

        Replaces what backward passes have left there. What an earlier `assign` has written and no optimizer
        has stepped on is an error: it would be lost.

        Args:
            add: add to `.grad` instead, for several batches before one step of the optimizer.
            reduce: sum over the ranks first, as `all_reduce` does; every rank must call it.
            group: the ranks to sum over; by default those of the wrapper, or all of the job.
        """
        self._of_ended(self._result)
        if reduce:
            self.all_reduce(group)
        elif not self.is_reduced:
            self._spread.refuse_local(type(self).__name__)
        sums = self._sums()
        parameters = [self._parameters[name] for name in sums]
        if (not add or self._is_assigned) and _are_waiting(parameters):
            raise _again(add)
        probes = {id(p) for p in sorted(parameters, key=Tensor.numel)[:_PROBES]}
        for p, total in zip(parameters, sums.values(), strict=True):
            for scaler in self._units.scalers:
                total = total * scaler.to(total.device)
            if add and p.grad is not None:
                p.grad.add_(grad_of(p, total).to(p.grad.dtype))
            else:
                p.grad = grad_of(p, total)  # a copy: an optimizer may write to it
            setattr(p.grad, _ASSIGNED, _Assigned.of(p, is_probe=id(p) in probes))
        self._is_assigned = True


class _Assigned(NamedTuple):
    """What a parameter was when `assign` wrote its `.grad`."""

    version_of_grad: int
    version: int
    value: Tensor | None  # of a probe

    @classmethod
    def of(cls, p: Tensor, *, is_probe: bool) -> _Assigned:
        assert p.grad is not None
        value = p.detach().clone() if is_probe else None
        return cls(internals.version_of(p.grad), internals.version_of(p), value)


def _are_waiting(parameters: Sequence[Tensor]) -> bool:
    """Whether `.grad` of parameters holds what `assign` wrote, and no optimizer has stepped since."""
    grads = [(p, p.grad, getattr(p.grad, _ASSIGNED, None)) for p in parameters]
    found = [(p, g, mark) for p, g, mark in grads if g is not None and mark is not None]
    if any(mark.version != internals.version_of(p) for p, _, mark in found):
        return False
    if any(
        mark.value is not None and not torch.equal(mark.value, p.detach()) for p, _, mark in found
    ):
        return False
    # `zero_grad(set_to_none=False)` writes to it, and so does whoever scales it or adds noise.
    return any(mark.version_of_grad == internals.version_of(g) or g.any() for _, g, mark in found)


def _again(add: bool) -> ScopeError:
    if add:
        return ScopeError(
            "assign(add=True) was called twice for one result, whose samples would count twice: call it "
            "once for each block"
        )
    return ScopeError(
        "assign() would drop the `.grad` that an earlier assign() wrote, and that no optimizer has stepped "
        "on: write assign(add=True) to accumulate, or call zero_grad() first"
    )


class Sum(AssignableSum[dict[str, Tensor]]):
    """Σ_n g_n: `.result[name]` of the parameter's shape, in float32 or float64.

    If the loss is a sum over the samples, this is what training would have in `.grad`; if it is a mean, B
    times that. `.assign()` writes it there. `record(..., keep_grad=True)` leaves `.grad` itself as training
    would. `a += b` adds the sums.

    Args:
        accumulate: add the sums of further blocks.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> with pergrad.record(model, pergrad.Sum()) as total:
    ...     model(torch.tensor([[3.0, 4.0], [1.0, 0.0]])).sum().backward()
    >>> total.result["weight"]
    tensor([[4., 4.]])
    """

    is_linear = True

    def clear(self) -> None:
        self._totals: dict[str, Tensor] = {}

    def consume(self, name: str, gradients: SampleGradients) -> None:
        found = self.batch.stored(gradients.total())
        self._totals[name] = self._totals[name] + found if name in self._totals else found

    def sum_over_ranks(self, name: str) -> None:
        self._totals[name] = self.shard_of_sum(name, self._totals.get(name))

    def finish(self) -> dict[str, Tensor]:
        return or_zeros(self._totals, self.batch, of_shards=True)

    def _sums(self) -> dict[str, Tensor]:
        return self.result

    def reduced(self, group: Summing) -> dict[str, Tensor]:
        return group.sum(self.result)

    def merge(self, other: Any) -> None:
        self._is_assigned = False
        self._result = {name: a + other.result[name] for name, a in self.result.items()}
