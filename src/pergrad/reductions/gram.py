"""Computes <G_n, H_m> for all pairs of samples, of one batch or of two."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pergrad.factors import Factor, OuterProduct, Rearranged
from pergrad.reductions.choosing import chooser_of
from pergrad.reductions.norms import is_cancelled
from pergrad.reductions.tiles import at_once, whole_batch_tiles
from pergrad.runtime import mm, wide

__all__ = ["gram", "gram_against"]


def gram(factors: Sequence[Factor], bound: int) -> Tensor:
    """<G_n, G_m>, (n, n) in float64, of joined factors."""
    (first, *others) = factors
    if isinstance(first, Rearranged) and not others:
        return gram([first.each], bound)
    if not isinstance(first, OuterProduct) or others:
        return by_rows(factors, bound)
    g, x = first.grad_output, first.input
    chooser = chooser_of(g, x)
    if chooser.pick("gram of an outer product", (g.shape, x.shape)) == "rows":
        return by_rows(factors, bound)
    found, terms = by_pairs_of_positions(first, bound)
    if chooser.pick("check of a gram") == "left as found":
        return found
    is_number = found.diagonal().isfinite()  # computing a NaN again would not help
    cancelled = is_cancelled(found.diagonal(), terms, wide(first.dtype)) & is_number
    return by_rows(factors, bound) if bool(cancelled.any()) else found


def by_pairs_of_positions(factor: OuterProduct, bound: int) -> tuple[Tensor, Tensor]:
    """Σ_ts <g[n,t], g[m,s]> <x[n,t], x[m,s]>, and for m = n the norm of the vector of terms."""
    n, t = factor.shape[0], factor.positions
    dtype = wide(factor.dtype)
    g, x = factor.grad_output.flatten(0, 1), factor.input.flatten(0, 1)
    step = at_once(2 * t * n * t * dtype.itemsize, bound)
    found, lengths = [], []
    for start in range(0, n, step):
        count = min(step, n - start)
        rows = slice(start * t, (start + count) * t)
        products = mm(g[rows], g.T, dtype).mul_(mm(x[rows], x.T, dtype))
        products = products.view(count, t, n, t)
        found.append(products.sum((1, 3), dtype=torch.float64))
        own = products[:, :, start : start + count].diagonal(dim1=0, dim2=2)  # (t, t, n)
        lengths.append(torch.linalg.vector_norm(own, dim=(0, 1)).double())
    return torch.cat(found), torch.cat(lengths)


def by_rows(factors: Sequence[Factor], bound: int) -> Tensor:
    """Σ_rows <G_n[row], G_m[row]>, materialising some rows of the weight at a time."""
    n = factors[0].shape[0]
    found: Tensor | None = None
    for _, gradients in whole_batch_tiles(factors, bound):
        flat = gradients.reshape(n, -1)
        part = (flat @ flat.T).double()
        found = part if found is None else found + part
    assert found is not None
    return found


def gram_against(factors: Sequence[Factor], stored: Tensor, bound: int) -> Tensor:
    """<G_n, stored[m]>, (n, m) in float64; `stored` is (m, *weight)."""
    (first, *others) = factors
    if isinstance(first, Rearranged) and not others:
        return gram_against([first.each], first.restored(stored), bound)
    n, m = first.shape[0], stored.shape[0]
    found: Tensor | None = None
    for rows, gradients in whole_batch_tiles(factors, bound):
        part = stored if stored.dim() == 1 else stored[:, rows]
        flat = part.to(gradients).reshape(m, -1)
        part = (gradients.reshape(n, -1) @ flat.T).double()
        found = part if found is None else found + part
    assert found is not None
    return found
