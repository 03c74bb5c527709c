"""Runs a traced step without a compiler: calls its functions of torch one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule

from pergrad.engine.compiling.passes.casts import cast_at_once
from pergrad.engine.compiling.passes.graph import Operator, calls, written_in
from pergrad.engine.compiling.passes.strides import guard_strides
from pergrad.runtime import internals

__all__ = ["as_python"]

_aten = torch.ops.aten

# Functions for autograd or a compiler only: without either they return their argument.
_NO_OPS = (_aten.detach.default, _aten.alias.default, torch.ops.pergrad.computed_once.default)

# Functions whose Python binding in torch takes the same arguments, and parses them in half the time.
_FUNCTIONS = """
    abs add addmm bmm cat clone convolution cos div embedding eq exp ge gt le log lt mean mm mul
    native_dropout native_group_norm native_layer_norm ne neg ones_like permute pow reciprocal relu reshape
    rsqrt select sigmoid sin sqrt squeeze stack sub sum t tanh transpose unsqueeze where zeros_like
""".split()
_METHODS = "copy_ expand new_empty new_full new_ones new_zeros scatter_ scatter_add_ view".split()
_BOUND: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in _FUNCTIONS},
    **{name: getattr(Tensor, name) for name in _METHODS},
    "gelu": F.gelu,
    "linalg_vector_norm": torch.linalg.vector_norm,
}


def as_python(graph: GraphModule) -> Callable[..., Sequence[Any]]:
    """Turns a graph into a Python function that frees each tensor after its last use."""
    for target in _NO_OPS:
        for node in calls(graph.graph, target):
            node.replace_all_uses_with(node.all_input_nodes[0])
    written = written_in(graph.graph)
    cast_at_once(graph.graph, written)
    guard_strides(graph.graph, written)
    graph.graph.eliminate_dead_code()
    _call_directly(graph.graph)  # last: bindings have no schema that says what they write to
    graph.recompile()
    run = graph.forward

    def call(*inputs: Any) -> Sequence[Any]:
        # The functions need no autograd, and modes such as a default device's must not see them.
        with internals.BelowAutograd(), internals.DisableTorchFunction():
            results: Sequence[Any] = run(*inputs)
            return results

    return call


def _call_directly(graph: Graph) -> None:
    """Replaces functions by torch's Python bindings, where those do the same."""
    for node in graph.nodes:
        function = node.target
        if not isinstance(function, Operator) or function.namespace != "aten":
            continue
        name, _, overload = function.name().removeprefix("aten::").partition(".")
        if name == "_to_copy" and node.kwargs.keys() == {"dtype"}:
            node.args = (*node.args, node.kwargs["dtype"], False, True)  # a copy, whatever it was
            node.kwargs = {}
            node.target = Tensor.to
        elif name in _BOUND and overload not in ("dtype", "out"):
            node.target = _BOUND[name]
