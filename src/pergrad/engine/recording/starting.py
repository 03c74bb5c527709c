"""Finds the batch where a weight is used before the recorded module is called, as in `model.encode(x)`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import FrameType
from typing import Any

from torch import nn

from pergrad.engine.recording.arguments import leaves
from pergrad.engine.recording.inputs import Input, batch_size_of, inputs_of
from pergrad.errors import BatchSizeError

__all__ = ["batch_of_part", "batch_of_step"]

_CALL = "_call_impl"  # the method of nn.Module that runs a module's forward


def batch_of_step(batch: Sequence[Any] | None, batch_dim: int) -> tuple[list[Input], int] | None:
    """Returns the inputs and the size that the arguments of a loss function agree on; None if they do not."""
    if batch is None:
        return None
    inputs = inputs_of(nn.Identity(), batch_dim, tuple(batch), {})
    try:
        return inputs, batch_size_of(inputs, tuple(batch), {}, may_be_empty=True)
    except BatchSizeError:
        return None


def batch_of_part(parts: Sequence[nn.Module], batch_dim: int) -> tuple[list[Input], int] | None:
    """Returns the inputs of the part of the module that is being called, and their size; None without a call.

    Of several that call each other, the first one tells.
    """
    known = {id(part) for part in parts}
    found: tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None = None
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == _CALL and id(frame.f_locals.get("self")) in known:
            local = frame.f_locals
            found = local["self"], tuple(local.get("args", ())), dict(local.get("kwargs", {}))
        frame = frame.f_back
    if found is None:
        return None
    module, args, kwargs = found
    inputs = inputs_of(module, batch_dim, args, kwargs)
    if not any(True for _ in leaves((args, kwargs))):
        return None
    return inputs, batch_size_of(inputs, args, kwargs, may_be_empty=True)
