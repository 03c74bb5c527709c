"""Defines the factor of rows that are routed to matrices by value, without sizes that depend on values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.factors.base import ALL, Factor
from pergrad.runtime import internals
from pergrad.runtime.precision import wide
from pergrad.runtime.tracing import operation

__all__ = ["Routed"]


@dataclass(eq=False)
class Routed(Factor):
    """G_n[e] = Σ_t x[n,t] ⊗ g[n,t] [group[n,t] = e], as of the experts of a mixture in a traced step."""

    input: Tensor  # (n, t, i)
    grad_output: Tensor  # (n, t, o)
    group: Tensor  # (n, t), each less than `count`
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.input), self.count, self.input.shape[2], self.grad_output.shape[2])

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.input.dtype, self.grad_output.dtype)

    @property
    def scratch(self) -> int:
        return self.input.shape[1] * (self.input.shape[2] + self.grad_output.shape[2])

    def materialize(self, dtype: torch.dtype | None = None) -> Tensor:
        n, count = self.shape[:2]
        sample = torch.arange(n, device=self.group.device).unsqueeze(1)
        found = self._sums(sample * count + self.group, n * count, dtype or self.dtype)
        return found.unflatten(0, (n, count))

    def summed(self, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Σ_n scale[n] G_n, (count, i, o)."""
        x, g = self.input, self.grad_output
        if scale is not None:
            is_used = (scale != 0)[:, None, None]  # 0 · NaN is NaN
            x, g = x.where(is_used, 0), (g * scale.to(g.dtype)[:, None, None]).where(is_used, 0)
        return Routed(x, g, self.group, self.count)._sums(self.group, self.count, dtype)

    def _sums(self, group: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        x, g = (t.flatten(0, 1).to(dtype) for t in (self.input, self.grad_output))
        return _grouped_sums(x, g, group.flatten(), count)

    def squared_norms(self, step: int) -> Tensor:
        """Σ_{t,s} (g_t · g_s) (x_t · x_s) [group_t = group_s], (n,) in float64; `step` positions at once."""
        dtype = wide(self.dtype)
        x, g = self.input.to(dtype), self.grad_output.to(dtype)
        total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        for start in range(0, x.shape[1], step):
            rows = slice(start, start + step)
            products = (x[:, rows] @ x.mT) * (g[:, rows] @ g.mT)
            is_same = self.group[:, rows, None] == self.group[:, None, :]
            total = total + torch.where(is_same, products, 0).sum((1, 2), dtype=torch.float64)
        return total

    def part(self, samples: slice, rows: slice = ALL) -> Routed:
        x, g, group = self.input[samples], self.grad_output[samples], self.group[samples]
        start, stop, _ = rows.indices(self.count)
        if stop - start == self.count:
            return Routed(x, g, group, self.count)
        is_inside = (group >= start) & (group < stop)
        g = g.where(is_inside.unsqueeze(-1), 0)
        return Routed(x, g, (group - start).clamp(0, stop - start - 1), stop - start)

    def transposed(self) -> Routed:
        return Routed(self.grad_output, self.input, self.group, self.count)


@operation("grouped_sums", lambda x, g, group, count: x.new_empty(count, x.shape[1], g.shape[1]))
def _grouped_sums(x: Tensor, g: Tensor, group: Tensor, count: int) -> Tensor:
    """Σ_r x[r] ⊗ g[r] [group[r] = e], (count, i, o)."""
    with internals.DisableTorchFunction():
        order = group.argsort(stable=True)
        numbers = torch.arange(count, device=group.device)
        ends = torch.searchsorted(group[order], numbers, right=True).to(torch.int32)
        x, g = x[order], g[order]
        is_aligned = all(t.shape[1] * t.element_size() % _ALIGNED == 0 for t in (x, g))
        if x.dtype in _GROUPED and is_aligned and len(x):
            return F.grouped_mm(x.mT, g, offs=ends)
        found = x.new_zeros(count, x.shape[1], g.shape[1])
        start = 0
        for number, end in enumerate(ends.tolist()):
            torch.mm(x[start:end].mT, g[start:end], out=found[number])
            start = end
        return found


_GROUPED = (torch.float32, torch.bfloat16, torch.float16)  # of F.grouped_mm
_ALIGNED = 16  # bytes of its rows
