"""What is written differently in a traced step, so that the compiler can do better: the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

__all__ = ["rewrite_input_gradients"]

_aten = torch.ops.aten


def rewrite_input_gradients(graph: Graph) -> None:
    """Gradients of inputs of convolutions become convolutions, for which the compiler chooses the layout.

    It lets convolutions have channels last, and all that lies between them, but takes their backward as
    it was traced: each would convert what it is given, and its result again. They come right after what
    they are given, since whoever reads a tensor first decides on its layout.
    """
    graph.eliminate_dead_code()
    for node in list(
        graph.find_nodes(op="call_function", target=_aten.convolution_backward.default)
    ):
        if node.args[-1] == [True, False, False]:
            (gradient,) = node.users
            with graph.inserting_after(_last(graph, node.args[0], node.args[2])):
                gradient.replace_all_uses_with(_as_convolution(graph, node))
    graph.eliminate_dead_code()


def _as_convolution(graph: Graph, node: Node) -> Node:
    arguments: Any = node.args
    g, x, weight, _, stride, padding, dilation, transposed, _, groups, _ = arguments
    sizes = _sizes(x), _sizes(g), _sizes(weight)
    missing = [0] * len(sizes[0])
    if not transposed:  # what lies beyond the last window has no gradient
        missing = [
            size - ((out - 1) * step - 2 * pad + reach * (taps - 1) + 1)
            for size, out, taps, step, pad, reach in zip(
                *sizes, stride, padding, dilation, strict=True
            )
        ]
    gradient = graph.call_function(
        _aten.convolution.default,
        (g, weight, None, stride, padding, dilation, not transposed, missing, groups),
    )
    gradient.meta["val"] = x.meta["val"]
    return gradient


def _last(graph: Graph, *nodes: Any) -> Node:
    """The one that comes last in the graph."""
    return next(node for node in reversed(graph.nodes) if node in nodes)


def _sizes(node: Node) -> Sequence[int]:
    """Of its spatial dimensions."""
    return node.meta["val"].shape[2:]
