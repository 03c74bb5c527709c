"""Hides a module's graph behind one autograd node, the gate, whose backward records the graph's backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.engine.recording.recording import Recording
from pergrad.errors import ScopeError
from pergrad.runtime import internals
from pergrad.runtime.containers import map_parts, parts_of, refilled
from pergrad.runtime.eagerness import uncompiled

__all__ = ["run_gated"]


@dataclass
class _Inside:
    """The graph behind the gate: from the leaves that stand for the inputs to the module's own outputs."""

    recording: Recording
    outputs: list[Tensor]
    leaves: list[Tensor]

    def __del__(self) -> None:
        self.recording.clean_up()  # the graph is gone: no backward pass comes

    def backward(self, grads: tuple[Tensor | None, ...], keep: bool) -> list[Tensor | None]:
        """Runs the recorded backward, which fills the ledger; returns the gradients of the inputs."""
        reached = [(t, g) for t, g in zip(self.outputs, grads, strict=True) if g is not None]
        with self.recording.collecting(), self.recording.intercepting():
            torch.autograd.backward(
                [t for t, _ in reached], [g for _, g in reached], retain_graph=keep
            )
        found = [leaf.grad for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None
        return found


class _Enter(torch.autograd.Function):
    """The identity. Its output is no leaf, so that the module may change it in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Gate(torch.autograd.Function):
    """Passes the outputs on; its backward runs the backward of the graph behind it."""

    @staticmethod
    def forward(ctx: Any, inside: _Inside, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.inside = inside
        ctx.set_materialize_grads(False)
        return tuple(t.detach() for t in inside.outputs)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        inside: _Inside | None = ctx.inside
        if inside is None:
            raise ScopeError(
                "backward through a call_for_per_sample_grads call a second time: its graph is freed; "
                "pass retain_graph=True to the first backward"
            )
        keep = internals.keeps_graph()
        try:
            found = inside.backward(grads, keep)
        finally:
            if not keep:
                inside.recording.clean_up()
        if not keep:
            ctx.inside = None
        return None, None, *found


def run_gated(
    module: nn.Module, recording: Recording, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls module(*args, **kwargs), recorded, and puts all outputs that require grad behind one gate."""
    if not torch.is_grad_enabled():
        return module(*args, **kwargs)
    outer: list[Tensor] = []
    leaves: list[Tensor] = []
    inner: dict[int, Tensor] = {}

    def enter(value: Any) -> Any:
        """Replaces each of the caller's tensors by one of our own, so that no tag is left on theirs."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in inner:
            own = value.detach()
            if value.requires_grad:
                outer.append(value)
                leaves.append(own.requires_grad_())
                own = own if value.is_leaf else _Enter.apply(own)
            inner[id(value)] = own
        return inner[id(value)]

    args, kwargs = map_parts(enter, (args, kwargs))
    inside = _Inside(recording, [], leaves)
    with recording.intercepting():
        recording.enter_forward(args, kwargs)
        try:
            output = module(*args, **kwargs)
            recording.judge_output(output)
        except BaseException:
            recording.clean_up()
            raise
        finally:
            recording.leave_forward()
            recording.pause()
    flat = parts_of(output)
    gated = inside.outputs = [t for t in flat if isinstance(t, Tensor) and t.requires_grad]
    if not gated:
        return output
    anchor = torch.zeros((), requires_grad=True)
    results = iter(_Gate.apply(inside, anchor, *outer))
    return refilled(
        output, [next(results) if isinstance(t, Tensor) and t.requires_grad else t for t in flat]
    )
