"""Compiles a traced step by inductor."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from pergrad.engine.compiling.passes.faults import avoid_faults
from pergrad.engine.compiling.passes.graph import written_in
from pergrad.engine.compiling.passes.rewriting import rewrite
from pergrad.engine.compiling.passes.strides import guard_strides
from pergrad.engine.compiling.trace import quiet, reason_of
from pergrad.runtime import internals

__all__ = ["compile_graph"]


def compile_graph(
    graph: GraphModule, inputs: list[Tensor], *, draws_as_eager: bool = False
) -> Callable[..., Any]:
    """Rewrites a graph as the compiler likes it, and compiles it for inputs like these.

    With `draws_as_eager`, random functions draw the numbers that they draw uncompiled. A graph that the
    compiler takes only as it was traced is compiled like that, with a warning: such a step is slower.
    """
    try:
        rewritten = _copied(graph)
        rewrite(rewritten.graph)
        return _compiled(rewritten, inputs, draws_as_eager)
    except Exception as error:
        error.__traceback__ = None  # its frames hold the tensors
        call = _compiled(_copied(graph), inputs, draws_as_eager)
        reason = reason_of(error)
        warnings.warn(
            f"pergrad.compiled: the compiler failed on the rewritten step ({reason}) and compiled it as it "
            "was traced, which is slower; please report this",
            stacklevel=5,
        )
        return call


def _copied(graph: GraphModule) -> GraphModule:
    """Copies the nodes; constants are shared."""
    nodes = Graph()
    nodes.output(nodes.graph_copy(graph.graph, {}))
    return GraphModule(graph, nodes)


def _compiled(graph: GraphModule, inputs: list[Tensor], draws_as_eager: bool) -> Callable[..., Any]:
    """Compiles a graph, which it changes: the compiler's own rewrites change strides that a view needs."""
    guard_strides(graph.graph, written_in(graph.graph))
    avoid_faults(graph.graph)
    graph.recompile()
    with quiet(), torch.no_grad(), internals.DisableAutocast():
        # Keep the order of the trace: the first reader of a tensor decides on its layout.
        patches = {"reorder_for_locality": False, "fallback_random": draws_as_eager}
        call: Any = internals.compile_fx(graph, inputs, config_patches=patches)
    return call
