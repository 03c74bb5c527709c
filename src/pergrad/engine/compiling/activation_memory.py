"""What a compiled step holds from its forward to its backward: no more than compiled training does.

The compiler sees one graph, in which nothing tells it that what is needed late should be computed late, and
in low precision be kept in it.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from pergrad.engine.compiling.graph import (
    calls,
    cast_calls,
    is_on_gpu,
    put_behind,
    storage,
    undetached,
)
from pergrad.runtime import internals

__all__ = ["keep_less"]

_aten = torch.ops.aten


def keep_less(graph: Graph, written: set[int]) -> None:
    """All of it, in place; `written` are the storages that some call writes to."""
    results = set(map(storage, graph.output_node().all_input_nodes))
    _share_casts(graph, written | results)  # each result has memory of its own
    _take_signs_of_copies(graph, written)
    _write_inputs_of_layer_norms(graph, written)


def _casts(graph: Graph, apart: set[int]) -> list[Node]:
    """All but those from and to some storages."""
    return [
        node
        for node in cast_calls(graph)
        if apart.isdisjoint(map(storage, (node, node.all_input_nodes[0])))
    ]


def _share_casts(graph: Graph, apart: set[int]) -> None:
    """What is cast twice is cast once: autocast does it for each layer that reads a tensor."""
    known: dict[tuple[Node, torch.dtype], Node] = {}
    for node in _casts(graph, apart):
        first = known.setdefault(
            (undetached(node.all_input_nodes[0]), node.meta["val"].dtype), node
        )
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _take_signs_of_copies(graph: Graph, written: set[int]) -> None:
    """The backward of a ReLU looks at its output in bfloat16 where that is kept, not in float32 beside it.

    A number has the same sign in both, but for those below 1e-40.
    """
    copies = {
        undetached(node.all_input_nodes[0]): node
        for node in _casts(graph, written)
        if node.meta["val"].dtype is torch.bfloat16
    }
    place = {node: k for k, node in enumerate(graph.nodes)}
    for node in calls(graph, _aten.threshold_backward.default):
        gradient, output, threshold = node.args
        assert isinstance(output, Node)
        copy = copies.get(undetached(output))
        is_relu = threshold == 0 and output.meta["val"].dtype is torch.float32
        if is_relu and copy is not None and place[copy] < place[node]:
            node.args = (gradient, copy, threshold)


def _write_inputs_of_layer_norms(graph: Graph, written: set[int]) -> None:
    """A sum that a layer norm reads is written to memory then, on a GPU, where its backward finds it.

    Else the compiler adds it up anew wherever it is read; which it finds too much for the backward, and so
    writes (x - mean) / std of all layers in the forward.
    """
    for node in calls(graph, _aten.native_layer_norm.default):
        x = undetached(node.all_input_nodes[0])
        if x.target is _aten.add.Tensor and is_on_gpu(x) and storage(x) not in written:
            # To ask for an order, of what has none yet, is to ask that it is written: in rows, as the layer
            # reads it, whatever its first summand was made by.
            in_rows = x.meta["val"].contiguous()
            with graph.inserting_after(x):
                kept = graph.call_function(
                    internals.force_stride_order, (x, list(in_rows.stride()))
                )
            kept.meta["val"] = in_rows
            put_behind(x, kept)
