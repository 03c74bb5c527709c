"""Runs one batch through one model repeatedly: whole, sample by sample, or with one sample changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.distributed.placing import whole_of
from pergrad.engine.collecting.journal import Journal
from pergrad.engine.looping.fallback import Runner
from pergrad.engine.looping.slices import AnySlices, ownership_of_batch, slices_of
from pergrad.engine.looping.snapshots import undisturbed
from pergrad.engine.recording.arguments import map_leaves
from pergrad.engine.recording.loss_units import UnitsOfLoss
from pergrad.engine.recording.options import LossReduction, Options, Owners
from pergrad.engine.recording.running import reduced
from pergrad.quantities import Grads
from pergrad.runtime.tolerances import largest

__all__ = ["Trial"]


class Trial:
    """Runs a batch, one sample of it, or the batch with one sample changed, through a model."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        batch: tuple[Any, ...],
        batch_size: int | None,
        loss_reduction: LossReduction,
        batch_first: bool,
        runner: Runner | None = None,
        owners: Owners | None = None,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.batch = map_leaves(_detached, batch)  # no gradient for the caller's
        self.dim = 0 if batch_first else 1
        self.reduction: LossReduction = loss_reduction
        self.batch_size = batch_size
        self._runner = runner or Runner()
        self._options = Options(batch_size, loss_reduction, batch_first, owners=owners).of(
            self.batch
        )
        self._ownership = ownership_of_batch(loss_fn, self.batch, self._options)
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}

    @contextmanager
    def repeatable(self) -> Iterator[list[str]]:
        """Within, two runs give the same loss, in eval mode if need be; gives notes on that."""
        if self._repeats():
            yield []
            return
        training = {m: m.training for m in self.model.modules()}
        self.model.eval()
        try:
            yield [
                "the model draws random numbers: checked in eval mode"
                if self._repeats()
                else "the model draws random numbers even in eval mode: samples alone draw others"
            ]
        finally:
            for m, was_training in training.items():
                m.training = was_training

    def _repeats(self) -> bool:
        losses = []
        for seed in range(2):
            with torch.no_grad(), undisturbed(self.model):
                torch.manual_seed(seed)
                losses.append(self._loss(self.batch))
        return torch.equal(*losses) or bool(losses[0].isnan())

    def _loss(self, batch: tuple[Any, ...]) -> Tensor:
        losses = self.loss_fn(self.model, *batch)
        if self._ownership is not None and isinstance(losses, Tensor) and losses.dim() == 1:
            losses = self._ownership.summed(losses) if batch is self.batch else losses.sum()
        return reduced(losses, self.reduction)

    def _slices(self, size: int) -> AnySlices:
        return slices_of(self.loss_fn, self.batch, size, self._options)

    def per_sample(self, batch: tuple[Any, ...], journal: Journal | None = None) -> Grads:
        """Records the per-sample gradients of a batch."""
        quantity, told = Grads(), UnitsOfLoss()
        asked = [quantity, told]
        self._runner.run(self.model, self.loss_fn, batch, asked, self._options, journal=journal)
        if self.reduction == "auto":
            self.reduction = "mean" if told.units.how == "mean" else "sum"
        return quantity

    def ordinary(self, batch: tuple[Any, ...]) -> dict[str, Tensor]:
        """Computes the ordinary gradient of a batch's loss by autograd."""
        loss = self._loss(batch)
        found = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        return {
            name: whole_of(torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g)
            for (name, p), g in zip(self.parameters.items(), found, strict=True)
        }

    def _map(self, size: int, change: Callable[[Tensor, int], Tensor]) -> tuple[Any, ...]:
        """Applies `change` to each tensor of the batch that has samples, and to their dimension."""

        def apply(value: Any) -> Any:
            if isinstance(value, Tensor):
                for dim in dict.fromkeys([self.dim, 0] if value.dim() == 1 else [self.dim]):
                    if value.dim() > dim and value.shape[dim] == size:
                        return change(value, dim)
            return value

        mapped: tuple[Any, ...] = map_leaves(apply, self.batch)
        return mapped

    def sample(self, n: int, size: int) -> tuple[Any, ...]:
        """Cuts sample n out of the batch."""
        if self._ownership is not None:
            return tuple(self._slices(size).sample(n))
        return self._map(size, lambda t, dim: t.narrow(dim, n, 1))

    def alone(self, n: int, size: int) -> dict[str, Tensor]:
        """Computes the gradient of sample n, run alone."""
        return self.ordinary(self.sample(n, size))

    def alone_twice(self, n: int, size: int) -> dict[str, Tensor]:
        """Computes the gradient of sample n, run beside a copy of itself.

        In eval mode, torch's batch norm has a wrong backward for one sample and transposed gradients.
        """
        if self._ownership is not None:
            return self.alone(n, size)
        pair = self._map(size, lambda t, dim: t.narrow(dim, n, 1).repeat_interleave(2, dim))
        copies = 2 if self.reduction == "sum" else 1
        return {name: g / copies for name, g in self.ordinary(pair).items()}

    def rounding(self) -> dict[str, float]:
        """Returns the size of gradients that rounding alone explains, for each parameter.

        A relative change of a parameter changes the loss by at most about itself.
        """
        with torch.no_grad(), undisturbed(self.model):
            loss = self._loss(self.batch).abs().item()
        return {
            name: 10 * torch.finfo(p.dtype).eps * loss / (largest(whole_of(p.detach())) or 1.0)
            for name, p in self.parameters.items()
        }

    def with_copy(self, n: int, size: int) -> tuple[Any, ...] | None:
        """Replaces sample n of the batch by one that differs from it; None where all are equal."""
        if self._ownership is not None:
            slices, numbers = self._slices(size), torch.arange(size)
            sources = slices.sources()
            if sources is None or sources[n] == n:
                return None
            return tuple(slices.taken_from(sources.where(numbers == n, numbers)))
        for other in range(size):
            differs = False

            def copied(t: Tensor, dim: int, other: int = other) -> Tensor:
                nonlocal differs
                differs |= not torch.equal(t.select(dim, n), t.select(dim, other))
                t = t.clone()
                t.select(dim, n).copy_(t.select(dim, other))
                return t

            batch = self._map(size, copied)
            if differs:
                return batch
        return None

    def spoilt(self, n: int, size: int) -> tuple[Any, ...] | None:
        """Makes sample n of the batch NaN; None where the batch holds no floating-point numbers.

        Rows that have owners are not made NaN: `with_copy` changes the sample instead.
        """
        if self._ownership is not None:
            return None
        touched = False

        def spoil(t: Tensor, dim: int) -> Tensor:
            nonlocal touched
            if not t.is_floating_point():
                return t
            touched = True
            t = t.detach().clone()
            t.select(dim, n).fill_(torch.nan)
            return t

        batch = self._map(size, spoil)
        return batch if touched else None


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
