"""Calls of functions that have a rule: run them on the weights' values and tap what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name

from pergrad.engine.layouts import Layout, Lost, Owners, Samples
from pergrad.engine.propagation import name_of
from pergrad.engine.tap import Use, tap
from pergrad.engine.tracker import Tracker
from pergrad.engine.weights import Weight
from pergrad.errors import UnsupportedFunctionError
from pergrad.rules import Rule, ShapeOnly

__all__ = ["call_with_rule", "unsupported", "written"]


def call_with_rule(
    rule: Rule,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tracker: Tracker,
) -> Any:
    """The function's result, tapped; NotImplemented where the rule does not cover the call."""
    plain: dict[str, Any] = rule.bind(args, kwargs)
    weights: dict[str, Weight] = {}
    layouts: dict[str, Samples | Owners] = {}
    tags: list[Layout] = []  # of the tensors, as `propagate` wants them
    tensors: list[Tensor] = []
    for argument, value in plain.items():
        if not isinstance(value, Tensor):
            continue
        tag = tracker.tag(value)
        if isinstance(tag, Weight):
            weights[argument] = tag
            value, tag = tag.value, tracker.constant
        elif isinstance(tag, Lost):
            return NotImplemented
        elif tag.carries:
            layouts[argument] = tag  # type: ignore[assignment]
        if value.is_complex():
            return NotImplemented  # the rules are written for real numbers
        if rule.casts_under_autocast:
            value = _cast(value)
        plain[argument] = value
        tensors.append(value)
        tags.append(tag)
    if not layouts or not _covers(rule, weights, layouts):
        return NotImplemented
    if rule.check is not None:
        alone = tracker.scope.count == 1  # then any dimension will do
        dims = {name: 0 if alone else la.dim for name, la in layouts.items()}
        if rule.check(plain, dims) is False:
            return NotImplemented

    args = tuple(plain[argument] for argument in rule.names[: len(args)])
    kwargs = {argument: plain[argument] for argument in kwargs}
    output = func(*args, **kwargs)
    tracker.propagate_from(func, args, kwargs, output, tensors, tags)
    outputs = (output,) if isinstance(output, Tensor) else tuple(output)
    output_layouts = tuple(tracker.layout(t) for t in outputs)
    for layout in output_layouts:
        if isinstance(layout, Lost):
            raise unsupported(func, weights.values(), layout.reason)

    saves = rule.saves(weights)
    kept: dict[str, Tensor] = {}
    arguments: dict[str, Any] = {}
    for argument, value in plain.items():
        if not isinstance(value, Tensor):
            arguments[argument] = value
        elif saves is None or argument in saves:
            kept[argument] = value.detach()
        else:  # of a weight whose values are not needed, its shape
            arguments[argument] = ShapeOnly(value.shape) if argument in weights else None
    use = Use(rule, func, arguments, tuple(kept), layouts, output_layouts, weights)
    tapped = tap(use, tuple(kept.values()), outputs)
    for t, layout in zip(tapped, output_layouts, strict=True):
        tracker.mark(t, layout)
    return tapped[0] if isinstance(output, Tensor) else type(output)(tapped)


def _covers(rule: Rule, weights: dict[str, Weight], layouts: dict[str, Samples | Owners]) -> bool:
    """Whether the rule has a gradient for these weights, and none of what it takes for one varies."""
    if rule.weights is None:
        return True
    if not weights.keys() <= rule.weights.keys():
        return False
    return rule.symmetric or layouts.keys().isdisjoint(rule.weights)


def _cast(t: Tensor) -> Tensor:
    """What autocast is about to cast, cast here: the function and the rule then see the same."""
    if not t.is_floating_point() or not torch.is_autocast_enabled(t.device.type):
        return t
    return t if t.dtype == torch.float64 else t.to(torch.get_autocast_dtype(t.device.type))


def written(func: Callable[..., Any]) -> str:
    """The function's name as one would write it."""
    known: str | None = resolve_name(func)
    if known is not None:
        return known
    module = getattr(func, "__module__", None)  # torch's own for what its Python functions call
    return f"torch.{name_of(func)}" if module == "torch" else name_of(func)


def unsupported(
    func: Callable[..., Any], weights: Iterable[Weight], reason: str
) -> UnsupportedFunctionError:
    """An error that names the function, the parameters, the reason and the next step."""
    names = " and ".join(f"{w.name!r} (shape {tuple(w.value.shape)})" for w in weights)
    return UnsupportedFunctionError(
        f"Expanded Weights encountered but cannot handle function {func.__name__}: "
        f"`{written(func)}` on parameter {names}: {reason}. Register a rule with "
        f"@pergrad.implements_per_sample_grads({written(func)}), or freeze the parameter."
    )
