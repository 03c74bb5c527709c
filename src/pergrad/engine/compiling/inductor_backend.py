"""Compiles a traced step by inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from pergrad.engine.compiling.graph_passes import rewrite
from pergrad.engine.compiling.trace import quiet
from pergrad.runtime import internals

__all__ = ["compile_graph"]


def compile_graph(
    graph: GraphModule, inputs: list[Tensor], *, draws_as_eager: bool = False
) -> Callable[..., Any]:
    """Rewrites a graph as the compiler likes it, and compiles it for inputs like these.

    With `draws_as_eager`, random functions draw the numbers that they draw uncompiled.
    """
    rewrite(graph.graph)
    graph.recompile()
    with quiet(), torch.no_grad(), internals.DisableAutocast():
        # Keep the order of the trace: the first reader of a tensor decides on its layout.
        patches = {"reorder_for_locality": False, "fallback_random": draws_as_eager}
        call: Any = internals.compile_fx(graph, inputs, config_patches=patches)
    return call
