"""Refuses models and optimizers with which a step would not be private."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pergrad.errors import PrivacyError
from pergrad.private.drawing.ranks import Ranks
from pergrad.runtime import internals

_ACROSS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_WITHIN = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

__all__ = ["Buffers", "check_modules", "check_optimizer", "check_parameters", "norms_of_batches"]


def norms_of_batches(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Lists the layers that keep statistics of batches, by name."""
    kinds = (*_ACROSS, *_WITHIN)
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]


def check_modules(norms: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuses layers that mix samples or store their statistics."""
    for name, module in norms:
        keeps = module.running_mean is not None
        is_fixed = not module.training and keeps
        if isinstance(module, _WITHIN):  # of each sample alone, but for running statistics
            is_fixed = not module.training or not keeps
        if not is_fixed:
            raise PrivacyError(
                f"{type(module).__name__} {name!r} is in training mode and takes statistics over the samples "
                "of a batch, which are not private: use GroupNorm, or put the layer into eval mode"
            )


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuses an optimizer of parameters that get no noise."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PrivacyError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    known = {id(p) for p in model.parameters()}
    groups = enumerate(optimizer.param_groups)
    for place, p in ((place, p) for place, group in groups for p in group["params"]):
        if id(p) not in known:
            raise PrivacyError(
                f"group {place} of the optimizer has a parameter of shape {tuple(p.shape)} that is not the "
                "model's: its gradient would get no noise; put all trained parameters into one model"
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise PrivacyError("no parameter of the model requires grad: there is nothing to train")


def check_parameters(model: nn.Module, ranks: Ranks) -> None:
    """Refuses sharded parameters, and ranks that begin with different ones."""
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            raise PrivacyError(
                f"parameter {name!r} is sharded over ranks, which private steps do not support: replicate "
                "the model, as DistributedDataParallel does"
            )
    if ranks.count > 1:
        state = [*model.parameters(), *model.buffers()]
        mine = [int(torch.hash_tensor(t.detach()).view(torch.int64)) for t in state]
        if not ranks.agree(mine):
            raise PrivacyError(
                "the ranks begin with different parameters: wrap the model in DistributedDataParallel, or "
                "load the same state on all of them"
            )


class Buffers:
    """Sees whether a forward pass writes into buffers, which are released without noise.

    by_value: compare the values, for a step that is repeated and restores what it changes.
    """

    def __init__(self, model: nn.Module, public: Iterable[str], *, by_value: bool) -> None:
        self._model, self._public = model, tuple(public)
        self._before = self._watched()
        self._values = (
            {name: t.clone() for name, (t, _) in self._before.items()} if by_value else {}
        )

    def _watched(self) -> dict[str, tuple[Tensor, int]]:
        return {
            name: (buffer, internals.version_of(buffer))
            for name, buffer in self._model.named_buffers()
            if not any(fnmatchcase(name, pattern) for pattern in self._public)
        }

    def check(self) -> None:
        for name, (buffer, version) in self._watched().items():
            if name in self._values:
                is_same = _is_equal(self._values[name], buffer)
            else:
                before = self._before.get(name)
                is_same = before is not None and before[0] is buffer and before[1] == version
            if not is_same:
                raise PrivacyError(
                    f"the forward pass changed the buffer {name!r}, which would be released without noise: "
                    f"put its module into eval mode, or pass public_buffers=({name!r},) if it does not "
                    "depend on the data"
                )


def _is_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same, NaNs included."""
    return (
        a.shape == b.shape and a.dtype is b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
    )
