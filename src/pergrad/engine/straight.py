"""A traced step as straight-line Python: its functions of torch one after the other, and nothing between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from pergrad.engine.casting import cast_at_once
from pergrad.engine.graphs import calls, storage, written_in
from pergrad.errors import PergradError

__all__ = ["straight"]

_aten = torch.ops.aten

# What was for autograd, or is for a compiler: without either they are what they are given.
_IDLE = (_aten.detach.default, torch.ops.pergrad.computed_once.default)


def straight(graph: GraphModule) -> Callable[..., Sequence[Any]]:
    """The graph's own code, which lets go of each tensor once it has been read for the last time."""
    for target in _IDLE:
        for node in calls(graph.graph, target):
            node.replace_all_uses_with(node.all_input_nodes[0])
    written = written_in(graph.graph)
    cast_at_once(graph.graph, written)
    _mind_how_results_lie(graph.graph, written)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    run = graph.forward

    def call(*inputs: Any) -> Sequence[Any]:
        with torch._C._AutoDispatchBelowAutograd():  # none of them is asked for a gradient
            results: Sequence[Any] = run(*inputs)
            return results

    return call


def _mind_how_results_lie(graph: Graph, written: set[int]) -> None:
    """Torch does not always foresee the strides of a result: those of softplus's gradient it gets wrong.

    So what was traced as a view may have to be a copy, unless somebody writes to it; and where strides are
    part of the trace, what they are strides of must lie as it did.
    """
    for node in calls(graph, _aten.view.default):
        if storage(node.args[0]) not in written:
            node.target = _aten.reshape.default
    for node in calls(graph, _aten.as_strided.default):
        (source,) = node.all_input_nodes
        value = source.meta["val"]
        is_own = len(node.args) < 4 and "storage_offset" not in node.kwargs
        may_copy = is_own and storage(source) not in written
        with graph.inserting_before(node):
            laid = graph.call_function(_laid, (source, value.stride(), may_copy))
        node.replace_input_with(source, laid)


def _laid(t: Tensor, strides: tuple[int, ...], may_copy: bool) -> Tensor:
    """The tensor, known to have these strides."""
    if t.stride() == strides:
        return t
    if not may_copy:
        raise PergradError(
            f"a step that was traced with strides of {strides} has met {t.stride()}: run it with "
            'backend="inductor", or without `pergrad.compiled`'
        )
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)
