"""Calls of functions that have a rule: run them on the weights' values and tap what comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name

from pergrad.engine.layouts import Lost, Owners, Samples
from pergrad.engine.propagation import name_of, tensors_in
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
    bound = rule.bind(args, kwargs)
    weights: dict[str, Weight] = {}
    lost: Lost | None = None
    plain: dict[str, Any] = {}
    layouts: dict[str, Samples | Owners] = {}
    for argument, value in bound.items():
        if not isinstance(value, Tensor):
            plain[argument] = value
            continue
        layout = tracker.tag(value)
        if isinstance(layout, Weight):
            weights[argument] = layout
            plain[argument] = _cast(layout.value, rule)
            tracker.mark(plain[argument], tracker.constant)
            continue
        if isinstance(layout, Lost):
            lost = layout
        plain[argument] = _cast(value, rule)
        if isinstance(layout, Samples | Owners):
            layouts[argument] = layout
        if plain[argument] is not value:
            tracker.mark(plain[argument], layout)
    if not weights:
        return NotImplemented
    if lost is not None or not layouts:
        return NotImplemented
    if any(isinstance(value, Tensor) and value.is_complex() for value in plain.values()):
        return NotImplemented  # the rules are written for real numbers
    if rule.weights is not None and not (
        weights.keys() <= rule.weights.keys() and layouts.keys().isdisjoint(rule.weights)
    ):
        return NotImplemented
    if rule.check is not None:
        alone = tracker.scope.count == 1  # then any dimension will do
        rule.check(plain, {name: 0 if alone else la.dim for name, la in layouts.items()})

    args = tuple(plain[argument] for argument in rule.names[: len(args)])
    output = func(*args, **{argument: plain[argument] for argument in kwargs})
    tracker.propagate(func, args, kwargs, output)
    outputs = tuple(tensors_in(output))
    output_layouts = tuple(tracker.layout(t) for t in outputs)
    for layout in output_layouts:
        if isinstance(layout, Lost):
            raise unsupported(func, weights.values(), layout.reason)

    saves = rule.saves(list(weights))
    kept: dict[str, Tensor] = {}
    arguments: dict[str, Any] = {}
    for argument, value in plain.items():
        if not isinstance(value, Tensor):
            arguments[argument] = value
        elif saves is None or argument in saves:
            kept[argument] = value.detach()
        else:  # of a weight whose values are not needed, its shape
            arguments[argument] = ShapeOnly(value.shape) if argument in weights else None
    positions = {argument: k for k, argument in enumerate(kept)}
    use = Use(rule, func, arguments, positions, layouts, output_layouts, weights)
    tapped = tap(use, tuple(kept.values()), outputs)
    for t, layout in zip(tapped, output_layouts, strict=True):
        tracker.mark(t, layout)
    return tapped[0] if isinstance(output, Tensor) else type(output)(tapped)


def _cast(t: Tensor, rule: Rule) -> Tensor:
    """What autocast is about to cast, cast here: the function and the rule then see the same."""
    if not rule.casts_under_autocast or not t.is_floating_point():
        return t
    device = t.device.type
    if not torch.is_autocast_enabled(device) or t.dtype == torch.float64:
        return t
    return t.to(torch.get_autocast_dtype(device))


def written(func: Callable[..., Any]) -> str:
    """The function's name as one would write it."""
    return resolve_name(func) or name_of(func)


def unsupported(
    func: Callable[..., Any], weights: Any, reason: str, error: type = UnsupportedFunctionError
) -> Exception:
    """An error that names the function, the parameters, the reason and the next step."""
    names = " and ".join(f"{w.name!r} (shape {tuple(w.value.shape)})" for w in weights)
    made: Exception = error(
        f"Expanded Weights encountered but cannot handle function {func.__name__}: "
        f"`{written(func)}` on parameter {names}: {reason}. Register a rule with "
        f"@pergrad.implements_per_sample_grads({written(func)}), or freeze the parameter."
    )
    return made
