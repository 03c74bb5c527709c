"""Splits results of quantities into a template and tensors for a graph to return, and joins them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from pergrad.quantities import Quantity
from pergrad.runtime import internals

__all__ = ["Template", "clear", "fill", "take_apart"]


@dataclass(frozen=True)
class _StateSlot:
    """Stands for a tensor of the model, by its position in the state."""

    index: int


@dataclass(frozen=True)
class _ResultSlot:
    """Stands for a tensor that the graph returns, by its position."""

    index: int


# For each quantity, its attributes as they were when traced, with slots in the place of tensors.
Template: TypeAlias = list[dict[str, Any]]


def take_apart(
    before: Sequence[Quantity], after: Sequence[Quantity], own: dict[str, Tensor]
) -> tuple[Template, list[Tensor]]:
    """Takes the tensors out of the attributes that quantities got in a step: a template, and the tensors.

    `own` are the tensors of the model, which a quantity may hold too: they are no results.
    """
    of_model = {id(t): _StateSlot(index) for index, t in enumerate(own.values())}
    results: list[Tensor] = []

    def slot(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in of_model:
            return of_model[id(value)]
        results.append(value)
        return _ResultSlot(len(results) - 1)

    template: Template = []
    for old, new in zip(before, after, strict=True):
        template.append(
            {
                name: internals.pytree.tree_map(slot, value)
                for name, value in vars(new).items()
                if name not in vars(old) or vars(old)[name] is not value
            }
        )
    return template, results


def clear(quantities: Sequence[Quantity], template: Template) -> None:
    """Drops the last results, so that the next ones can reuse their memory."""
    for quantity, attributes in zip(quantities, template, strict=True):
        for name in attributes:
            setattr(quantity, name, None)


def fill(
    quantities: Sequence[Quantity], template: Template, results: list[Tensor], state: list[Tensor]
) -> None:
    """Gives quantities their attributes, with the tensors of this step in the template's slots."""
    for quantity, attributes in zip(quantities, template, strict=True):
        for name, value in attributes.items():
            setattr(quantity, name, _filled(value, results, state))
        quantity.settle()


def _filled(value: Any, results: list[Tensor], state: list[Tensor]) -> Any:
    kind = type(value)
    if kind is _ResultSlot:
        return results[value.index]
    if kind is _StateSlot:
        return state[value.index]
    if kind is str:  # most values are names
        return value
    if kind is dict:  # not by pytree, which takes longer than the kernels run
        return {key: _filled(part, results, state) for key, part in value.items()}
    if kind is tuple or kind is list:
        return kind([_filled(part, results, state) for part in value])
    if internals.pytree.tree_is_leaf(value):
        return value
    return internals.pytree.tree_map(lambda part: _filled(part, results, state), value)
