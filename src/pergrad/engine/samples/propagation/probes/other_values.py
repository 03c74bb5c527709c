"""Runs a call again on other values: in some samples, or in all arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Layout, Owners, Samples
from pergrad.engine.samples.propagation.table import Call, tensors_in
from pergrad.engine.samples.proving import subsets
from pergrad.runtime.containers import map_parts
from pergrad.runtime.tolerances import largest

__all__ = [
    "are_equal",
    "devices_of",
    "itself",
    "nearby",
    "others_stay",
    "results_for",
    "runs",
    "with_other_values",
    "with_values",
    "within_range",
]

_NOTHING: Mapping[int, Tensor] = {}
_REFUSALS = (RuntimeError, ValueError, IndexError)  # of a function that does not take these values


def runs(
    call: Call, changed: Mapping[int, Layout] | None = None
) -> Iterator[tuple[list[Tensor], list[Tensor], Tensor]]:
    """Yields the results of the call, those with other values in some samples, and these samples.

    `changed` has the layouts of the arguments that get other values, by id; None means all.
    """
    before = results_for(call, None, changed)
    for mask in subsets(call.scope.count):
        try:
            yield before, results_for(call, mask, changed), mask
        except _REFUSALS:
            yield before, [], mask


def results_for(
    call: Call,
    mask: Tensor | None,
    changed: Mapping[int, Layout] | None = None,
    replaced: Mapping[int, Tensor] | None = None,
) -> list[Tensor]:
    """Returns the results with other values in the samples of the mask, and some arguments replaced."""
    with torch.no_grad(), torch.random.fork_rng(devices=devices_of(call)):
        args, kwargs = with_other_values(call, mask, changed, replaced or {})
        return tensors_in(call.func(*args, **kwargs)) or tensors_in(args)[:1]  # of `__setitem__`


def with_other_values(
    call: Call,
    mask: Tensor | None,
    changed: Mapping[int, Layout] | None = None,
    replaced: Mapping[int, Tensor] = _NOTHING,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies the arguments; samples in the mask get the values of their neighbours, which are valid ones."""

    def other(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in replaced:
            return replaced[id(value)].clone()
        layout = call.layout(value) if changed is None else changed.get(id(value))
        return _of_neighbours(value, layout, mask)

    args, kwargs = map_parts(other, (call.args, call.kwargs))
    return args, kwargs


def _of_neighbours(value: Tensor, layout: Layout | None, mask: Tensor | None) -> Tensor:
    t = value.detach().clone()
    if mask is None or not isinstance(layout, Samples | Owners) or not t.numel():
        return t
    rows = mask.to(t.device)[layout.owner_of_each(t.device)]
    rows = rows.view([-1 if d == layout.dim else 1 for d in range(t.dim())])
    other = t.roll(layout.post if isinstance(layout, Samples) else 1, layout.dim)
    if t.is_floating_point() or t.is_complex():
        other = torch.where(other == t, t * 0.5, other)
    return t.copy_(torch.where(rows, other, t))  # with the strides of the argument: same kernels


def others_stay(before: Tensor, after: Tensor, layout: Layout, mask: Tensor) -> bool:
    """Whether a result is the same in all rows but those of the samples in the mask."""
    if before.shape != after.shape:
        return False
    if not isinstance(layout, Samples | Owners):
        return True
    if not before.dim():  # of one sample
        before, after = before.reshape(1), after.reshape(1)
    rows = ~mask.to(before.device)[layout.owner_of_each(before.device)]
    return are_equal(*(t.movedim(layout.dim, 0)[rows] for t in (before, after)))


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two results of the same numbers are equal but for rounding; NaN equals NaN.

    Kernels of matrix products round a row by the place that it has in memory.
    """
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    eps = torch.finfo(a.dtype).eps
    # Halves are rounded once, from sums in float32; a GPU may sum in another order.
    rtol, floor = (eps, 0.1 * eps) if eps > 1e-4 else (4 * eps, eps)
    if a.is_cuda:
        rtol = max(rtol, 1e-5)
    return torch.allclose(a, b, rtol=rtol, atol=floor * largest(a[a.isfinite()]), equal_nan=True)


def devices_of(call: Call) -> list[torch.device]:
    return list({t.device for t in call.tensors if t.is_cuda})


def itself(t: Tensor) -> Tensor:
    return t


# -- random numbers in all arguments


def within_range(t: Tensor, layout: Layout) -> Tensor:
    """Returns random numbers in the range of a tensor, at most one apart; in a sorted tensor they are not."""
    if t.is_complex():
        return torch.view_as_complex(within_range(torch.view_as_real(t), layout))
    low, high = t.aminmax() if t.numel() else (t.new_zeros(()), t.new_zeros(()))
    width = torch.where(high > low, high - low, 1).clamp(max=1)
    start = low + (high - low - width).clamp(min=0) * torch.rand_like(low)
    return start + width * torch.rand_like(t)


def nearby(t: Tensor, layout: Layout) -> Tensor:
    """Returns the numbers of the neighbouring samples, or those of a constant, moved by up to 1 %."""
    everywhere = torch.ones(layout.scope.count, dtype=torch.bool)
    other = _of_neighbours(t, layout, everywhere)
    scale = largest(t) or 1.0
    return other + 0.01 * scale * torch.rand_like(t)


def with_values(call: Call, draw: Callable[[Tensor, Layout], Tensor]) -> Call | None:
    """Runs the call again on other values, in a graph of its own; None if the function refuses them."""
    values: dict[int, Tensor] = {}

    def drawn(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in values:
            made = torch.empty_like(value, requires_grad=False)
            made.copy_(draw(value.detach(), call.layout(value)))
            values[id(value)] = made.requires_grad_(value.requires_grad)
        return values[id(value)]

    flows = any(t.requires_grad for t in call.outputs)
    try:
        with (
            torch.set_grad_enabled(flows),
            torch.autograd.graph.saved_tensors_hooks(itself, itself),
            torch.random.fork_rng(devices=devices_of(call)),
        ):
            args, kwargs, tensors = map_parts(drawn, (call.args, call.kwargs, call.tensors))
            outputs = tensors_in(call.func(*args, **kwargs))
    except _REFUSALS as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return None
    if [t.shape for t in outputs] != [t.shape for t in call.outputs]:
        return None
    layouts, hints = call.layouts, call.hints
    return Call(call.scope, call.func, args, kwargs, outputs, tensors, layouts, call.flows, hints)
