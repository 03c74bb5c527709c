"""Computes ordinary gradients of parameters by plain autograd, and leaves `.grad` as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pergrad.distributed.placing import whole_of

__all__ = ["Reduced", "is_reached", "pulled_back"]

Reduced: TypeAlias = Callable[[Tensor], Tensor]


def pulled_back(
    tensors: Sequence[Tensor],
    gradients: Sequence[Tensor],
    parameters: Mapping[str, Tensor],
    others: Iterable[Tensor],
    *,
    retain_graph: bool = False,
    reduced: Mapping[str, Reduced] | None = None,
) -> dict[str, Tensor]:
    """Computes the gradients of parameters, dense, zeros where nothing reaches one.

    `others` are tensors that the graph may use out of sight; their `.grad` is left as it was too. `reduced`
    are functions of some of the gradients that are wanted in their place: applied as soon as one is there,
    while it is in the processor's cache, and before the next one takes its memory.
    """
    wanted = list(parameters.values())
    reduced = reduced or {}
    runs_python, leaves_of_graph = _surveyed(tensors)
    found: tuple[Tensor | None, ...]
    early: dict[str, Tensor] = {}
    nothing: dict[torch.dtype, Tensor] = {}
    if runs_python:
        touched = [*wanted, *leaves_of_graph, *others]
        found = _accumulated(tensors, gradients, wanted, touched, retain_graph)
    else:
        with ExitStack() as hooks:
            for name, function in reduced.items():
                handle = parameters[name].register_hook(_taking(name, function, early, nothing))
                hooks.callback(handle.remove)
            found = torch.autograd.grad(
                list(tensors), wanted, list(gradients), retain_graph=retain_graph, allow_unused=True
            )
    result = dict(early)
    for (name, p), g in zip(parameters.items(), found, strict=True):
        if name not in early:
            dense = torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
            result[name] = reduced[name](whole_of(dense)) if name in reduced else whole_of(dense)
    return {name: result[name] for name in parameters}


def _taking(
    name: str, function: Reduced, results: dict[str, Tensor], nothing: dict[torch.dtype, Tensor]
) -> Reduced:
    """Makes a hook that keeps a function of a gradient, and lets go of the gradient itself.

    `nothing` has a zero of each dtype, which takes the gradients' place.
    """

    def take(gradient: Tensor) -> Tensor:
        if gradient.layout != torch.strided:
            return gradient
        results[name] = function(whole_of(gradient.detach()))
        zero = nothing.get(gradient.dtype)
        if zero is None or zero.device != gradient.device:
            zero = nothing[gradient.dtype] = gradient.new_zeros(())
        return zero.expand(gradient.shape)

    return take


def is_reached(tensors: Sequence[Tensor], parameters: Iterable[Tensor]) -> bool:
    """Whether the graph of tensors may reach one of the parameters."""
    runs_python, found = _surveyed(tensors)
    wanted = {id(p) for p in parameters}
    return runs_python or any(id(t) in wanted for t in [*found, *tensors])


def _surveyed(tensors: Sequence[Tensor]) -> tuple[bool, list[Tensor]]:
    """Says whether a graph has autograd.Functions, and lists its leaves.

    An autograd.Function may run a backward pass of its own, as a reentrant checkpoint does. That writes to
    `.grad` of parameters which the outer graph does not know.
    """
    pending = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen, found = set(pending), []
    runs_python = False
    while pending:
        node: Any = pending.pop()
        runs_python |= isinstance(node, torch.autograd.function.BackwardCFunction)
        if hasattr(node, "variable"):
            found.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return runs_python, found


def _accumulated(
    tensors: Sequence[Tensor],
    gradients: Sequence[Tensor],
    wanted: Sequence[Tensor],
    touched: Sequence[Tensor],
    retain_graph: bool,
) -> tuple[Tensor | None, ...]:
    """Computes gradients by `backward`, and leaves `.grad` as it was."""
    touched = list({id(p): p for p in touched}.values())
    before = [p.grad for p in touched]
    try:
        for p in touched:
            p.grad = None
        torch.autograd.backward(list(tensors), list(gradients), retain_graph=retain_graph)
        return tuple(p.grad for p in wanted)
    finally:
        for p, g in zip(touched, before, strict=True):
            p.grad = g
