"""Reduces the activations that a compiled step keeps from its forward to its backward.

The compiler sees forward and backward as one graph. Nothing tells it to recompute in the backward what is
cheap, or to keep in low precision what is read in it. With these passes a step keeps no more than compiled
training does.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from pergrad.engine.compiling.passes.graph import (
    calls,
    cast_calls,
    is_on_gpu,
    storage,
    undetached,
    write_out,
)

__all__ = ["keep_less"]

_aten = torch.ops.aten


def keep_less(graph: Graph, written: set[int]) -> None:
    """Runs all passes of this module, in place; `written` are the storages that some call writes to."""
    results = set(map(storage, graph.output_node().all_input_nodes))
    _share_casts(graph, written | results)  # each result has memory of its own
    _take_signs_of_copies(graph, written)
    _write_inputs_of_layer_norms(graph, written)


def _casts(graph: Graph, apart: set[int]) -> list[Node]:
    """Lists the casts, except those from or to the storages `apart`."""
    return [
        node
        for node in cast_calls(graph)
        if apart.isdisjoint(map(storage, (node, node.all_input_nodes[0])))
    ]


def _share_casts(graph: Graph, apart: set[int]) -> None:
    """Shares equal casts of one tensor: autocast makes one for each layer that reads it."""
    known: dict[tuple[Node, torch.dtype], Node] = {}
    for node in _casts(graph, apart):
        first = known.setdefault(
            (undetached(node.all_input_nodes[0]), node.meta["val"].dtype), node
        )
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _take_signs_of_copies(graph: Graph, written: set[int]) -> None:
    """Lets the backward of a ReLU read its output's bfloat16 copy, so that the float32 one is not kept too.

    The sign of a number is the same in both, except below 1e-40.
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
    """Has sums that layer norms read written to memory, on a GPU, where the backward reads them.

    Otherwise the compiler inlines a sum into its readers. That is too expensive for the backward, so it keeps
    (x - mean) / std of all layers instead.
    """
    for node in calls(graph, _aten.native_layer_norm.default):
        x = undetached(node.all_input_nodes[0])
        if x.target is _aten.add.Tensor and is_on_gpu(x) and storage(x) not in written:
            write_out(graph, x)
