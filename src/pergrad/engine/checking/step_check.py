"""The check behind `record(..., verify=True)`: this step's gradients against single samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.engine.checking.comparison import compare, spread_out
from pergrad.engine.checking.trial import undisturbed
from pergrad.engine.recording.arguments import leaves, map_leaves
from pergrad.engine.recording.options import LossReduction
from pergrad.errors import PergradError
from pergrad.quantities import Grads
from pergrad.runtime import current_autocast, without_autocast

__all__ = ["verified"]

_SAMPLES = 4  # run alone


@contextmanager
def verified(
    module: nn.Module, grads: Grads, loss_reduction: LossReduction, batch_first: bool
) -> Iterator[None]:
    """Watches the module's one call within; at the end compares `grads` with single samples.

    A few samples go through the module alone, each backward from the gradients that the recorded loss gave
    its part of the output. The loss function itself is not checked.
    """
    call = _WatchedCall(module)
    with call.watched():
        yield
    call.check_is_one()
    dim, size = 0 if batch_first else 1, len(next(iter(grads.result.values())))
    scale = size if loss_reduction == "mean" else 1
    weights = {name: p for name, p in module.named_parameters() if name in grads.result}

    def cut(value: Any, n: int) -> Any:
        is_batched = isinstance(value, Tensor) and value.dim() > dim and value.shape[dim] == size
        return value.detach().narrow(dim, n, 1) if is_batched else value

    for g in call.grads.values():
        if g.dim() and cut(g, 0) is g:
            raise PergradError(
                f"verify=True cannot find the samples in an output of shape {tuple(g.shape)}: use "
                "pergrad.verify"
            )
    expected = {}
    with undisturbed(module):
        for n in spread_out(_SAMPLES, size):
            outputs = call.repeated(partial(cut, n=n))
            with without_autocast(next(iter(weights.values())).device):
                found = torch.autograd.grad(
                    [outputs[k] for k in call.grads],
                    list(weights.values()),
                    [cut(g, n) * scale if g.dim() else g for g in call.grads.values()],
                    allow_unused=True,
                )
            expected[n] = dict(zip(weights, found, strict=True))
    report = compare(grads, expected)
    if not report.ok:
        raise PergradError(f"the per-sample gradients of this step are wrong:\n{report}")


class _WatchedCall:
    """The call of a module in one step; `grads` are the gradients of its outputs, by position."""

    def __init__(self, module: nn.Module) -> None:
        self.grads: dict[int, Tensor] = {}
        self._module = module
        self._calls: list[tuple[Any, Callable[[], torch.autocast]]] = []  # arguments and autocast

    @contextmanager
    def watched(self) -> Iterator[None]:
        hooks = [
            self._module.register_forward_pre_hook(self._before, with_kwargs=True),
            self._module.register_forward_hook(self._after),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            device = next(self._module.parameters()).device.type
            self._calls.append(((args, kwargs), current_autocast(device)))

    def _after(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        position = itertools.count()

        def watch(t: Any) -> Any:
            if not isinstance(t, Tensor) or not t.requires_grad:
                return t
            k, seen = next(position), t.view_as(t)  # a view: the module may use its output itself
            seen.register_hook(lambda g: self._arrive(k, g))
            return seen

        return map_leaves(watch, output)

    def _arrive(self, position: int, g: Tensor) -> None:
        before = self.grads.get(position)
        self.grads[position] = g.detach() if before is None else before + g

    def check_is_one(self) -> None:
        if len(self._calls) != 1:
            raise PergradError(
                f"verify=True needs one call of the module in the block, got {len(self._calls)}"
            )

    def repeated(self, change: Callable[[Any], Any]) -> list[Tensor]:
        """Repeats the call with changed arguments; refuses a module that gives something else each time."""
        (arguments, autocast), runs = self._calls[0], []
        args, kwargs = map_leaves(change, arguments)
        for seed in range(2):
            with undisturbed(self._module), autocast():
                torch.manual_seed(seed)
                output = self._module(*args, **kwargs)
            runs.append([t for t in leaves(output) if isinstance(t, Tensor) and t.requires_grad])
        if not all(torch.equal(a, b) for a, b in zip(*runs, strict=True)):
            raise PergradError(
                "verify=True cannot check a module that draws random numbers (dropout): use "
                "pergrad.verify, or put the module into eval mode for this step"
            )
        return runs[0]
