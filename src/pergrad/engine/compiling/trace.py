"""Traces a step: runs it once on tensors without values, and notes every function of torch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pergrad.engine.compiling.results import Template, take_apart
from pergrad.engine.compiling.state import graph_inputs
from pergrad.engine.recording.modules import names_of_tensors
from pergrad.quantities import Quantity
from pergrad.runtime import internals

__all__ = ["quiet", "trace_step"]

Step = Callable[[Sequence[Quantity], Sequence[Any]], Tensor]  # of quantities and a batch


def trace_step(
    step: Step,
    model: nn.Module,
    quantities: Sequence[Quantity],
    state: list[Tensor],
    flat: list[Any],
    spec: Any,
) -> tuple[GraphModule, Template]:
    """Traces `step`, which gives the losses and fills quantities: its graph, and a template of the results.

    The graph takes the tensors of `graph_inputs(state, flat)`, and returns the losses and the results.
    """
    names = names_of_tensors(model)
    tensors_at = [k for k, v in enumerate(flat) if isinstance(v, Tensor)]
    trained = {name for name, t in zip(names, state, strict=True) if t.requires_grad}
    template: Template = []

    def traced(*inputs: Tensor) -> list[Tensor]:
        nonlocal template
        own = dict(zip(names, inputs, strict=False))
        for name in trained:
            own[name] = own[name].detach().requires_grad_()
        values = list(flat)
        for k, t in zip(tensors_at, inputs[len(names) :], strict=True):
            values[k] = t
        filled = [copy.copy(q) for q in quantities]
        with internals.reparametrize(model, own, tie_weights=True), _unflattened(model):
            losses = step(filled, internals.pytree.tree_unflatten(values, spec))
        template, results = take_apart(quantities, filled, own)
        return [losses, *results]

    with quiet(), _no_autocast_cache():
        graph: GraphModule = internals.trace(traced)(*graph_inputs(state, flat))
    return graph, template


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the compiler's advice, and warnings about what it uses itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _unflattened(model: nn.Module) -> Iterator[None]:
    """Keeps recurrent layers from flattening weights for cuDNN: weights of a trace have no memory."""
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for layer in layers:
        vars(layer)["flatten_parameters"] = lambda: None
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["flatten_parameters"]


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Turns off autocast's cache of weights, whose casts have no values in a trace."""
    was = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)
