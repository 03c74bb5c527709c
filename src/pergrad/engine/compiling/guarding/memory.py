"""Finds inputs of a graph that it writes to, and whether others share their memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from pergrad.engine.compiling.passes.graph import storage, written_in
from pergrad.runtime.precision import HALVES

__all__ = ["computes_in_half", "inputs_written", "share_memory"]


def inputs_written(graph: GraphModule) -> tuple[int, ...]:
    """Returns the positions of the inputs that a graph writes to."""
    written = written_in(graph.graph)
    inputs = graph.graph.find_nodes(op="placeholder")
    return tuple([k for k, node in enumerate(inputs) if storage(node) in written])


def share_memory(inputs: Sequence[Tensor], written: Sequence[int]) -> bool:
    """Whether an input that is written to shares memory with another: a trace takes them to be apart."""
    where = [t.untyped_storage().data_ptr() for t in inputs] if written else []
    return any(where[k] and where.count(where[k]) > 1 for k in written)


def computes_in_half(graph: GraphModule) -> bool:
    """Whether a traced step computes anything in half precision."""
    values: list[Any] = [node.meta.get("val") for node in graph.graph.nodes]
    return any(isinstance(value, Tensor) and value.dtype in HALVES for value in values)
