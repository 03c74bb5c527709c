"""The check behind `record(..., verify=True)`: this step's gradients against single samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.engine.checking.trial import undisturbed
from pergrad.engine.checking.verification import VerifyReport, spread_out, verdict_on
from pergrad.engine.recording.arguments import leaves, map_leaves
from pergrad.engine.recording.options import LossReduction
from pergrad.errors import PergradError
from pergrad.quantities import Grads
from pergrad.runtime import current_autocast
from pergrad.runtime.tolerances import noise_floor, relative_error

__all__ = ["verified"]


@contextmanager
def verified(
    module: nn.Module, grads: Grads, loss_reduction: LossReduction, batch_first: bool
) -> Iterator[None]:
    """Within, the module's one call is watched; at the end `grads` is checked against single samples.

    Each of a few samples goes through the module alone and backward from the gradients that the recorded
    loss gave its part of the output: what the loss itself does is not checked.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    arrived: dict[int, Tensor] = {}  # the gradients of the outputs, by position
    autocast: list[Callable[[], torch.autocast]] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            calls.append((args, kwargs))
            autocast.append(current_autocast(next(module.parameters()).device.type))

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        position = itertools.count()

        def watch(t: Any) -> Any:
            if not isinstance(t, Tensor) or not t.requires_grad:
                return t
            k, seen = (
                next(position),
                t.view_as(t),
            )  # what flows inside of the module is its own affair
            seen.register_hook(
                lambda g: arrived.update({k: arrived[k] + g if k in arrived else g.detach()})
            )
            return seen

        return map_leaves(watch, output)

    hooks = [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if len(calls) != 1:
        raise PergradError(
            f"verify=True needs one call of the module in the block, got {len(calls)}"
        )
    dim = 0 if batch_first else 1
    size = len(next(iter(grads.result.values())))
    scale = size if loss_reduction == "mean" else 1

    def cut(value: Any, n: int) -> Any:
        is_tensor = isinstance(value, Tensor) and value.dim() > dim and value.shape[dim] == size
        return value.detach().narrow(dim, n, 1) if is_tensor else value

    for g in arrived.values():
        if g.dim() and (g.dim() <= dim or g.shape[dim] != size):
            raise PergradError(
                f"verify=True cannot tell the samples of an output of shape {tuple(g.shape)} apart: use "
                "pergrad.verify"
            )
    weights = {name: p for name, p in module.named_parameters() if name in grads.result}
    chosen = spread_out(4, size)
    expected = []
    with undisturbed(module):
        for n in chosen:
            args, kwargs = map_leaves(lambda v, n=n: cut(v, n), calls[0])
            runs: list[list[Tensor]] = []
            for seed in range(2):
                with undisturbed(module), autocast[0]():
                    torch.manual_seed(seed)
                    runs.append(_differentiable(module(*args, **kwargs)))
            own, again = runs
            if not all(torch.equal(a, b) for a, b in zip(own, again, strict=True)):
                raise PergradError(
                    "verify=True cannot check a module that draws random numbers (dropout): use "
                    "pergrad.verify, or put the module into eval mode for this step"
                )
            found = torch.autograd.grad(
                [own[k] for k in arrived],
                list(weights.values()),
                [cut(g, n) * scale if g.dim() else g for g in arrived.values()],
                allow_unused=True,
            )
            expected.append(dict(zip(weights, found, strict=True)))
    floor = noise_floor(grads.result)
    rows = []
    for name, result in grads.result.items():
        wanted = [torch.zeros_like(result[0]) if e[name] is None else e[name] for e in expected]
        errors = [relative_error(result[n], w, floor) for n, w in zip(chosen, wanted, strict=True)]
        precision = grads.precision.get(name, result.dtype)
        rows.append(verdict_on(name, result, "-", errors, precision))
    report = VerifyReport(tuple(rows), chosen, (), ())
    if not report.ok:
        raise PergradError(f"the per-sample gradients of this step are wrong:\n{report}")


def _differentiable(output: Any) -> list[Tensor]:
    return [t for t in leaves(output) if isinstance(t, Tensor) and t.requires_grad]
