"""Traces a function and applies one of the engine's graph passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from pergrad.engine.compiling.passes.graph import written_in


def rewritten(
    change: Callable[[Graph, set[int]], None], step: Callable[..., Any], *inputs: Tensor
) -> GraphModule:
    traced = make_fx(step, tracing_mode="fake")(*inputs)
    change(traced.graph, written_in(traced.graph))
    traced.graph.eliminate_dead_code()
    traced.graph.lint()
    traced.recompile()
    return traced
