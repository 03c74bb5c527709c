"""Defines `Dots` and `Gram`: inner products of gradients with a direction, and with each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from pergrad.errors import PergradError
from pergrad.quantities.base import Batch, Reduction, SampleReport, norms_of, shown
from pergrad.reductions import SampleGradients

__all__ = ["Dots", "Gram"]


class Dots(Reduction[Tensor]):
    """<g_n, direction>, `.result` (B,): how well each sample's gradient aligns with a given direction.

    `direction` maps names of parameters to tensors of their shape; it is zero for parameters that it does
    not name. `a += b` concatenates the samples.

    Args:
        direction: the direction, by name of parameter.
        accumulate: append the samples of further blocks.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> dots = pergrad.Dots({"weight": torch.tensor([[1.0, 0.0]])})
    >>> with pergrad.record(model, dots):
    ...     model(torch.tensor([[3.0, 4.0], [1.0, 0.0]])).sum().backward()
    >>> dots.result
    tensor([3., 1.])
    """

    is_linear = True
    sums_samples: ClassVar[bool] = False
    spans_stages: ClassVar[bool] = True

    def __init__(self, direction: Mapping[str, Tensor], *, accumulate: bool = False) -> None:
        super().__init__(accumulate=accumulate)
        self._direction = dict(direction)

    @property
    def settings(self) -> tuple[Any, ...]:
        return tuple((name, id(t)) for name, t in self._direction.items())

    def _shown_settings(self) -> list[str]:
        return [shown(self._direction), *super()._shown_settings()]

    def begin(self, batch: Batch) -> None:
        _check_names(self._direction, batch, "direction")
        for name, t in self._direction.items():
            if t.shape != batch.parameters[name].shape:
                raise PergradError(
                    f"direction[{name!r}] has shape {tuple(t.shape)}, the parameter has "
                    f"{tuple(batch.parameters[name].shape)}"
                )
        super().begin(batch)
        self._total = torch.zeros(batch.size, dtype=torch.float64, device=batch.device)

    def consume(self, name: str, gradients: SampleGradients) -> None:
        if name in self._direction:
            direction = self._direction[name].to(self.batch.device)
            self._total = self._total + gradients.dots(direction)

    def finish(self) -> Tensor:
        total = self.batch.spread.over_stages(self._total)
        return self.batch.stored(total.to(self.batch.dtype))

    def sample_report(self, number: int, gradient: Mapping[str, Tensor]) -> SampleReport:
        named = {name: gradient[name] for name in self._direction if name in gradient}
        own = [(g * self._direction[name].to(g)).sum().double() for name, g in named.items()]
        lengths = norms_of(named) * norms_of({name: self._direction[name] for name in named}).to(
            norms_of(named)
        )
        return SampleReport(self.result[number], sum(own, torch.zeros(())), float(lengths.sum()))

    def merge(self, other: Dots) -> None:
        self._result = torch.cat([self.result, other.result])


class Gram(Reduction[Tensor]):
    """<g_n, g_m>, `.result` (B, B); with `against`, <g_n, h_m> (B, M) for stored gradients h.

    Args:
        against: gradients of other samples, name -> (M, *shape), such as the result of a `Grads`; zero
            for parameters that it does not name.
        accumulate: append the rows of further blocks; needs `against`.

    With `against`, `a += b` concatenates the rows, if both use the same stored gradients. Without it, the
    inner products across two batches are unknown: record one batch against the `Grads` of the other.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> with pergrad.record(model, pergrad.Gram()) as gram:
    ...     model(torch.tensor([[3.0, 4.0], [1.0, 0.0]])).sum().backward()
    >>> gram.result
    tensor([[25.,  3.],
            [ 3.,  1.]])
    """

    sums_samples: ClassVar[bool] = False
    spans_stages: ClassVar[bool] = True

    def __init__(
        self, against: Mapping[str, Tensor] | None = None, *, accumulate: bool = False
    ) -> None:
        super().__init__(accumulate=accumulate)
        if accumulate and against is None:
            raise _lacks_products()
        if against is not None and len({len(t) for t in against.values()}) != 1:
            sizes = {name: len(t) for name, t in against.items()}
            raise PergradError(
                f"against: every parameter must have the same number of samples, got {sizes}"
            )
        self._against = None if against is None else dict(against)
        self.is_linear = against is not None

    @property
    def settings(self) -> tuple[Any, ...]:
        against = self._against or {}
        return tuple((name, id(t)) for name, t in against.items())

    def _shown_settings(self) -> list[str]:
        against = [] if self._against is None else [f"against={shown(self._against)}"]
        return [*against, *super()._shown_settings()]

    def begin(self, batch: Batch) -> None:
        others = batch.size
        if self._against is not None:
            _check_names(self._against, batch, "against")
            others = len(next(iter(self._against.values())))
            for name, t in self._against.items():
                if t.shape[1:] != batch.parameters[name].shape:
                    raise PergradError(
                        f"against[{name!r}] has shape {tuple(t.shape)}, expected "
                        f"{(others, *batch.parameters[name].shape)}"
                    )
        super().begin(batch)
        self._total = torch.zeros(batch.size, others, dtype=torch.float64, device=batch.device)

    def consume(self, name: str, gradients: SampleGradients) -> None:
        if self._against is None:
            self._total = self._total + gradients.gram()
        elif name in self._against:
            self._total = self._total + gradients.gram_against(self._against[name])

    def finish(self) -> Tensor:
        total = self.batch.spread.over_stages(self._total)
        return self.batch.stored(total.to(self.batch.dtype))

    def sample_report(self, number: int, gradient: Mapping[str, Tensor]) -> SampleReport:
        if self._against is None:
            return SampleReport(self.result[number, number], norms_of(gradient).square().sum())
        named = {name: gradient[name] for name in self._against if name in gradient}
        stored = {name: self._against[name].to(g).flatten(1) for name, g in named.items()}
        own = [stored[name] @ g.flatten() for name, g in named.items()]
        lengths = [stored[name].norm(dim=1).max() * g.norm() for name, g in named.items()]
        return SampleReport(
            self.result[number],
            sum(own, torch.zeros_like(self.result[number])),
            float(sum(lengths, torch.zeros(()))),
        )

    def merge(self, other: Gram) -> None:
        if self._against is None:
            raise _lacks_products()
        self._result = torch.cat([self.result, other.result])


def _lacks_products() -> PergradError:
    return PergradError(
        "a Gram of two batches lacks the inner products across them: record both in one "
        "block, or the second against the Grads of the first: Gram(against=grads.result)"
    )


def _check_names(given: Mapping[str, Tensor], batch: Batch, what: str) -> None:
    unknown = [name for name in given if name not in batch.parameters]
    if unknown:
        raise PergradError(
            f"{what} names {unknown}, which are not recorded; recorded are {list(batch.parameters)}"
        )
