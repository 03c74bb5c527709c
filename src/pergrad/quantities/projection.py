"""Defines `Projection`: sketches that preserve inner products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from pergrad.errors import PergradError
from pergrad.factors import Dense
from pergrad.quantities.base import Batch, Reduction, SampleReport
from pergrad.reductions import CountSketch, SampleGradients, TwoSidedSketch

__all__ = ["Projection"]

_METHODS = ("count", "two_sided")


class Projection(Reduction[Tensor]):
    """A sketch s_n of each gradient, `.result` (B, dim): the expected <s_n, s_m> is <g_n, g_m>.

    A seed determines the linear map, on any device and for any batches. Neither the gradients nor a
    projection matrix are ever held. `a += b` concatenates the samples.

    Args:
        dim: the length of a sketch; inner products have an error of about |g_n| |g_m| √(2 / dim).
        seed: selects the linear map.
        method: "count" adds every entry of the gradient, with a random sign, to one of `dim` buckets.
            "two_sided" multiplies the gradient of a matrix by random signs from both sides, to (a, b) with
            a · b = dim; it is faster for wide layers, but has a larger error if a gradient has low rank.
            Both sketch vectors by "count".
        accumulate: append the samples of further blocks.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(100, 10)
    >>> x = torch.randn(4, 100)
    >>> with pergrad.record(model, pergrad.Projection(4096), pergrad.Norms()) as (sketch, norms):
    ...     model(x).square().sum().backward()
    >>> bool((sketch.result.norm(dim=1) / norms.result - 1).abs().max() < 0.2)
    True
    """

    is_linear = True
    sums_samples: ClassVar[bool] = False
    spans_stages: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        seed: int = 0,
        *,
        method: Literal["count", "two_sided"] = "count",
        accumulate: bool = False,
    ) -> None:
        super().__init__(accumulate=accumulate)
        if not isinstance(dim, int) or dim < 1:
            raise PergradError(f"dim must be a positive integer, got {dim!r}")
        if method not in _METHODS:
            raise PergradError(f"method must be one of {_METHODS}, got {method!r}")
        self._dim = dim
        self._seed = seed
        self._method = method
        self._sketches: dict[
            tuple[str, torch.Size, torch.device], CountSketch | TwoSidedSketch
        ] = {}

    @property
    def settings(self) -> tuple[Any, ...]:
        return (self._dim, self._seed, self._method)

    def _shown_settings(self) -> list[str]:
        own = [str(self._dim), f"seed={self._seed}", f"method={self._method!r}"]
        return [*own, *super()._shown_settings()]

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self._total = torch.zeros(batch.size, self._dim, dtype=batch.dtype, device=batch.device)

    def consume(self, name: str, gradients: SampleGradients) -> None:
        sketch = self._sketch_of(name, torch.Size(gradients.shape), self._total.device)
        self._total = self._total + gradients.sketch(sketch)

    def _sketch_of(
        self, name: str, shape: torch.Size, device: torch.device
    ) -> CountSketch | TwoSidedSketch:
        """Returns the linear map of the parameter, made once."""
        key = (name, shape, device)
        if key not in self._sketches:
            is_matrix = len(shape) > 1 and self._method == "two_sided"
            kind = TwoSidedSketch if is_matrix else CountSketch
            self._sketches[key] = kind.of(name, shape, self._dim, self._seed).to(device)
        return self._sketches[key]

    def finish(self) -> Tensor:
        spread = self.batch.spread
        spread.refuse_shared_names(self.batch.parameters, "Projection")
        return self.batch.stored(spread.over_stages(self._total))

    def sample_report(self, number: int, gradient: Mapping[str, Tensor]) -> SampleReport:
        own = torch.zeros(1, self._dim, dtype=torch.float64)
        for name, g in gradient.items():
            alone = SampleGradients([Dense(g[None])], bound=g.nbytes)
            own = own.to(g.device) + alone.sketch(self._sketch_of(name, g.shape, g.device))
        return SampleReport(self.result[number], own[0])

    def merge(self, other: Projection) -> None:
        self._result = torch.cat([self.result, other.result])
