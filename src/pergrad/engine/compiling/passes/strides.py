"""Makes the graph of a traced step independent of strides that its backend gives otherwise than the trace."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph

from pergrad.engine.compiling.passes.graph import calls, storage
from pergrad.errors import PergradError

__all__ = ["guard_strides"]

_aten = torch.ops.aten


def guard_strides(graph: Graph, written: set[int]) -> None:
    """Makes the graph hold for other strides than those of the trace; `written` are storages written to.

    A trace predicts the strides of softplus's gradient wrongly. A compiler rewrites `cat` of one tensor with
    empty ones as a copy, and `pixel_shuffle` by other functions, whose results have other strides. A view
    becomes a reshape, which copies only where no view is possible, unless its memory is written to. Where
    strides are part of the trace (`as_strided`), the source is checked to have the strides that it had.
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
        guarded.meta["val"] = value
        node.replace_input_with(source, guarded)


def _with_strides(t: Tensor, strides: tuple[int, ...], may_copy: bool) -> Tensor:
    """Returns the tensor with these strides: itself, or a copy if that is allowed."""
    if all(size == 1 or a == b for size, a, b in zip(t.shape, t.stride(), strides, strict=True)):
        return t
    if not may_copy:
        raise PergradError(
            f"a step traced with strides {strides} got strides {t.stride()}: run it with "
            'backend="inductor", or without `pergrad.compiled`'
        )
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)
