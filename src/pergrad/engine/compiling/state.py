"""Collects the inputs of a compiled step, parameters and buffers, and the properties a graph depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from pergrad.engine.recording.modules import submodules, tensors_of
from pergrad.engine.samples.signatures import Signature, describe_hashable
from pergrad.runtime import autocast_state

__all__ = ["StateNumbers", "graph_inputs", "signature_of_leaves", "state_of"]


def state_of(model: nn.Module) -> tuple[list[Tensor], tuple[bool, ...]]:
    """Lists parameters and buffers, each once, and whether each module is in training mode."""
    modules = submodules(model)
    return tensors_of(modules), tuple([module.training for module in modules])


def graph_inputs(state: list[Tensor], flat: Sequence[Any]) -> list[Tensor]:
    """Lists the tensors that a graph is called with: the state, then those of the flat batch."""
    return [t.detach() for t in (*state, *(v for v in flat if isinstance(v, Tensor)))]


def signature_of_leaves(flat: Sequence[Any]) -> Signature:
    """Returns all properties of a batch's leaves that a graph may depend on, except values of tensors."""
    parts: list[Any] = []
    for value in flat:
        if isinstance(value, Tensor):
            parts += value.shape, value.stride(), value.dtype, value.device, value.requires_grad
        elif not describe_hashable(value, parts):
            parts += type(value), repr(value)
    return tuple(parts)


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
