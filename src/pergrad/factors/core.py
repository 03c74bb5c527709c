"""Lazy per-sample gradients: what a rule returns and what a quantity reduces.

Axis letters, here and everywhere: n sample, r row of a sample, t position, i in, o out, k kernel tap.
Only `materialize()` allocates (n, *weight.shape).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pergrad.factors.allocation import empty_result

__all__ = [
    "ByOwner",
    "Dense",
    "ElementProduct",
    "Factor",
    "OuterProduct",
    "PositionSum",
    "RowSum",
    "add_up",
]


class Factor(ABC):
    """The gradients of one use of a weight, one for each sample, in structured form."""

    @abstractmethod
    def materialize(self) -> Tensor:
        """The gradients themselves, (n, *weight.shape)."""

    def scaled(self, scale: float) -> Factor:
        """The gradients times a number."""
        return Dense(self.materialize() * scale)

    def transposed(self) -> Factor:
        """The same gradients for the transposed matrix."""
        return Dense(self.materialize().mT)


@dataclass(frozen=True, eq=False)
class Dense(Factor):
    """G_n as it is.

    >>> Dense(torch.ones(2, 3)).materialize().shape
    torch.Size([2, 3])
    """

    gradients: Tensor  # (n, *weight)

    def materialize(self) -> Tensor:
        return self.gradients


@dataclass(frozen=True, eq=False)
class OuterProduct(Factor):
    """G_n = Σ_t g[n,t] ⊗ x[n,t], of shape (o, i).

    >>> OuterProduct(torch.ones(2, 5, 3), torch.ones(2, 5, 4)).materialize()[0, 0]
    tensor([5., 5., 5., 5.])
    """

    grad_output: Tensor  # (n, t, o)
    input: Tensor  # (n, t, i)

    def materialize(self) -> Tensor:
        g, x = self.grad_output, self.input.to(self.grad_output.dtype)
        out = empty_result((g.shape[0], g.shape[2], x.shape[2]), g)
        if g.shape[1] == 1:  # one position: broadcasting beats a batch of rank-1 GEMMs
            return torch.mul(g.mT, x, out=out)
        return torch.bmm(g.mT, x, out=out)

    def scaled(self, scale: float) -> OuterProduct:
        return replace(self, grad_output=self.grad_output * scale)

    def transposed(self) -> OuterProduct:
        return OuterProduct(self.input.to(self.grad_output.dtype), self.grad_output)


@dataclass(frozen=True, eq=False)
class PositionSum(Factor):
    """G_n = Σ_t g[n,t], of the shape of one position."""

    grad_output: Tensor  # (n, t, *weight)

    def materialize(self) -> Tensor:
        return self.grad_output.sum(1)

    def scaled(self, scale: float) -> PositionSum:
        return replace(self, grad_output=self.grad_output * scale)


@dataclass(frozen=True, eq=False)
class ElementProduct(Factor):
    """G_n = Σ_t g[n,t] ⊙ x[n,t], of the shape of one position."""

    grad_output: Tensor  # (n, t, *weight)
    input: Tensor  # (n, t, *weight)

    def materialize(self) -> Tensor:
        return (self.grad_output * self.input).sum(1)

    def scaled(self, scale: float) -> ElementProduct:
        return replace(self, grad_output=self.grad_output * scale)


@dataclass(frozen=True, eq=False)
class RowSum(Factor):
    """G_n[r] = Σ_t g[n,t] [index[n,t] = r], of shape (rows, i): the gradient of a table look-up."""

    index: Tensor  # (n, t)
    grad_output: Tensor  # (n, t, i)
    rows: int

    def materialize(self) -> Tensor:
        n, _, width = self.grad_output.shape
        first_row = torch.arange(n, device=self.index.device).unsqueeze(1) * self.rows
        flat = self.grad_output.new_zeros(n * self.rows, width)
        flat.index_add_(0, (self.index + first_row).flatten(), self.grad_output.flatten(0, 1))
        return flat.view(n, self.rows, width)

    def scaled(self, scale: float) -> RowSum:
        return replace(self, grad_output=self.grad_output * scale)


@dataclass(frozen=True, eq=False)
class ByOwner(Factor):
    """G_n = Σ_r F_r [owner[r] = n]: rows of another factor, each belonging to some sample."""

    rows: Factor  # of r rows
    owner: Tensor  # (r,)
    samples: int

    def materialize(self) -> Tensor:
        if isinstance(self.rows, OuterProduct):
            return self._padded(self.rows).materialize()
        rows = self.rows.materialize()
        out = rows.new_zeros(self.samples, *rows.shape[1:])
        return out.index_add_(0, self.owner, rows)

    def scaled(self, scale: float) -> ByOwner:
        return replace(self, rows=self.rows.scaled(scale))

    def _padded(self, rows: OuterProduct) -> OuterProduct:
        """The same outer products with each sample's rows side by side, short samples zero-padded."""
        counts = torch.bincount(self.owner, minlength=self.samples)
        order = self.owner.argsort(stable=True)
        owner = self.owner[order]
        slot = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]
        longest = int(counts.max()) if len(owner) else 0

        def pad(x: Tensor) -> Tensor:  # (r, t, f) -> (n, longest * t, f)
            padded = x.new_zeros(self.samples, longest, *x.shape[1:])
            padded[owner, slot] = x[order]
            return padded.flatten(1, 2)

        return OuterProduct(pad(rows.grad_output), pad(rows.input))


def add_up(factors: Sequence[Factor]) -> Tensor:
    """Σ over the uses of one weight, (n, *weight.shape); outer products are joined before they multiply."""
    if len(factors) > 1 and all(isinstance(f, OuterProduct) for f in factors):
        factors = [_joined([f for f in factors if isinstance(f, OuterProduct)])]
    total = factors[0].materialize()
    for factor in factors[1:]:
        total = total + factor.materialize()
    return total


def _joined(products: Sequence[OuterProduct]) -> OuterProduct:
    dtype = products[0].grad_output.dtype
    return OuterProduct(
        torch.cat([p.grad_output for p in products], 1),
        torch.cat([p.input.to(dtype) for p in products], 1),
    )
