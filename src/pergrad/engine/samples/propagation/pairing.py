"""Propagates products of all pairs of rows, as attention over packed sequences makes them.

Entry (i, j) of the scores q kᵀ depends on the samples of rows i and j. A mask that keeps samples apart makes
the entries of pairs from two samples irrelevant: their attention is exactly zero, and so is the gradient that
comes back to their scores. Both are checked by value.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Layout, Lost, Owners, Samples
from pergrad.engine.samples.propagation.elementwise import ELEMENTWISE
from pergrad.engine.samples.propagation.table import Call, refuse_gradients, refuse_mixed_samples
from pergrad.runtime import is_traced

__all__ = ["Pairs", "attends_to_own", "layout_of_pairs", "paired"]

_SOFTMAXES = frozenset(["softmax", "log_softmax"])
_KEPT = ELEMENTWISE | {"where", "nan_to_num"}
_PRODUCTS = frozenset(["matmul", "bmm"])


@dataclass(frozen=True, slots=True, eq=False)
class Pairs(Lost):
    """Marks scores (..., i, j) of rows i and columns j that belong to samples: lost if two samples matter."""

    rows: Tensor | None = None  # the samples of the rows
    columns: Tensor | None = None

    def crossing(self, device: torch.device) -> Tensor:  # (i, j)
        """Tells the pairs of two samples."""
        assert self.rows is not None
        assert self.columns is not None
        return self.rows.to(device)[:, None] != self.columns.to(device)


def paired(call: Call, a: Tensor, b: Tensor) -> Layout | None:
    """Returns the layout of a (..., i, k) times b (..., k, j) with samples in i and j; None for others."""
    rows, columns = call.layout(a), call.layout(b)
    if not isinstance(rows, Samples | Owners) or not isinstance(columns, Samples | Owners):
        return None
    if a.dim() < 2 or rows.dim != a.dim() - 2 or b.dim() < 2 or columns.dim != b.dim() - 1:
        return None
    if not call.scope.known or not call.flows or call.scope.count == 1 or is_traced(call.output):
        return None
    call.reads_values = True
    device = call.output.device
    reason = f"`{call.name}` multiplies rows of different samples"
    found = Pairs(
        call.scope,
        reason,
        "cut",
        rows.owner_of_each(device),
        columns.owner_of_each(device),
    )
    refuse_gradients(call.output, functools.partial(_refuse_crossing, found))
    return found


def _refuse_crossing(pairs: Pairs, gradient: Tensor) -> None:
    """Raises an error if a gradient reaches a pair of two samples; a backward hook."""
    if pairs.scope.is_pulling_back:
        return
    if _has_any(gradient, pairs):
        refuse_mixed_samples(pairs.reason, gradient)


def layout_of_pairs(call: Call) -> Layout | None:
    """Returns the layout of a function of pairs; None if no argument has pairs."""
    found = [
        (t, la) for t, la in zip(call.tensors, call.layouts, strict=True) if isinstance(la, Pairs)
    ]
    if not found:
        return None
    t, pairs = found[0]
    if not call.flows:
        return call.scope.constant()
    call.reads_values = True
    if call.name in _PRODUCTS and t is call.args[0]:
        return _attended(call, t, pairs)
    others = [
        (u, la)
        for u, la in zip(call.tensors, call.layouts, strict=True)
        if u is not t and u.requires_grad
    ]
    are_same = all(isinstance(la, Pairs) and la is pairs for _, la in others)
    if call.output.shape == t.shape and are_same:
        if call.name in _KEPT:
            return pairs
        dim = call.argument(1, "dim")
        if call.name in _SOFTMAXES and isinstance(dim, int) and dim % t.dim() == t.dim() - 1:
            return pairs
    return call.mixed(f"uses pairs of rows of different samples ({pairs.reason})")


def _attended(call: Call, weights: Tensor, pairs: Pairs) -> Layout:
    """Returns the layout of attention weights (..., i, j) times values (..., j, k): that of the rows."""
    values: Tensor = call.argument(1, "other", "mat2", "tensor")
    layout = call.layout(values)
    assert pairs.columns is not None
    assert pairs.rows is not None
    if not isinstance(layout, Samples | Owners) or layout.dim != values.dim() - 2:
        return call.mixed()
    device = call.output.device
    if not torch.equal(layout.owner_of_each(device), pairs.columns.to(device)):
        return call.mixed()
    if _has_any(weights, pairs):
        return call.mixed("lets rows attend to rows of other samples")
    return call.scope.owned(call.output.dim() - 2, pairs.rows)


def _has_any(t: Tensor, pairs: Pairs) -> bool:
    """Whether an entry of a pair of two samples is not zero."""
    return bool((t.detach().masked_fill(~pairs.crossing(t.device), 0) != 0).any())


def attends_to_own(call: Call, mask: Any, query: Samples | Owners, key: Samples | Owners) -> bool:
    """Whether a mask (..., i, j) lets each row attend to rows of its own sample, and to no others."""
    if not isinstance(mask, Tensor) or is_traced(mask) or mask.dim() < 2:
        return False
    call.reads_values = True
    mask = mask.detach()
    crossing = query.owner_of_each(mask.device)[:, None] != key.owner_of_each(mask.device)
    if mask.shape[-2:] != crossing.shape:
        return False
    # Attention to what is masked by the lowest number, as transformers do, is exactly zero.
    is_allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    crosses = bool((is_allowed & crossing).any())
    return not crosses and bool((is_allowed & ~crossing).any(-1).all())
