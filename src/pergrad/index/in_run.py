"""Values samples while a model trains: how much each step on a sample moves the loss on validation data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.engine import record
from pergrad.errors import IndexingError
from pergrad.index.subject import in_eval_mode
from pergrad.quantities import Dots

__all__ = ["InRunValues"]


class InRunValues:
    """Σ over steps of lr / B · <g_n, validation gradient>, `.values` (size,): positive for samples that help.

    To first order, a step of plain gradient descent on a batch of B samples lowers the validation loss by
    the sum of these products: each sample gets its share. `.grad` is that of plain training.

    A step that is measured takes longer, since its gradients are needed twice. By default one step in ten
    is measured, drawn at random of each ten, and the validation gradient is computed in one of 40: a
    transformer or a convnet then trains less than a tenth longer (`python -m benchmarks.in_run_cost`), a
    recurrent network longer, which a larger `every` mends. Values are then unbiased estimates of the sum, but
    for the age of the validation gradient. `every=1, refresh=1` gives the sum.

    Args:
        model: the model that is trained.
        loss: called as loss(model, *batch); returns a loss or losses of the validation batch.
        validation: the validation batch, as the arguments of the loss.
        size: the number of samples in the training data.
        every: measure one of so many steps; what is measured counts so many times.
        refresh: compute the validation gradient again after so many steps that are measured.
        seed: random seed for the choice of the steps that are measured.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False))
    >>> loss = lambda model, x, y: (model(x) - y).square().mean()
    >>> x, y = torch.ones(4, 2), torch.tensor([[9.0], [9.0], [9.0], [-9.0]])
    >>> values = InRunValues(model, loss, (x[:1], y[:1]), size=4, every=1)
    >>> batch = x[[0, 3]], y[[0, 3]]
    >>> with values.step([0, 3], lr=0.1):
    ...     loss(model, *batch).backward()
    >>> [round(sign) for sign in values.values.sign().tolist()]
    [1, 0, 0, -1]
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        validation: tuple[Any, ...],
        size: int,
        *,
        every: int = 10,
        refresh: int = 4,
        seed: int = 0,
    ) -> None:
        for name, number in (("size", size), ("every", every), ("refresh", refresh)):
            if not isinstance(number, int) or number < 1:
                raise IndexingError(f"{name} must be a positive integer, got {number!r}")
        self._model, self._loss, self._validation = model, loss, tuple(validation)
        self._every, self._refresh = every, refresh
        self._steps = self._measured = self._chosen = 0
        self._draws = random.Random(seed)
        self._direction: dict[str, Tensor] = {}
        self.values = torch.zeros(size, dtype=torch.float64)
        self.counts = torch.zeros(size, dtype=torch.long)  # steps in which a sample was measured

    @contextmanager
    def step(self, indices: Iterable[int] | Tensor, lr: float = 1.0) -> Iterator[None]:
        """Values one batch: its forward and backward pass are in the block, the optimizer's step after it.

        Args:
            indices: the samples of the batch, in order, as indices of the training data.
            lr: the learning rate of this step.
        """
        place, self._steps = self._steps % self._every, self._steps + 1
        if place == 0:
            # At random: always the same one would never measure some samples if their order repeats.
            self._chosen = self._draws.randrange(self._every)
        if place != self._chosen:
            yield
            return
        chosen = _integers(indices)
        if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < len(self.values):
            raise IndexingError(
                f"indices lie from {int(chosen.min())} to {int(chosen.max())}, and the training data has "
                f"{len(self.values)} samples"
            )
        if self._measured % self._refresh == 0:
            self._direction = self._gradient()
        self._measured += 1
        dots = Dots(self._direction)
        with record(self._model, dots, keep_grad=True, batch_size=len(chosen)):
            yield
        share = lr * self._every / max(1, len(chosen))
        self.values.index_add_(0, chosen, dots.result.double().cpu() * share)
        self.counts.index_add_(0, chosen, torch.ones_like(chosen))

    def _gradient(self) -> dict[str, Tensor]:
        """Returns the gradient of the mean validation loss, in eval mode; `.grad` is not touched."""
        names = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        with in_eval_mode([self._model]), torch.enable_grad():
            loss = self._loss(self._model, *self._validation).mean()
            found = torch.autograd.grad(loss, [p for _, p in names], allow_unused=True)
        return {name: g for (name, _), g in zip(names, found, strict=True) if g is not None}


def _integers(indices: Iterable[int] | Tensor) -> Tensor:
    """Returns indices on the CPU; refuses what is no integer, such as a mask, which torch would convert."""
    found = torch.as_tensor(indices if isinstance(indices, Tensor) else list(indices)).cpu()
    is_wrong = found.is_floating_point() or found.is_complex() or found.dtype == torch.bool
    if found.dim() != 1 or (found.numel() and is_wrong):
        raise IndexingError(
            f"indices must be the numbers of the samples, (n,) integers, got {found.dtype} of shape "
            f"{tuple(found.shape)}"
        )
    return found.long()
