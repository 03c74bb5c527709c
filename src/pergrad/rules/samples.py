"""What a decomposition knows about the samples and the engine cannot: identities that declare it."""

from __future__ import annotations

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

__all__ = ["are_samples", "carry_samples"]


def carry_samples(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` itself; its rows belong to the samples that the rows of `like` belong to."""
    if has_torch_function((tensor, like)):
        return handle_torch_function(carry_samples, (tensor, like), tensor, like)
    return tensor


def are_samples(tensor: Tensor) -> Tensor:
    """`tensor` itself; unless more is known, its rows are the samples, if there are as many."""
    if has_torch_function((tensor,)):
        return handle_torch_function(are_samples, (tensor,), tensor)
    return tensor
