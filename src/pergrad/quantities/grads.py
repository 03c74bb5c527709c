"""Defines `Grads`: the per-sample gradients themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from pergrad.distributed.sharding import is_sharded
from pergrad.quantities.base import Batch, Reduction, SampleReport, joined_samples
from pergrad.reductions import SampleGradients

__all__ = ["Grads"]


def _zeros(size: int, p: Tensor, batch: Batch) -> Tensor:
    return torch.zeros(
        size, *p.shape, dtype=p.dtype, device=batch.device if is_sharded(p) else p.device
    )


class Grads(Reduction[dict[str, Tensor]]):
    """G_n of every recorded parameter: `.result[name]` is (B, *shape), in the parameter's dtype.

    A parameter that the loss does not reach has zeros. `.precision[name]` is the dtype that the gradients
    were computed from, which is coarser under autocast. `a += b` concatenates the samples.

    Args:
        accumulate: append the samples of further blocks.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> with pergrad.record(model, pergrad.Grads()) as grads:
    ...     model(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    >>> grads.result["weight"]
    tensor([[[1., 2.]],
    <BLANKLINE>
            [[3., 4.]]])
    """

    is_linear = True
    sums_samples: ClassVar[bool] = False
    spans_stages: ClassVar[bool] = True
    priority: ClassVar[int] = 0

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self.precision: dict[str, torch.dtype] = {}

    def clear(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def consume(self, name: str, gradients: SampleGradients) -> None:
        batch = self.batch
        self.precision[name] = gradients.dtype
        found = batch.stored(gradients.materialize(batch.parameters[name].dtype))
        self._sums[name] = self._sums[name] + found if name in self._sums else found

    def finish(self) -> dict[str, Tensor]:
        size, sums = self.batch.size, self._sums
        return {
            name: sums[name] if name in sums else self.batch.stored(_zeros(size, p, self.batch))
            for name, p in self.batch.parameters.items()
        }

    def sample_report(self, number: int, gradient: Mapping[str, Tensor]) -> SampleReport:
        found = [self.result[name][number].flatten() for name in gradient]
        return SampleReport(torch.cat(found), torch.cat([g.flatten() for g in gradient.values()]))

    def merge(self, other: Grads) -> None:
        self._result = joined_samples(self.result, other.result)
