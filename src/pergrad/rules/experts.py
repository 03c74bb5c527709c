"""Rules for products of rows with a stack of matrices: the experts of a mixture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from pergrad.factors import ByOwner, OuterProduct, Routed, Stacked
from pergrad.rules.registry import Gradients, by_shape, decomposes, implements_per_sample_grads
from pergrad.rules.samples import RowsTimesWeight, carry_samples, moves
from pergrad.runtime import internals, is_traced, operation

__all__: list[str] = []


@decomposes(*internals.present("grouped_mm"))
def grouped_mm(
    input: Tensor,  # (rows, i)
    weight: Tensor,  # (groups, i, o)
    offs: Tensor | None = None,  # (groups,): where each group of rows ends
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Decomposes into `rows_by_group`, which takes a group number per row instead of offsets."""
    is_plain = bias is None and out_dtype is None
    if offs is None or not is_plain or input.dim() != 2 or weight.dim() != 3:
        return NotImplemented
    rows = torch.arange(input.shape[0], device=offs.device, dtype=offs.dtype)
    group = torch.searchsorted(offs, rows, right=True)
    return rows_by_group(input, weight, carry_samples(group, input))


@moves(RowsTimesWeight, input="input", weight="weight")
def rows_by_group(input: Tensor, weight: Tensor, group: Tensor) -> Tensor:
    """x[r] @ w[group[r]] for rows sorted by group; rows beyond the last group are not computed."""
    if has_torch_function((input, weight, group)):
        given = (input, weight, group)
        return handle_torch_function(rows_by_group, given, *given)
    groups = torch.arange(len(weight), device=group.device)
    ends = torch.searchsorted(group, groups, right=True).to(torch.int32)
    if is_traced(input) and input.dtype != torch.bfloat16:
        found: Tensor = _Grouped.apply(input, weight, ends)
        return found
    return F.grouped_mm(input, weight, offs=ends)


@operation("grouped_product", lambda rows, weight, ends: rows.new_empty(len(rows), weight.shape[2]))
def _grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Computes F.grouped_mm, whose fake kernel takes bfloat16 alone."""
    with internals.DisableTorchFunction():
        return F.grouped_mm(rows.contiguous(), weight, offs=ends)


class _Grouped(torch.autograd.Function):
    """Products of rows with the matrix of their group, in a trace; the weight gets no gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(weight, ends)
        return _grouped_product(rows, weight, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        weight, ends = ctx.saved_tensors
        return _grouped_product(gradients[0], weight.mT, ends), None, None


@implements_per_sample_grads(rows_by_group, weights={"weight": ("input", "group")})
def rows_by_group_rule(
    grad_output: Tensor,  # (n, t, o)
    input: Tensor,  # (n, t, i)
    weight: Tensor,  # (groups, i, o)
    group: Tensor,  # (n, t)
) -> Gradients:
    """∂W_n[e] = Σ_t x[n,t] ⊗ g[n,t] [group[n,t] = e]."""
    n, count = len(group), weight.shape[0]
    is_in_one = (group < count).unsqueeze(-1)
    g, x = (torch.where(is_in_one, rows, 0).flatten(0, 1) for rows in (grad_output, input))
    if is_traced(group):  # the size of a group is unknown
        x, g = (t.unflatten(0, (n, -1)) for t in (x, g))
        return {"weight": Routed(x, g, group.clamp(max=count - 1), count)}
    sample = torch.arange(n, device=group.device).unsqueeze(1)
    owner = (sample * count + group.clamp(max=count - 1)).flatten()
    products = OuterProduct(x.unsqueeze(1), g.unsqueeze(1))
    return {"weight": Stacked(ByOwner(products, owner, n * count), count)}


@by_shape
def _samples_are_rows(arguments: Mapping[str, Any], dims: Mapping[str, int]) -> bool:
    return dims.get("input") == 1


@implements_per_sample_grads(
    torch.bmm,
    Tensor.bmm,
    weights={"mat2": ("input",)},
    check=_samples_are_rows,
    casts_under_autocast=True,
)
def bmm(
    grad_output: Tensor,  # (n, e, t, o)
    input: Tensor,  # (n, e, t, i)
    mat2: Tensor,  # (e, i, o)
) -> Gradients:
    """∂W_n[e] = Σ_t x[n,e,t] ⊗ g[n,e,t]."""
    rows = OuterProduct(input.flatten(0, 1), grad_output.flatten(0, 1))
    return {"mat2": Stacked(rows, mat2.shape[0])}


@decomposes(torch.baddbmm, Tensor.baddbmm)
def baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Computes beta · input + alpha · batch1 @ batch2 by `bmm`."""
    product = torch.bmm(batch1, batch2)
    product = product if alpha == 1 else product * alpha
    return product + (input if beta == 1 else input * beta)
