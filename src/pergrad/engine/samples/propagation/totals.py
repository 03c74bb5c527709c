"""Finds how sums over the samples came to be: losses with a reduction, means, and arithmetic on them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.engine.samples.layouts import Layout, Lost, Owners, Samples, samples_first
from pergrad.engine.samples.origins import MEAN, SUM, UNEVEN, Origin, joined, untold
from pergrad.engine.samples.propagation.table import Call
from pergrad.engine.samples.sizes import BatchSize
from pergrad.runtime import is_traced
from pergrad.runtime.caches import cached
from pergrad.runtime.trainers import scaling_trainer

__all__ = ["divides_by_total", "origin_after", "origin_of", "origin_of_mean"]

_PRODUCTS = frozenset("mul multiply".split())
_QUOTIENTS = frozenset("div divide truediv true_divide".split())
_CLASS_LOSSES = (F.cross_entropy, F.nll_loss)


def origin_of(call: Call) -> Origin:
    """Returns the origin of a call's output that sums over the samples of its arguments."""
    if call.scope.count == 1:
        return SUM  # a mean over the samples is the same
    if call.name in ("sum", "nansum"):
        return SUM
    if call.name == "mean":
        t = call.argument(0, "input", "self")
        return origin_of_mean(call, t, call.layout(t))
    places = _places(call.func)
    if "reduction" in places:
        return _origin_of_loss(call, places)
    return untold(f"`{call.name}` reduces over the samples in a way of its own")


def origin_of_mean(call: Call, t: Tensor, layout: Layout) -> Origin:
    """Returns the origin of a mean over a tensor: one over the samples, if each has as many elements."""
    if isinstance(layout, Samples):
        return MEAN
    if isinstance(layout, Owners):
        if is_traced(t):
            return untold(f"`{call.name}` averages over rows that were picked by value")
        call.reads_values = True
        counts = torch.bincount(layout.owner, minlength=call.scope.count)
        return _even(call, counts)
    return untold(f"`{call.name}` averages over elements whose samples are not in one dimension")


def _even(call: Call, counts: Tensor) -> Origin:
    """Returns the origin of a mean over elements, given how many each sample has."""
    is_even = bool((counts == counts[0]).all())
    return MEAN if is_even else untold(UNEVEN.replace("it", f"`{call.name}`", 1))


@cached("places of arguments, by function")
def _places(func: Callable[..., Any]) -> dict[str, int]:
    """Returns the position of each parameter of a loss of torch.nn.functional; none for other functions."""
    if getattr(F, getattr(func, "__name__", ""), None) is not func or not inspect.isfunction(func):
        return {}
    return {name: place for place, name in enumerate(inspect.signature(func).parameters)}


def _origin_of_loss(call: Call, places: dict[str, int]) -> Origin:
    def argument(name: str, default: Any = None) -> Any:
        return call.argument(places[name], name, default=default) if name in places else default

    reduction = argument("reduction", "mean")
    averaged, is_reduced = argument("size_average"), argument("reduce")
    if averaged is not None or is_reduced is not None:  # the old names of the reduction
        reduction = "sum" if averaged is False else "mean"
    if reduction in ("sum", "none"):
        return SUM
    first = call.argument(0, *(name for name, place in places.items() if place == 0))
    layout = call.layout(first)
    if reduction == "batchmean":  # divides by the size of the first dimension
        is_first = isinstance(layout, Samples | Owners) and layout.dim == 0
        return origin_of_mean(call, first, layout) if is_first else SUM
    if call.func is F.ctc_loss:
        return MEAN  # over the samples, each divided by its own length
    if call.func in _CLASS_LOSSES:
        target = argument("target")
        if isinstance(target, Tensor) and not target.is_floating_point():
            if argument("weight") is not None:
                return untold(
                    f"`{call.name}` with class weights divides by the weights of the batch's own classes"
                )
            return _origin_over_valid(call, first, target, argument("ignore_index", -100))
    several = [la for _, la in call.with_samples]
    found = next((la for la in several if isinstance(la, Owners)), several[0])
    return origin_of_mean(call, first, found)


def _origin_over_valid(call: Call, scores: Tensor, target: Tensor, ignored: int) -> Origin:
    """Returns the origin of a mean over the targets that are not ignored."""
    layout = call.layout(scores)
    classes = 1 if scores.dim() > 1 else 0
    if isinstance(layout, Samples | Owners) and layout.dim > classes:
        layout = layout.at(layout.dim - 1)
    if not isinstance(layout, Samples | Owners):
        layout = call.layout(target)
    if not isinstance(layout, Samples | Owners) or target.dim() <= layout.dim:
        return untold(
            f"`{call.name}` averages over elements whose samples are not in one dimension"
        )
    call.reads_values = True
    if not call.scope.tells_reduction:
        return MEAN
    valid = target != ignored
    if not is_traced(target):
        call.scope.uneven.append(torch.zeros((), dtype=torch.bool))  # is known at once
    if isinstance(layout, Owners):
        if is_traced(target):
            return untold(f"`{call.name}` averages over rows that were picked by value")
        per_row = (
            valid.movedim(layout.dim, 0).flatten(1).sum(1) if valid.dim() > 1 else valid.long()
        )
        counts = per_row.new_zeros(call.scope.count).index_add(0, layout.owner, per_row)
        return _even(call, counts)
    if not is_traced(target) and bool(valid.all()):
        return MEAN
    counts = samples_first(valid, layout).flatten(1).sum(1)
    if is_traced(target):  # looked at when the graph has run
        call.scope.uneven.append((counts != counts[0]).any())
        return MEAN
    return _even(call, counts)


# -- arithmetic on sums over the samples


def divides_by_total(call: Call) -> bool:
    """Whether a quotient has a sum over the samples below: its gradient mixes them."""
    if call.name not in _QUOTIENTS:
        return False
    is_reversed = call.func.__name__ in ("__rdiv__", "__rtruediv__")  # other / total
    below = call.args[0] if is_reversed else call.argument(1, "other")
    return (
        isinstance(below, Tensor) and below.requires_grad and isinstance(call.layout(below), Lost)
    )


def origin_after(call: Call) -> Origin:
    """Returns the origin of a linear function of sums over the samples."""
    origins = [
        layout.origin or untold(layout.reason)
        for t, layout in zip(call.tensors, call.layouts, strict=True)
        if isinstance(layout, Lost) and t.requires_grad
    ]
    origin = joined(origins)
    if call.name in _PRODUCTS or call.name in _QUOTIENTS:
        return _scaled(call, origin)
    if call.name == "expand" and call.output.numel() != call.tensors[0].numel():
        return untold("`expand` repeats it")
    return origin


def _scaled(call: Call, origin: Origin) -> Origin:
    """Returns the origin after a multiplication or a division."""
    is_quotient = call.name in _QUOTIENTS
    others = [
        value
        for value in (*call.args, *call.kwargs.values())
        if not (isinstance(value, Tensor) and value.requires_grad)
    ]
    other = others[0] if others else None
    trainer = scaling_trainer()
    if isinstance(other, BatchSize) and is_quotient and trainer is None:
        if origin.how == "sum" and call.scope.count > 1:
            return replace(origin, how="mean")
        return origin if call.scope.count == 1 else origin.times(1 / other)
    if isinstance(other, Tensor):
        if other.numel() != 1:
            return origin  # weights of positions, which are part of the loss
        if trainer is not None:
            factor = other.detach().reciprocal() if is_quotient else other.detach()
            return origin.times_found(factor, is_scaler=trainer == "scaler")
        if is_traced(other) or other.device.type != "cpu":
            return origin.times_unknown("a tensor")
        number = float(other)
    elif isinstance(other, int | float):
        number = float(other)
    else:
        return origin.times_unknown(type(other).__name__)
    factor_of_it = (1 / number if number else float("inf")) if is_quotient else number
    if trainer is not None:
        return origin.times_found(factor_of_it, is_scaler=False)
    return origin.times(factor_of_it)
