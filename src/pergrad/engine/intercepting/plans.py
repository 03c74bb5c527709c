"""Plans: what a call with a rule has in common with all calls of its signature."""

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
    """Which arguments of a call are what; holds neither tensors, but the owners of rows, nor weights."""

    rule: Rule
    function: Callable[..., Any]
    names: tuple[str, ...]  # of the arguments, in the order of the call
    tensors: tuple[int, ...]  # the places of those that are tensors
    weights_at: tuple[tuple[int, int], ...]  # of each weight: which of the tensors, and its place
    kept: Mapping[str, int]  # those of them that the rule needs in the backward, and their places
    weights: tuple[str, ...]  # those of them that are weights
    arguments: Mapping[str, Any]  # all, as the rule sees them, but for the tensors that are kept
    layouts: Mapping[str, Samples | Owners]  # of the arguments that carry samples
    dims: Mapping[str, int]  # where they carry them, as a rule's check is told
    by_owner: Owners | None  # of the arguments, where rows are told by their owners
    has_rows_in_front: bool  # all of (n, ..., features), as a rule that merges rows takes them
    results: Mapping[str, str]  # what the rule may have of the function's own node
    makes_its_output: bool  # in each call anew, as torch's own functions do and others may not
    output: Key = None  # the layout of its one output, where the signature tells
    is_all_in_front: bool = False  # that too has its rows in front

    def with_output(self, key: Key, dims: int) -> Plan:
        """The same, where it is known that there is one output, of that layout and as many dimensions."""
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
    """The plan for a call; None where the rule does not cover it."""
    bound = rule.bind(args, kwargs)
    names = [name for name, value in bound.items() if isinstance(value, Tensor)]
    if len(names) != len(tensors) or len(bound) != len(args) + len(kwargs):
        return None  # tensors inside of lists, or arguments that the rule has no name for
    if any(t.is_complex() for t in tensors) or any(isinstance(tag, Lost) for tag in tags):
        return None  # the rules are written for real numbers
    tagged = dict(zip(names, tags, strict=True))
    weights = tuple(name for name, tag in tagged.items() if isinstance(tag, Weight))
    layouts = {name: tag for name, tag in tagged.items() if isinstance(tag, Samples | Owners)}
    if not layouts or not _covers(rule, weights, layouts):
        return None
    saves = rule.saves(weights)
    places = {name: place for place, name in enumerate(bound)}
    kept = {name: places[name] for name in names if saves is None or name in saves}
    stand_ins = {name: ShapeOnly(bound[name].shape) if name in weights else None for name in names}
    plain = {  # a list may be changed by its owner before the next call
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
        dims={  # of a single sample, any will do
            name: 0 if layout.scope.count == 1 else layout.dim for name, layout in layouts.items()
        },
        by_owner=next((la for la in layouts.values() if isinstance(la, Owners)), None),
        has_rows_in_front=rule.merges_rows
        and has_rows
        and all(bound[name].dim() > 2 for name in kept),
        results=rule.results if has_rows else {},
        makes_its_output=(
            not isinstance(func, types.FunctionType)
            or (func.__module__ or "").startswith("torch.")  # None for one that was made by exec
        ),
    )


def _covers(rule: Rule, weights: Sequence[str], layouts: Mapping[str, Samples | Owners]) -> bool:
    """Whether the rule has a gradient for these weights, and none of what it takes for one varies."""
    if rule.weights is None:
        return True
    if not rule.weights.keys() >= set(weights):
        return False
    return rule.symmetric or layouts.keys().isdisjoint(rule.weights)
