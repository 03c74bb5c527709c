"""A traced step as straight-line Python: its functions of torch one after the other, and nothing between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule

from pergrad.engine.compiling.casts import cast_at_once
from pergrad.engine.compiling.graph import Operator, calls, storage, written_in
from pergrad.errors import PergradError
from pergrad.runtime import internals

__all__ = ["as_python"]

_aten = torch.ops.aten

# What was for autograd, or is for a compiler: without either they are what they are given.
_NO_OPS = (_aten.detach.default, _aten.alias.default, torch.ops.pergrad.computed_once.default)

# Functions of which torch's own binding for Python takes the same arguments: it reads them in half the time.
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
    """The graph's own code, which lets go of each tensor once it has been read for the last time."""
    for target in _NO_OPS:
        for node in calls(graph.graph, target):
            node.replace_all_uses_with(node.all_input_nodes[0])
    written = written_in(graph.graph)
    cast_at_once(graph.graph, written)
    _guard_strides(graph.graph, written)
    graph.graph.eliminate_dead_code()
    _call_directly(graph.graph)  # last: of bindings nobody can tell whether they write
    graph.recompile()
    run = graph.forward

    def call(*inputs: Any) -> Sequence[Any]:
        # None of them is asked for a gradient, and none is for a mode to see, such as a default device's.
        with internals.BelowAutograd(), internals.DisableTorchFunction():
            results: Sequence[Any] = run(*inputs)
            return results

    return call


def _call_directly(graph: Graph) -> None:
    """Functions by torch's bindings for Python, where those are for the same."""
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


def _guard_strides(graph: Graph, written: set[int]) -> None:
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
            guarded = graph.call_function(_with_strides, (source, value.stride(), may_copy))
        node.replace_input_with(source, guarded)


def _with_strides(t: Tensor, strides: tuple[int, ...], may_copy: bool) -> Tensor:
    """The tensor, known to have these strides."""
    if t.stride() == strides:
        return t
    if not may_copy:
        raise PergradError(
            f"a step that was traced with strides of {strides} has met {t.stride()}: run it with "
            'backend="inductor", or without `pergrad.compiled`'
        )
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)
