"""Splits results of quantities into a template and tensors for a graph to return, and joins them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from pergrad.engine.compiling.surroundings import Rebinding, UnrepeatableError
from pergrad.quantities import Quantity
from pergrad.runtime import internals
from pergrad.runtime.containers import holds_traced, is_same, skeleton

__all__ = ["Template", "clear", "fill", "take_apart"]


_MISSING = object()


@dataclass(frozen=True)
class _StateSlot:
    """Stands for a tensor of the model, by its position in the state."""

    index: int


@dataclass(frozen=True)
class _ResultSlot:
    """Stands for a tensor that the graph returns, by its position."""

    index: int


class Template(NamedTuple):
    """What a step leaves behind, as it was when traced, with slots in the place of tensors."""

    attributes: list[dict[str, Any]]  # for each quantity
    rebound: list[tuple[dict[str, Any], str, Any]]  # attributes of modules: whose, name, value


def take_apart(
    before: Sequence[Quantity],
    after: Sequence[Quantity],
    own: Sequence[Tensor],
    rebindings: Sequence[Rebinding] = (),
    skeletons: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[Template, list[Tensor]]:
    """Takes the tensors out of the attributes that quantities and modules got: a template, and the tensors.

    `own` are the tensors of the model, which a quantity may hold too: they are no results. `skeletons` are
    those of the quantities after another step: if they differ, a state accumulates, which no graph does.
    """
    of_model = {id(t): _StateSlot(index) for index, t in enumerate(own)}
    results: list[Tensor] = []

    def slot(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in of_model:
            return of_model[id(value)]
        results.append(value.detach() if value.requires_grad else value)
        return _ResultSlot(len(results) - 1)

    template = Template([], [])
    for k, (old, new) in enumerate(zip(before, after, strict=True)):
        changed = {
            name: value
            for name, value in vars(new).items()
            if name not in vars(old) or not is_same(vars(old)[name], value)
        }
        slots = {name: internals.pytree.tree_map(slot, value) for name, value in changed.items()}
        for name, value in changed.items():
            is_repeated = (
                skeletons is None
                or name in getattr(new, "traced_alone", ())
                or skeleton(value) == skeletons[k].get(name, _MISSING)
            )
            if not is_repeated or holds_traced(slots[name]):
                raise UnrepeatableError(
                    f"the attribute {name!r} of {type(old).__name__} accumulates over several steps, or "
                    "holds tensors in an object; update it in `settle`, which is never traced"
                )
        template.attributes.append(slots)
    for bound in rebindings:
        value = internals.pytree.tree_map(slot, bound.new)
        template.rebound.append((bound.of, bound.key, value))
    return template, results


def clear(quantities: Sequence[Quantity], template: Template) -> None:
    """Drops the last results, so that the next ones can reuse their memory."""
    for quantity, attributes in zip(quantities, template.attributes, strict=True):
        for name in attributes:
            setattr(quantity, name, None)


def fill(
    quantities: Sequence[Quantity], template: Template, results: list[Tensor], state: list[Tensor]
) -> None:
    """Gives quantities and modules their attributes: the template with the tensors of this step."""
    for of, name, value in template.rebound:
        of[name] = _filled(value, results, state)
    for quantity, attributes in zip(quantities, template.attributes, strict=True):
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
