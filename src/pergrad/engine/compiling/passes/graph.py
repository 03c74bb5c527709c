"""Reads and changes the graph of a traced step: calls, casts, storages."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from pergrad.runtime import internals

__all__ = [
    "Operator",
    "calls",
    "cast_calls",
    "is_on_gpu",
    "put_behind",
    "storage",
    "undetached",
    "write_out",
    "written_in",
]

Operator: Any = type(torch.ops.aten.detach.default)


def calls(graph: Graph, target: Any) -> list[Node]:
    """Lists the calls of one function, in order."""
    return list(graph.find_nodes(op="call_function", target=target))


def cast_calls(graph: Graph) -> list[Node]:
    """Lists the calls that change a tensor's dtype and nothing else."""
    found = calls(graph, internals.to_copy)
    return [node for node in found if node.kwargs.keys() == {"dtype"}]


def is_on_gpu(node: Node) -> bool:
    return bool(node.meta["val"].is_cuda)


def written_in(graph: Graph) -> set[int]:
    """Finds the storages that some call writes to: calls that read them may not be moved."""
    found: set[int] = set()
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, Operator):
            continue
        for k, argument in enumerate(internals.schema_of(node.target).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = node.args[k] if k < len(node.args) else node.kwargs.get(argument.name)
                found.update(map(storage, given if isinstance(given, list | tuple) else [given]))
    return found


def storage(node: Any) -> int:
    """Returns the number of the storage of a node's tensor; 0 for other arguments, and sparse tensors."""
    if not isinstance(node, Node) or node.meta["val"].layout is not torch.strided:
        return 0
    return internals.storage_id(node.meta["val"].untyped_storage())


def undetached(node: Node) -> Node:
    """Follows a node back through `detach` and `alias` to the call that made its tensor."""
    while node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        (node,) = node.all_input_nodes
    return node


def put_behind(node: Node, next_one: Node) -> None:
    """Lets all readers of `node` read `next_one` instead, which itself reads `node`."""
    node.replace_all_uses_with(next_one, lambda user: user is not next_one)


def write_out(graph: Graph, node: Node) -> None:
    """Has the compiler write a tensor to memory instead of computing it again in each of its readers.

    Asking for a stride order does so. It is the order of the trace, since views that follow hold for that one
    alone.
    """
    with graph.inserting_after(node):
        order = list(node.meta["val"].stride())
        kept = graph.call_function(internals.force_stride_order, (node, order))
    kept.meta["val"] = node.meta["val"]
    put_behind(node, kept)
