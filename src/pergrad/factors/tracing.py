"""Steps that are being traced: no number can be looked at, and a compiler rearranges what is computed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["computed_once", "is_traced"]


def is_traced(t: Tensor) -> bool:
    """Whether the tensor stands for one in a compiled step, and has no values."""
    return isinstance(t, FakeTensor)


def computed_once(t: Tensor) -> Tensor:
    """The same; a compiled step has it in memory then, and does not compute it anew wherever it is used."""
    return _computed_once(t) if is_traced(t) else t


@torch.library.custom_op("pergrad::computed_once", mutates_args=())
def _computed_once(t: Tensor) -> Tensor:
    return t.clone()


@_computed_once.register_fake
def _(t: Tensor) -> Tensor:
    return torch.empty_like(t)
