"""Runs torch's operators for control flow in Python, so that the functions in their branches are recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["CONTROL_FLOW"]


def _cond(
    predicate: Any,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Sequence[Any] = (),
) -> Any:
    return (true_fn if predicate else false_fn)(*operands)


def _while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried: Sequence[Any],
    others: Sequence[Any] = (),
) -> Any:
    while cond_fn(*carried, *others):
        carried = body_fn(*carried, *others)
    return carried


# Torch compiles the branches itself, and their backward; within a recording it must not.
CONTROL_FLOW: dict[Any, Callable[..., Any]] = {
    torch.ops.higher_order.cond: _cond,
    torch.ops.higher_order.while_loop: _while_loop,
}
