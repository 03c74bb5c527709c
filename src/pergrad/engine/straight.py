"""A traced step as straight-line Python: its functions of torch one after the other, and nothing between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from pergrad.engine.casting import cast_at_once
from pergrad.engine.graphs import calls, written_in

__all__ = ["straight"]

# What was for autograd, or is for a compiler: without either they are what they are given.
_IDLE = (torch.ops.aten.detach.default, torch.ops.pergrad.computed_once.default)


def straight(graph: GraphModule) -> Callable[..., Sequence[Any]]:
    """The graph's own code, which lets go of each tensor once it has been read for the last time."""
    for target in _IDLE:
        for node in calls(graph.graph, target):
            node.replace_all_uses_with(node.all_input_nodes[0])
    cast_at_once(graph.graph, written_in(graph.graph))
    graph.graph.eliminate_dead_code()
    graph.recompile()
    run = graph.forward

    def call(*inputs: Any) -> Sequence[Any]:
        with torch._C._AutoDispatchBelowAutograd():  # none of them is asked for a gradient
            results: Sequence[Any] = run(*inputs)
            return results

    return call
