"""Derives weights from weights: results of functions of weights and constants only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pergrad.engine.intercepting.weights import (
    Derived,
    Transformed,
    Weight,
    carriers_of,
    graph_of_its_own,
)
from pergrad.engine.samples.propagation import name_of
from pergrad.factors import Factor
from pergrad.runtime import internals

__all__ = ["derive", "explicit_cast", "transform"]

_TRANSPOSES = frozenset("t T mT transpose swapaxes swapdims".split())
_CASTS = frozenset("to type type_as float double half bfloat16 contiguous clone".split())


def transform(func: Callable[..., Any], weight: Weight, args: Any, kwargs: Any) -> Weight | None:
    """Returns the lazily transformed weight for a transpose or a cast; None for any other function."""
    name = name_of(func)
    if name in _TRANSPOSES:
        value = func(weight.value, *args[1:], **kwargs)
        return Transformed(weight, value, _transposed) if _is_mt(value, weight.value) else None
    if name in _CASTS:
        value = func(weight.value, *args[1:], **kwargs)
        return (
            Transformed(weight, value, _unchanged) if value.device == weight.value.device else None
        )
    return None


def _is_mt(value: Tensor, of: Tensor) -> bool:
    """Whether `value` is `of.mT`."""
    if of.dim() < 2 or value.stride() == of.stride():
        return False
    return value.shape == of.mT.shape and value.stride() == of.mT.stride()


def _transposed(factor: Factor) -> Factor:
    return factor.transposed()


def _unchanged(factor: Factor) -> Factor:
    """Returns the factor: its receiver casts the gradient to its own dtype."""
    return factor


def explicit_cast(func: Callable[..., Any], args: Any, kwargs: Any) -> Callable[[], Tensor] | None:
    """Returns `w.to(x)` as a call of `w.to(x.device, x.dtype)`, without x's samples; None for other calls."""
    if name_of(func) not in ("to", "type_as"):
        return None
    t, *given = args
    rest = dict(kwargs)
    other = given.pop(0) if given else rest.pop("tensor", rest.pop("other", None))
    if not isinstance(other, Tensor):
        return None
    return lambda: t.to(other.device, other.dtype, *given, **rest)


def derive(
    func: Callable[..., Any], args: Any, kwargs: Any, weight_of: Callable[[Tensor], Weight | None]
) -> tuple[Any, Mapping[int, Weight]]:
    """Runs the function under autograd; returns its result, and its tensors' weights by id."""
    leaves: dict[int, Tensor] = {}
    parents: list[Weight] = []
    others: dict[int, tuple[Tensor, Tensor]] = {}  # tensors that are no weights, and their leaves

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        weight = weight_of(value)
        if weight is None:
            if not value.requires_grad:
                return value
            if id(value) not in others:
                others[id(value)] = value, value.detach().requires_grad_()
            return others[id(value)][1]
        if id(value) not in leaves:
            leaves[id(value)] = weight.value.detach().requires_grad_()
            parents.append(weight)
        return leaves[id(value)]

    args, kwargs = internals.pytree.tree_map(leaf, (args, kwargs))
    with torch.enable_grad(), graph_of_its_own():
        result = func(*args, **kwargs)
    own = [
        t for t in internals.pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad
    ]
    by_leaf = {id(leaf): parent for leaf, parent in zip(leaves.values(), parents, strict=True)}
    found: dict[int, Weight] = {id(t): by_leaf[id(t)] for t in own if id(t) in by_leaf}
    new = [t for t in own if id(t) not in found]
    if new:
        roots = tuple(dict.fromkeys(root for p in parents for root in p.roots))
        first = parents[0]
        values = [*leaves.values(), *(own for _, own in others.values())]
        carriers = carriers_of(new, values, parents, [given for given, _ in others.values()])
        for t, carrier in zip(new, carriers, strict=True):
            weight = Derived(first.scope, roots, t, first.uses, first.sink, carrier)
            base = internals.base_of(t)
            if base is not None and id(base) in by_leaf:
                weight.view(by_leaf[id(base)])
            elif base is not None and sum(internals.base_of(other) is base for other in new) > 1:
                weight.view(first)  # several results share a tensor that nobody else has
            found[id(t)] = weight
    return result, found
