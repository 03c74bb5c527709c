"""Tests that inputs of a graph which it writes to are found, and those that share their memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pergrad.engine.compiling.guarding.memory import (
    computes_in_half,
    inputs_written,
    share_memory,
)


def _traced(function: object, *inputs: Tensor) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)  # type: ignore[no-any-return, arg-type]


def test_inputs_that_are_written_to_are_found_through_views() -> None:
    graph = _traced(lambda x, y: x[0].mul_(2) + y, torch.ones(2), torch.ones(2))
    assert inputs_written(graph) == (0,)


def test_memory_is_shared_only_with_what_is_written() -> None:
    x = torch.ones(4)
    assert share_memory([x, x[1:]], (0,))
    assert not share_memory([x, x[1:]], ())
    assert not share_memory([x, x.clone()], (0, 1))


def test_half_precision_is_seen_anywhere_in_a_step() -> None:
    assert computes_in_half(_traced(lambda x: x.half().float() * 2, torch.ones(2)))
    assert not computes_in_half(_traced(lambda x: x * 2, torch.ones(2)))
