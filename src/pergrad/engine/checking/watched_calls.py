"""Watches the calls of a module within one step: arguments, random state, gradients at the outputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.engine.collecting.journal import Journal, Rooted, Rung
from pergrad.engine.looping.snapshots import Snapshot
from pergrad.engine.recording.arguments import leaves, map_leaves
from pergrad.errors import PergradError
from pergrad.runtime import current_autocast, internals

__all__ = ["WatchedCall", "WatchedCalls", "tensors_of_output"]


@dataclass
class WatchedCall:
    """One call of a module: what it began from, and the gradients of its outputs, by position."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: Callable[[], torch.autocast]
    snapshot: Snapshot
    grads: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = leaves((self.args, self.kwargs))
        self._versions = [(t, internals.version_of(t)) for t in given if isinstance(t, Tensor)]

    def arrive(self, position: int, g: Tensor) -> None:
        before = self.grads.get(position)
        self.grads[position] = g.detach() if before is None else before + g.detach()

    def check_inputs(self, what: str) -> None:
        """Raises where an input has been written to since: the call cannot be repeated."""
        if any(internals.version_of(t) != version for t, version in self._versions):
            raise PergradError(
                f"{what} cannot repeat the module's call: one of its inputs was changed in place in the "
                "block; change a copy of it, or do so after the block"
            )


class WatchedCalls(Journal):
    """Watches a module's calls; as a journal, it also notes parameters that are used outside of them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.calls: list[WatchedCall] = []
        self.used_outside: dict[str, str] = {}  # parameter -> function
        self._is_inside = False

    def note(self, weights: Iterable[Rooted], function: str, rung: Rung) -> None:
        weights = list(weights)
        super().note(weights, function, rung)
        # A use within a backward pass is a checkpoint's, which repeats one of the forward.
        if not self._is_inside and internals.current_graph_task_id() == -1:
            for w in weights:
                self.used_outside.update(dict.fromkeys(w.roots, function))

    @contextmanager
    def watched(self) -> Iterator[None]:
        hooks = [
            self.module.register_forward_pre_hook(self._before, with_kwargs=True),
            self.module.register_forward_hook(self._after, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._is_inside = True
        if torch.is_grad_enabled():
            device = next(self.module.parameters()).device.type
            with internals.DisableTorchFunction():  # no part of the model
                snapshot = Snapshot(self.module)
            self.calls.append(WatchedCall(args, kwargs, current_autocast(device), snapshot))

    def _after(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        self._is_inside = False
        if not torch.is_grad_enabled() or not self.calls:
            return output
        call, position = self.calls[-1], itertools.count()

        def watch(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            k = next(position)
            if not t.requires_grad:
                return t
            seen = t.view_as(t)  # a view: the module may use its output itself
            seen.register_hook(lambda g: call.arrive(k, g))
            return seen

        return map_leaves(watch, output)


def tensors_of_output(output: Any) -> list[Tensor]:
    """Lists the tensors of a module's output, in the order of their positions."""
    return [t for t in leaves(output) if isinstance(t, Tensor)]
