"""Lets autograd compute the ordinary gradients of recorded parameters as well, for `keep_grad=True`.

Recorded functions get each parameter through one node of our own. Autograd adds up the gradients of all uses
there, in its own order, and passes the sum on to the parameter. A gradient that reaches the parameter and is
not that sum came from a use that the recorder did not see.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pergrad.runtime import internals

__all__ = ["KeptGradients", "attached_results"]


class KeptGradients:
    """Knows the ordinary gradients that recorded uses give to parameters, and undoes them after an error."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._on_their_way: dict[str, Tensor] = {}  # by name of parameter
        # A backward pass writes into a `.grad` that is there.
        self._before = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters]

    def attached(self, name: str, p: Tensor) -> Tensor:
        """Returns the parameter for recorded functions to use."""
        found: Tensor = _Through.apply(self, name, p)
        return found

    def pass_on(self, name: str, gradient: Tensor) -> None:
        """Notes the sum over all recorded uses; called just before it reaches the parameter."""
        self._on_their_way[name] = gradient

    def has_made(self, name: str, gradient: Tensor) -> bool:
        """Whether a gradient that reaches the parameter comes from recorded uses alone."""
        return self._on_their_way.pop(name, None) is gradient

    def restore(self) -> None:
        """Puts `.grad` back as it was when the block began."""
        self._on_their_way.clear()
        for p, grad, values in self._before:
            p.grad = grad
            if grad is not None and values is not None:
                grad.copy_(values)


class _Through(torch.autograd.Function):
    """The identity; tells the sum of the gradients of all recorded uses."""

    @staticmethod
    def forward(ctx: Any, kept: KeptGradients, name: str, p: Tensor) -> Tensor:
        ctx.kept, ctx.name = kept, name
        return p.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        ctx.kept.pass_on(ctx.name, gradient)
        return None, None, gradient


class _Results(torch.autograd.Function):
    """Passes ordinary gradients of a small graph's outputs back through that graph."""

    @staticmethod
    def forward(
        ctx: Any, outputs: Sequence[Tensor], leaves: Sequence[Tensor], *operands: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.outputs, ctx.leaves = outputs, leaves
        ctx.set_materialize_grads(False)
        return tuple(t.detach() for t in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        reached = [(t, g) for t, g in zip(ctx.outputs, gradients, strict=True) if g is not None]
        with internals.DisableTorchFunction():
            found = torch.autograd.grad(
                [t for t, _ in reached],
                ctx.leaves,
                [g for _, g in reached],
                retain_graph=True,
                allow_unused=True,
            )
        return None, None, *found


def attached_results(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], operands: Sequence[Tensor]
) -> list[Tensor]:
    """Returns outputs that autograd computed from `leaves`, as functions of the operands behind these."""
    return list(_Results.apply(tuple(outputs), tuple(leaves), *operands))
