"""Batches the casts of parameters that autocast makes before most products into one launch."""

from __future__ import annotations

from collections import defaultdict
from operator import getitem

import torch
from torch import Tensor
from torch.fx import Graph, Node

from pergrad.engine.compiling.passes.graph import cast_calls, is_on_gpu, storage, undetached
from pergrad.runtime import internals, operation

__all__ = ["cast_at_once"]


def _alike(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(t, dtype=dtype) for t in tensors]


@operation("casts", _alike)
def casts(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Casts each tensor to `dtype`."""
    found = _alike(tensors, dtype)  # not views of one block: results may not share memory
    internals.copy_each(found, tensors)
    return found


def cast_at_once(graph: Graph, written: set[int]) -> None:
    """Casts the step's inputs on a GPU in one launch at its beginning: most casts are needed to its end.

    One by one, casts were a sixth of the launches of a step, each longer on the host than on the GPU.
    """
    alike: dict[torch.dtype, dict[Node, list[Node]]] = defaultdict(dict)
    for node in cast_calls(graph):
        source = undetached(node.all_input_nodes[0])
        is_read_only = source.op == "placeholder" and storage(source) not in written
        if is_read_only and is_on_gpu(source):
            alike[node.meta["val"].dtype].setdefault(source, []).append(node)
    for dtype, sources in alike.items():
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            made = graph.call_function(torch.ops.pergrad.casts.default, (list(sources), dtype))
        made.meta["val"] = [nodes[0].meta["val"] for nodes in sources.values()]
        for number, nodes in reversed(list(enumerate(sources.values()))):
            with graph.inserting_after(made):
                one = graph.call_function(getitem, (made, number))
            one.meta["val"] = nodes[0].meta["val"]
            for node in nodes:
                node.replace_all_uses_with(one)
