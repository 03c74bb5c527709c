"""Measures how far a sum moves when one sample is removed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pergrad.errors import PrivacyError

__all__ = ["sensitivities"]


def sensitivities(summed: Callable[..., Mapping[str, Tensor]], *batch: Any) -> Tensor:
    """Returns, for each sample, the norm by which the sum changes without it: (n,), in float64.

    None may exceed the bound: this finds a single sample that is clipped wrongly.

    Args:
        summed: called as summed(*batch), returns sums by name, such as `Step.clipped_sums`.
        batch: tensors with the samples in their first dimension.

    >>> import torch
    >>> from pergrad.private import sensitivities
    >>> x = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    >>> sensitivities(lambda x: {"w": x.sum(0)}, x)
    tensor([5., 1.], dtype=torch.float64)
    """
    tensors = [t for t in batch if isinstance(t, Tensor) and t.dim()]
    if not tensors:
        raise PrivacyError("the batch has no tensor with samples in its first dimension")
    size = len(tensors[0])
    whole = {name: t.double() for name, t in summed(*batch).items()}
    moved = torch.zeros(size, dtype=torch.float64)
    for number in range(size):
        rest = torch.arange(size) != number
        without = summed(
            *(
                t[rest.to(t.device)] if isinstance(t, Tensor) and t.dim() and len(t) == size else t
                for t in batch
            )
        )
        parts = [(whole[name] - t.double()).norm() for name, t in without.items()]
        moved[number] = torch.stack(parts).norm()
    return moved
