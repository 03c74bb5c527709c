"""Finds how sums over the samples came to be: losses with a reduction, means, and arithmetic on them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isclose
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.engine.samples.layouts import Counted, Layout, Lost, Owners, Samples, samples_first
from pergrad.engine.samples.origins import MEAN, SUM, UNEVEN, Origin, joined, untold
from pergrad.engine.samples.propagation.table import Call
from pergrad.engine.samples.shares import (
    PASSING,
    Share,
    divided,
    share_of_weights,
    shares_of_terms,
)
from pergrad.engine.samples.sizes import BatchSize
from pergrad.runtime import is_traced
from pergrad.runtime.caches import cached
from pergrad.runtime.trainers import scaling_trainer

__all__ = [
    "after_counted",
    "counted",
    "divides_by_total",
    "origin_after",
    "origin_of",
    "origin_of_mean",
    "origin_of_terms",
    "parts_of",
]

_PRODUCTS = frozenset("mul multiply".split())
_QUOTIENTS = frozenset("div divide truediv true_divide".split())
_COUNTS = frozenset("sum nansum mean count_nonzero".split())
_SCALES = frozenset("mul multiply div divide truediv true_divide".split())
# Functions whose result is the same number, as far as a trace knows.
_SAME = frozenset(
    "to type type_as float double half bfloat16 clone detach clamp clamp_min clip".split()
)
_CLASS_LOSSES = (F.cross_entropy, F.nll_loss)


def origin_of(call: Call) -> Origin:
    """Returns the origin of a call's output that sums over the samples of its arguments."""
    if call.scope.count == 1:
        return SUM  # a mean over the samples is the same
    if call.name in ("sum", "nansum"):
        return origin_of_terms(call, call.argument(0, "input", "self"))
    if call.name in ("mean", "nanmean"):
        t = call.argument(0, "input", "self")
        layout = call.layout(t)
        if call.name == "nanmean" and isinstance(layout, Samples | Owners):
            return _origin_over_valid(call, ~t.detach().isnan(), layout)
        return _origin_of_averaged(call, t, origin_of_mean(call, t, layout))
    places = _places(call.func)
    if "reduction" in places:
        return _origin_of_loss(call, places)
    return untold(f"`{call.name}` reduces over the samples in a way of its own")


def origin_of_terms(call: Call, *parts: Tensor, elements: int | None = None) -> Origin:
    """Returns the origin of a sum over the elements of tensors that are multiplied by each other.

    Each term may have been divided before by the number of samples, or by another count over the batch.
    `elements` is the number of terms, if each factor has as many elements.
    """
    found: list[Share] = []
    for t in parts:
        if not t.requires_grad:
            weights = share_of_weights(t, call.scope, elements=elements)
            call.reads_values = True
            found += [] if weights is None else [weights]
        elif type(t.grad_fn).__name__ in PASSING:
            call.reads_values = True
            found += shares_of_terms(t, call.scope)
    return _origin_of_shares(call, found)


def _origin_of_shares(call: Call, shares: Sequence[Share]) -> Origin:
    if any(share.is_of_weights for share in shares):
        return untold(f"`{call.name}` adds up the samples with weights of sum one")
    by_count = [_over_count(call, SUM, s.counted) or SUM for s in shares if s.counted is not None]
    by_number = [share for share in shares if share.counted is None]
    if by_number:
        by_count.append(divided(by_number, f"`{call.name}` adds up terms that are"))
    return joined(by_count) if by_count else SUM


def origin_of_mean(call: Call, t: Tensor, layout: Layout) -> Origin:
    """Returns the origin of a mean over a tensor: one over the samples, if each has as many elements."""
    if isinstance(layout, Samples):
        return MEAN
    if isinstance(layout, Owners):
        if is_traced(t):
            return untold(f"`{call.name}` averages over rows that were picked by value")
        call.reads_values = True
        counts = torch.bincount(layout.owner, minlength=call.scope.count)
        return _mean_of_positions(call, counts)
    return untold(f"`{call.name}` averages over elements whose samples are not in one dimension")


def _origin_of_averaged(call: Call, t: Tensor, origin: Origin) -> Origin:
    """Returns the origin of a mean of terms, which may have been divided by a count over the batch before."""
    if type(t.grad_fn).__name__ not in PASSING or origin.how is None:
        return origin
    call.reads_values = True
    shares = shares_of_terms(t, call.scope, is_averaged=True)
    if any(share.is_of_weights for share in shares):
        return untold(f"`{call.name}` averages over the samples with weights of mean one")
    for count in (share.counted for share in shares if share.counted is not None):
        found = _over_count(call, origin, count)
        if found is None:
            return untold(
                f"`{call.name}` averages terms that are each divided by a sum over the batch"
            )
        origin = found if origin.how is not None else origin
    return origin


def _origin_over_valid(call: Call, valid: Tensor, layout: Samples | Owners) -> Origin:
    """Returns the origin of a mean over some of the positions."""
    call.reads_values = True
    if not call.scope.tells_reduction:
        return MEAN
    if isinstance(layout, Owners) and is_traced(valid):
        return untold(f"`{call.name}` averages over rows that were picked by value")
    if isinstance(layout, Samples) and not is_traced(valid) and bool(valid.all()):
        call.scope.uneven.append(torch.zeros((), dtype=torch.bool))  # is known at once
        return MEAN
    return _mean_of_positions(call, parts_of_each(valid, layout))


def _mean_of_positions(call: Call, counts: Tensor) -> Origin:
    """Returns the origin of a mean over positions, given how many each sample has, (B,).

    If one sample has all of them, as in a loop over slices, the mean is that sample's own loss.
    """
    if not is_traced(counts) and int((counts > 0).sum()) == 1:
        return SUM
    return _mean_of(call, counts, f"`{call.name}` {UNEVEN}")


def _mean_of(call: Call, parts: Tensor, what: str) -> Origin:
    """Returns the origin of a mean, given the part of each sample in what it divides by, (B,)."""
    if is_traced(parts):  # looked at when the graph has run
        call.scope.uneven.append((parts != parts[0]).any())
        return MEAN
    call.scope.uneven.append(torch.zeros((), dtype=torch.bool))  # is known at once
    is_even = torch.allclose(parts.double(), parts[0].double(), rtol=1e-6, atol=0.0)
    return MEAN if is_even else untold(what)


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
        weight = argument("weight") if call.func not in _CLASS_LOSSES else None
        return SUM if weight is None else origin_of_terms(call, weight)
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
            return _origin_over_targets(call, first, target, argument("ignore_index", -100))
    several = [la for _, la in call.with_samples]
    found = next((la for la in several if isinstance(la, Owners)), several[0])
    return origin_of_mean(call, first, found)


def _origin_over_targets(call: Call, scores: Tensor, target: Tensor, ignored: int) -> Origin:
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
    return _origin_over_valid(call, target != ignored, layout)


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
    if call.name == "mean" and origin.how == "sum" and call.output.numel():
        # Of as many sums as samples, as of a list of their losses; other numbers are those of features.
        divisor = call.tensors[0].numel() // call.output.numel()
        if divisor == call.scope.count > 1 and call.scope.tells_reduction:
            return origin.divided(divisor)
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
    if isinstance(other, BatchSize) and other == call.scope.count and origin.how == "mean":
        return replace(origin, how="sum")  # a mean times the number of samples
    if isinstance(other, Tensor):
        count = call.layout(other)
        if isinstance(count, Counted) and is_quotient and trainer is None:
            found = _over_count(call, origin, count)
            if found is not None:
                return found
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
    if origin.how == "sum" and call.scope.count > 1 and call.scope.tells_reduction:
        is_share = isclose(abs(factor_of_it) * call.scope.count, 1.0, rel_tol=1e-6)
        is_multiple = is_quotient and number != 0 and number % call.scope.count == 0
        if is_share or is_multiple:
            return origin.divided(1 / abs(factor_of_it))
    return origin.times(factor_of_it)


def _over_count(call: Call, origin: Origin, count: Counted) -> Origin | None:
    """Returns the origin of a quotient by a sum over the batch, as of a mask; None if that is a mere factor.

    If every sample has the same part in it, c, then Σ_n l_n / (B c) is the mean of l_n / c.
    """
    if call.scope.count == 1 or origin.how is None:
        return origin
    if count.how == "sum" and origin.how == "mean":
        return None
    what = (
        f"it is divided by a {count.how} over the batch in which the samples have different parts"
    )
    found = _mean_of(call, parts_of(count), what)
    if found.how is None or count.how == "mean":
        return found if found.how is None else origin
    return replace(origin, how="mean")


# -- data that count over the batch, such as the number of valid positions of a mask


def counted(call: Call, t: Tensor, layout: Samples | Owners) -> Layout:
    """Returns the layout of data that are reduced over the samples; a loss may be divided by them."""
    is_count = call.name in _COUNTS and call.output.numel() == 1 and call.scope.tells_reduction
    if not is_count or t.requires_grad:
        return call.scope.constant()
    summed = t != 0 if call.name == "count_nonzero" else t
    return Counted(call.scope, "mean" if call.name == "mean" else "sum", summed.detach(), layout)


def after_counted(call: Call) -> Layout | None:
    """Returns the layout of a function of a count: the count, if it is the same number or a multiple."""
    found = [
        (t, la) for t, la in zip(call.tensors, call.layouts, strict=True) if isinstance(la, Counted)
    ]
    if len(found) != 1 or len(call.outputs) != 1 or call.output.numel() != 1 or call.flows:
        return None
    if any(isinstance(la, Lost) for la in call.layouts):
        return None
    (t, layout), out = found[0], call.output
    is_same = call.name in _SAME
    if call.name in _SCALES and not call.func.__name__.startswith(("__rdiv", "__rtruediv")):
        is_same = call.args[0] is t or call.name in ("mul", "multiply")
    elif not is_same and out is not t and not is_traced(t):  # k.sum() + 1e-8, maximum(k.sum(), one)
        is_same = torch.allclose(t.double(), out.double(), rtol=1e-5, atol=0.0)
    return layout if is_same else None


def parts_of_each(x: Tensor, layout: Samples | Owners) -> Tensor:
    """Sums a tensor over everything but its samples, (B,)."""
    x = x.double() if x.is_floating_point() else x.long()
    rows = samples_first(x, layout).flatten(1).sum(1)
    if isinstance(layout, Owners):
        return rows.new_zeros(layout.scope.count).index_add(0, layout.owner.to(x.device), rows)
    return rows


def parts_of(count: Counted) -> Tensor:
    """Returns what each sample adds to a count, (B,)."""
    return parts_of_each(count.summed, count.layout)
