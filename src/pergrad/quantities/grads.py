"""The per-sample gradients themselves."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pergrad.errors import ScopeError
from pergrad.factors import Factor, add_up
from pergrad.quantities.base import Batch, Quantity

__all__ = ["Grads"]


class Grads(Quantity):
    """G_n of every recorded parameter: `.result[name]` is (B, *shape), in the parameter's dtype.

    A parameter that the loss does not reach has zeros.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> with pergrad.record(model, pergrad.Grads()) as grads:
    ...     model(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    >>> grads.result["weight"]
    tensor([[[1., 2.]],
    <BLANKLINE>
            [[3., 4.]]])
    """

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._sums: dict[str, Tensor] = {}
        self._result: dict[str, Tensor] | None = None

    @property
    def result(self) -> dict[str, Tensor]:
        if self._result is None:
            raise ScopeError("Grads has no result yet: leave the `record` block first")
        return self._result

    def begin(self, batch: Batch) -> None:
        self._batch, self._sums, self._result = batch, {}, None

    def consume(self, name: str, factors: Sequence[Factor]) -> None:
        assert self._batch is not None
        grads = add_up(factors).to(self._batch.parameters[name].dtype)
        self._sums[name] = self._sums[name] + grads if name in self._sums else grads

    def end(self) -> None:
        assert self._batch is not None
        size = self._batch.size
        self._result = {
            name: self._sums[name] if name in self._sums else p.new_zeros(size, *p.shape)
            for name, p in self._batch.parameters.items()
        }
        self._batch, self._sums = None, {}
