"""Whether a step is being traced: then no number can be looked at."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["is_traced"]


def is_traced(t: Tensor) -> bool:
    """Whether the tensor stands for one in a compiled step, and has no values."""
    return isinstance(t, FakeTensor)
