"""The check behind `record(..., verify=True)`: this step's gradients against single samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.distributed.gathering import gathered
from pergrad.distributed.placing import whole_of
from pergrad.engine.checking.comparison import compare, spread_out
from pergrad.engine.checking.watched_calls import WatchedCall, WatchedCalls, tensors_of_output
from pergrad.engine.looping.snapshots import undisturbed
from pergrad.engine.recording.arguments import map_leaves
from pergrad.engine.recording.loss_units import UnitsOfLoss
from pergrad.errors import PergradError
from pergrad.quantities import Grads
from pergrad.runtime import without_autocast

__all__ = ["verified"]

_SAMPLES = 4  # run alone


@contextmanager
def verified(
    module: nn.Module, grads: Grads, told: UnitsOfLoss, batch_first: bool
) -> Iterator[None]:
    """Watches the module's one call within; at the end compares `grads` with single samples.

    A few samples go through the module alone, each backward from the gradients that the recorded loss gave
    its part of the output. The loss function itself is not checked.
    """
    watched = WatchedCalls(module)
    with watched.watched():
        yield
    call = _only_call(watched)
    dim, size = 0 if batch_first else 1, len(next(iter(grads.result.values())))
    scales = torch.as_tensor(told.units.scale).expand(size)

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
    with gathered(module), undisturbed(module):
        weights = {name: p for name, p in module.named_parameters() if name in grads.result}
        for n in spread_out(_SAMPLES, size):
            outputs = _repeated(module, call, partial(cut, n=n))
            with without_autocast(next(iter(weights.values())).device):
                found = torch.autograd.grad(
                    [outputs[k] for k in call.grads],
                    list(weights.values()),
                    [cut(g, n) * scales[n].to(g) if g.dim() else g for g in call.grads.values()],
                    allow_unused=True,
                )
            whole = (None if g is None else whole_of(g) for g in found)
            expected[n] = dict(zip(weights, whole, strict=True))
    report = compare(grads, expected)
    if not report.ok:
        raise PergradError(f"the per-sample gradients of this step are wrong:\n{report}")


def _only_call(watched: WatchedCalls) -> WatchedCall:
    if len(watched.calls) != 1:
        raise PergradError(
            f"verify=True needs one call of the module in the block, got {len(watched.calls)}"
        )
    watched.calls[0].check_inputs("verify=True")
    return watched.calls[0]


def _repeated(module: nn.Module, call: WatchedCall, change: Callable[[Any], Any]) -> list[Tensor]:
    """Repeats the call with changed arguments; refuses a module that gives something else each time."""
    args, kwargs = map_leaves(change, (call.args, call.kwargs))
    runs = []
    for seed in range(2):
        with undisturbed(module), call.autocast():
            torch.manual_seed(seed)
            runs.append(tensors_of_output(module(*args, **kwargs)))
    if not all(torch.equal(runs[0][k], runs[1][k]) for k in call.grads):
        raise PergradError(
            "verify=True cannot check a module that draws random numbers (dropout): use certify=True, or "
            "put the module into eval mode for this step"
        )
    return runs[0]
