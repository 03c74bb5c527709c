"""Collects the inputs of a compiled step, parameters and buffers, and the properties a graph depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from pergrad.engine.recording.modules import submodules, tensors_of
from pergrad.engine.samples.signatures import PLAIN, Signature, describe_hashable
from pergrad.runtime import autocast_state, internals
from pergrad.runtime.containers import ATOMS

__all__ = ["StateNumbers", "graph_inputs", "signature_of_leaves", "state_of"]

_BY_IDENTITY: Any = object.__hash__


def state_of(model: nn.Module) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Lists parameters and buffers, each once; whether each module is in training mode, and what is tied."""
    modules = submodules(model)
    state = tensors_of(modules)
    return state, (*[module.training for module in modules], *_ties(modules, len(state)))


def _ties(modules: Sequence[nn.Module], count: int) -> list[int]:
    """Returns the number of the tensor behind each name, if one has several names."""
    held = [
        id(t)
        for module in modules
        for of in (internals.parameters_of(module), internals.buffers_of(module))
        for t in of.values()
        if t is not None
    ]
    if len(held) == count:
        return []
    numbers: dict[int, int] = {}
    return [numbers.setdefault(which, len(numbers)) for which in held]


def graph_inputs(state: list[Tensor], flat: Sequence[Any]) -> list[Tensor]:
    """Lists the tensors that a graph is called with: the state, then those of the flat batch."""
    return [t.detach() for t in (*state, *(v for v in flat if isinstance(v, Tensor)))]


def signature_of_leaves(flat: Sequence[Any]) -> Signature:
    """Returns all properties of a batch's leaves that a graph may depend on, except values of tensors.

    An object that is no plain value is itself part of the signature: `Guards` look into it.
    """
    parts: list[Any] = []
    numbers: dict[int, int] = {}  # tensors that occur twice may be told apart from equal ones
    for value in flat:
        if isinstance(value, Tensor):
            number = numbers.setdefault(id(value), len(numbers))
            parts += (
                value.shape,
                value.stride(),
                value.dtype,
                value.device,
                value.requires_grad,
                number,
            )
        else:
            _describe_leaf(value, parts)
    return tuple(parts)


def _describe_leaf(value: Any, parts: list[Any]) -> None:
    kind = type(value)
    if isinstance(value, float | complex):
        parts += kind, repr(value)  # -0.0 equals 0.0, and NaN nothing
    elif (
        getattr(kind, "__hash__", None) is _BY_IDENTITY or kind in PLAIN or isinstance(value, ATOMS)
    ):
        parts += kind, value
    elif is_dataclass(kind):
        for field in fields(kind):
            parts.append(field.name)
            _describe_leaf(getattr(value, field.name, None), parts)
        parts.append(kind)
    elif kind.__name__ == "ndarray":
        parts += kind, value.shape, str(value.dtype), value.tobytes()
    elif kind.__module__ in ("builtins", "enum", "numpy", "fractions", "decimal"):
        if not describe_hashable(value, parts):
            parts.append(_Same(value))
    else:
        parts.append(_Same(value))


class _Same:
    """Equals itself for the same object only, whatever the object says of equality."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


class StateNumbers:
    """Numbers the states of a model that differ in shapes, strides, dtypes, devices or what is frozen.

    Mostly a state is like that of the last call, and comparing the two is faster than hashing one.
    """

    devices: Sequence[str] = ()  # the device types of the last state

    def __init__(self) -> None:
        self._last: tuple[list[Any], ...] = ()
        self._number = 0
        self._known: dict[Any, int] = {}

    def number(self, state: list[Tensor]) -> int:
        described: tuple[list[Any], ...] = (
            [t.shape for t in state],
            [t.stride() for t in state],
            [t.dtype for t in state],
            [t.device for t in state],
            [t.requires_grad for t in state],
        )
        if described != self._last:
            self._last = described
            key = tuple([tuple(of_each) for of_each in described])
            self._number = self._known.setdefault(key, len(self._known))
            self.devices = sorted({device.type for device in described[3]}) or ["cpu"]
        return self._number

    def autocast(self) -> tuple[Any, ...]:
        """Returns the autocast settings of the devices of the last state."""
        return tuple([(device, *autocast_state(device)) for device in self.devices])
