"""A call of a function that has a rule, and random arguments for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Case", "data", "index", "variance", "weight"]

_RANDOM = torch.Generator().manual_seed(0)


@dataclass(frozen=True)
class Case:
    """One call of `function`, whose arguments named in `samples` carry the samples.

    Functions that take tensors in lists, or give several, are called through `call`, and `options`
    says which of the function's own arguments have which value in it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    samples: Sequence[int | str] = (0,)
    call: Callable[..., Tensor] | None = None
    options: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        given = [*map(_short, self.args), *(f"{k}={_short(v)}" for k, v in self.kwargs.items())]
        if self.options is not None:
            given = [*given[:1], *(f"{k}={_short(v)}" for k, v in self.options.items())]
        return " ".join([self.function.__name__, *given])

    def given(self, names: Iterable[str]) -> Mapping[str, Any]:
        """Map argument names to values, `names` being those of the function in order."""
        if self.options is not None:
            return self.options
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}


def _short(value: Any) -> str:
    return "x".join(map(str, value.shape)) if isinstance(value, Tensor) else str(value)


def data(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_RANDOM)


def weight(*shape: int) -> Tensor:
    return data(*shape).requires_grad_()


def index(*shape: int, rows: int = 5) -> Tensor:
    return torch.randint(rows, shape, generator=_RANDOM)


def variance(channels: int) -> Tensor:
    return torch.rand(channels, generator=_RANDOM) + 0.5
