"""Plans calls of functions with a rule; all calls of one signature share a plan."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from pergrad.engine.intercepting.weights import Weight
from pergrad.engine.samples.layouts import ROWS, Key, Layout, Lost, Owners, Samples
from pergrad.rules import Rule, ShapeOnly

__all__ = ["Plan", "plan_of"]


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """Describes the arguments of a call; holds no weights, and no tensors except owners of rows."""

    rule: Rule
    function: Callable[..., Any]
    names: tuple[str, ...]  # of the arguments, in the order of the call
    tensors: tuple[int, ...]  # positions of the tensors among the arguments
    weights_at: tuple[tuple[int, int], ...]  # each weight's index in `tensors`, and its position
    kept: Mapping[str, int]  # positions of the tensors that the rule needs in the backward
    weights: tuple[str, ...]  # names of the arguments that are weights
    arguments: Mapping[str, Any]  # all arguments for the rule, except the kept tensors
    layouts: Mapping[str, Samples | Owners]  # of the arguments with samples
    dims: Mapping[str, int]  # their sample dimensions, for the rule's check
    by_owner: Owners | None  # the layout of an argument with `Owners`, if there is one
    has_rows_in_front: (
        bool  # all kept arguments are (n, ..., features), as a rule that merges rows needs
    )
    results: Mapping[str, str]  # attributes of the function's autograd node that the rule can use
    makes_its_output: bool  # each call makes a new output, as torch's own functions do
    output: Key = None  # the layout of the only output, if the signature determines it
    is_all_in_front: bool = False  # the output has its rows in front too
    is_checked: bool = False  # the rule's check has passed, and depends on the signature only

    def with_output(self, key: Key, dims: int) -> Plan:
        """Returns the plan for calls with one output, given its layout and number of dimensions."""
        is_in_front = self.has_rows_in_front and key == ROWS and dims > 2
        return replace(self, output=key, is_all_in_front=is_in_front)


def plan_of(
    rule: Rule,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[Tensor],
    tags: Sequence[Layout | Weight],
) -> Plan | None:
    """Returns the plan of a call; None if the rule does not cover it."""
    bound = rule.bind(args, kwargs)
    names = [name for name, value in bound.items() if isinstance(value, Tensor)]
    if len(names) != len(tensors) or len(bound) != len(args) + len(kwargs):
        return None  # tensors inside lists, or arguments that the rule does not name
    if any(t.is_complex() for t in tensors) or any(isinstance(tag, Lost) for tag in tags):
        return None  # the rules are written for real numbers
    tagged = dict(zip(names, tags, strict=True))
    weights = tuple(name for name, tag in tagged.items() if isinstance(tag, Weight))
    layouts = {name: tag for name, tag in tagged.items() if isinstance(tag, Samples | Owners)}
    if not layouts or not _covers(rule, weights, layouts):
        return None
    saves = rule.saves(weights)
    for name in names:
        is_needed = name not in weights and (saves is None or name in saves)
        if is_needed and name not in layouts and _has_rows(bound[name], bound, layouts):
            return None  # a rule reads it as one argument for all samples
    places = {name: place for place, name in enumerate(bound)}
    kept = {name: places[name] for name in names if saves is None or name in saves}
    stand_ins = {name: ShapeOnly(bound[name].shape) if name in weights else None for name in names}
    plain = {  # copies lists, which the caller may change before the next call
        name: list(value) if isinstance(value, list) else value for name, value in bound.items()
    }
    has_rows = all(layout.key == ROWS for layout in layouts.values())
    return Plan(
        rule=rule,
        function=func,
        names=tuple(bound),
        tensors=tuple(places[name] for name in names),
        weights_at=tuple((k, places[name]) for k, name in enumerate(names) if name in weights),
        kept=kept,
        weights=weights,
        arguments={**plain, **stand_ins},
        layouts=layouts,
        dims={  # a single sample may be in any dimension
            name: 0 if layout.scope.count == 1 else layout.dim for name, layout in layouts.items()
        },
        by_owner=next((la for la in layouts.values() if isinstance(la, Owners)), None),
        has_rows_in_front=rule.merges_rows
        and has_rows
        and all(bound[name].dim() > 2 for name in kept),
        results=rule.results if has_rows else {},
        makes_its_output=(
            not isinstance(func, types.FunctionType)
            or (func.__module__ or "").startswith("torch.")  # None for a function defined by exec
        ),
    )


def _has_rows(t: Tensor, bound: Mapping[str, Any], layouts: Mapping[str, Samples | Owners]) -> bool:
    """Whether a constant has a row for each sample, like an argument with samples."""
    return any(
        t.dim() == bound[name].dim() and t.shape[layout.dim] == layout.size > 1
        for name, layout in layouts.items()
    )


def _covers(rule: Rule, weights: Sequence[str], layouts: Mapping[str, Samples | Owners]) -> bool:
    """Whether the rule has gradients for these weights, and no weight of the rule has samples."""
    if rule.weights is None:
        return True
    if not rule.weights.keys() >= set(weights):
        return False
    return rule.symmetric or layouts.keys().isdisjoint(rule.weights)
