"""Computes the gradient of each sample of a batch by plain autograd, and sees that the samples do not meet.

`Alone` runs each sample by itself. Its loss must be the one that it has in the batch, and the gradients of
all samples must add up to that of the batch. A model that draws random numbers would draw others for a sample
alone: `InTheBatch` runs the batch as it is and pulls back the loss of one sample after the other. Exchanging
samples must not change the losses of the others there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pergrad.engine.looping.plain_run import CannotLoopError, PlainRun
from pergrad.engine.looping.slices import AnySlices, exchanging
from pergrad.engine.looping.snapshots import Snapshot
from pergrad.engine.samples.proving import subsets
from pergrad.runtime.bounds import is_out_of_memory
from pergrad.runtime.tolerances import largest, noise_floor, tolerance_of_model, tolerance_of_rule

__all__ = ["Alone", "EachSample", "InTheBatch"]


class EachSample(ABC):
    """Computes the gradients of one sample after the other; `losses` are those of the batch."""

    def __init__(self, run: PlainRun, slices: AnySlices, losses: Tensor, size: int) -> None:
        self._run = run
        self._slices = slices
        self._losses = losses
        self._size = size
        self._reduction = run.options.loss_reduction
        self._tolerance = max(map(tolerance_of_rule, run.dtypes))  # of a loss
        finite = losses[losses.isfinite()].abs()
        self._typical = finite.median() if len(finite) else losses.new_zeros(())

    def gradients(self, names: Sequence[str]) -> dict[str, Tensor]:  # (n, *shape) of each
        """Returns the gradients of all samples of some parameters."""
        rows: dict[str, Tensor] = {}
        for n, found in enumerate(self._each(names)):
            for name, g in found.items():
                if n == 0:
                    rows[name] = g.new_empty(self._size, *g.shape)
                rows[name][n] = g
        return rows

    @abstractmethod
    def _each(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]: ...

    @abstractmethod
    def check_sums(self, rows: Mapping[str, Tensor], ordinary: Mapping[str, Tensor]) -> None:
        """Raises if the gradients of the samples do not add up to the ordinary ones of the batch."""


class Alone(EachSample):
    """Runs each sample alone: one forward and one backward pass."""

    def _each(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        alone = []
        for n in range(self._size):
            loss = self._loss_of(n)
            alone.append(loss.detach().reshape(()))
            if self._losses.dim() == 1:
                self._check(f"the loss of sample {n} alone is", alone[-1], self._losses[n])
            yield self._run.pulled_back(loss, torch.ones_like(loss), names)
        if self._losses.dim() == 0:
            total = torch.stack(alone).sum()
            if self._reduction == "auto" and self._is_near(total / self._size, self._losses):
                self._reduction = "mean"
            self._check("the samples alone give the loss", total / self._divisor, self._losses)

    def _loss_of(self, n: int) -> Tensor:
        try:
            loss = self._run.forward(self._slices.sample(n))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise CannotLoopError(
                f"loss_fn fails for sample {n} alone: {type(error).__name__}: {error}"
            ) from error
        if isinstance(loss, Tensor) and loss.dim() == 1 and self._run.ownership is not None:
            loss = loss.sum()  # of the rows of the sample
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise CannotLoopError(f"loss_fn returns no loss for sample {n} alone, but {got}")
        return loss

    @property
    def _divisor(self) -> int:
        return self._size if self._reduction == "mean" else 1

    def _check(self, what: str, alone: Tensor, batched: Tensor) -> None:
        """Compares with the loss in the batch; relative to a typical one where that is larger."""
        if self._is_near(alone, batched):
            return
        raise CannotLoopError(
            f"{what} {float(alone):.6g}, in the batch it is {float(batched):.6g}: the samples meet"
        )

    def _is_near(self, alone: Tensor, batched: Tensor) -> bool:
        scale = torch.maximum(batched.abs(), self._typical)
        is_same = bool((alone.to(batched) - batched).abs() <= self._tolerance * scale)
        return is_same or bool(alone == batched) or bool(alone.isnan() & batched.isnan())

    def check_sums(self, rows: Mapping[str, Tensor], ordinary: Mapping[str, Tensor]) -> None:
        """Samples may meet in gradients alone: `x - x.detach()` is zero, and its gradient is not."""
        divisor = 1 if self._losses.dim() else self._divisor
        tolerance = tolerance_of_model(*self._run.dtypes)
        floor = noise_floor(ordinary)
        for name, wanted in ordinary.items():
            if name not in rows:
                continue
            of_samples = rows[name]
            scale = max(largest(of_samples) / divisor, largest(wanted), floor)
            error = largest(of_samples.sum(0) / divisor - wanted)
            if error > tolerance * scale:
                raise CannotLoopError(
                    "the gradients of the samples alone do not add up to that of the batch: parameter "
                    f"{name!r} is off by {error / scale:.1e}, so the samples meet"
                )


class InTheBatch(EachSample):
    """Pulls back the losses of the batch one by one, with the random numbers of the batch."""

    def __init__(
        self, run: PlainRun, slices: AnySlices, losses: Tensor, size: int, after: Snapshot
    ) -> None:
        super().__init__(run, slices, losses, size)
        if losses.dim() == 0:
            raise CannotLoopError(
                "the model draws random numbers, and a scalar loss does not tell the samples apart: let "
                "loss_fn return the (B,) losses of the samples"
            )
        if not bool(losses.isfinite().all()):
            raise CannotLoopError(
                "the model draws random numbers, and some losses are not finite, which would reach the "
                "gradients of all samples"
            )
        if size > 1:
            self._check_apart(after)

    def _check_apart(self, after: Snapshot) -> None:
        sources = self._slices.sources()
        if sources is None:
            raise CannotLoopError(
                "the model draws random numbers and all samples are the same, so whether they meet cannot "
                "be tried"
            )
        limit = self._tolerance * torch.maximum(self._losses.abs(), self._typical)
        for exchanged in subsets(self._size):
            origin = exchanging(self._slices, exchanged, sources)
            found = self._run.forward(self._slices.taken_from(origin)).detach()
            if self._run.ownership is not None:
                found = self._run.ownership.summed(found)
            if not after.draws_as(Snapshot(self._run.model)):
                raise CannotLoopError(
                    "the random numbers that the model draws depend on its samples"
                )
            is_same = (found - self._losses).abs() <= limit
            is_same |= (found == self._losses) | (found.isnan() & self._losses.isnan())
            moved = (~is_same.cpu() & ~exchanged).nonzero().flatten().tolist()
            if moved:
                raise CannotLoopError(
                    f"exchanging other samples changes the losses of {moved[:8]}: the samples meet"
                )

    def _each(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        losses = self._run.forward(self._run.batch)
        for n in range(self._size):
            only = torch.zeros_like(losses)
            only[n] = 1
            yield self._run.pulled_back(losses, only, names, retain_graph=n < self._size - 1)

    def check_sums(self, rows: Mapping[str, Tensor], ordinary: Mapping[str, Tensor]) -> None:
        pass  # they add up: all come from one graph
