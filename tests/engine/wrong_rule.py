"""A user's function whose rule gives wrong gradients, for `verify` and `certify` to find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

import pergrad
from pergrad.rules import RULES

__all__ = ["Scaled", "doubled_rule", "planted"]


def _scale(x: Tensor, weight: Tensor) -> Tensor:
    if has_torch_function((x, weight)):
        return handle_torch_function(_scale, (x, weight), x, weight)
    return x * weight


class Scaled(nn.Module):
    """A linear map, whose rule is right, and a scale."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.map = nn.Linear(4, 3, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return _scale(self.map(x), self.scale)


@contextmanager
def doubled_rule() -> Iterator[None]:
    """Within, the scale of `Scaled` has a rule that is off by a factor of 2."""
    with planted(1.0):
        yield


@contextmanager
def planted(
    error: float, sample: int | None = None, *, only_in: Sequence[torch.dtype] | None = None
) -> Iterator[None]:
    """Within, the rule of the scale of `Scaled` is off by `error`, for all samples or for one.

    `only_in`: the dtypes of x in which it is.
    """

    @pergrad.implements_per_sample_grads(_scale)
    def rule(grad_output: Tensor, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
        found = (grad_output * x).sum(1).to(torch.promote_types(x.dtype, torch.float32))
        off = torch.zeros(len(x), dtype=found.dtype)
        is_wrong = only_in is None or x.dtype in only_in
        off[slice(None) if sample is None else sample] = error if is_wrong else 0.0
        return {"weight": found * (1 + off)[:, None]}

    try:
        yield
    finally:
        del RULES[_scale]
