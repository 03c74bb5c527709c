"""Refuses models and optimizers with which a step would not be private."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pergrad.distributed.sharding import is_sharded
from pergrad.errors import PrivacyError
from pergrad.private.drawing.ranks import Ranks
from pergrad.private.stepping.hashing import hashed
from pergrad.runtime import internals

_ACROSS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_WITHIN = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

__all__ = [
    "Written",
    "bare_model",
    "bare_optimizer",
    "check_modules",
    "check_optimizer",
    "check_parameters",
    "check_trained",
    "norms_of_batches",
]


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


def bare_model(model: nn.Module) -> nn.Module:
    """Returns the model within DistributedDataParallel; refuses one with Opacus's hooks."""
    if any(kind.__name__ == "AbstractGradSampleModule" for kind in type(model).__mro__):
        raise PrivacyError(
            f"{type(model).__name__} is Opacus's wrapper, whose hooks compute gradients of samples too: pass "
            "the model that it wraps, after remove_hooks()"
        )
    return model.module if isinstance(model, DistributedDataParallel) else model


def bare_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the optimizer within Accelerate's; refuses other wrappers, such as Opacus's."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer) and hasattr(optimizer, "accelerator_state"):
        return bare_optimizer(inner)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PrivacyError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        raise PrivacyError(
            f"{type(optimizer).__name__} wraps an optimizer and changes its steps: pass the one that it wraps"
        ) from None
    return optimizer


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuses an optimizer of parameters that get no noise."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PrivacyError(
            f"{type(optimizer).__name__} calls the loss several times in a step, and each call would need "
            "noise of its own: use an optimizer whose step needs no closure"
        )
    _check_groups(optimizer, model)
    if not any(p.requires_grad for p in model.parameters()):
        raise PrivacyError("no parameter of the model requires grad: there is nothing to train")


def check_trained(optimizer: torch.optim.Optimizer, model: nn.Module, names: Sequence[str]) -> None:
    """Refuses parameters that were frozen, unfrozen or added since the step was made."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    if trained != names:
        changed = sorted({*trained} ^ {*names}) or ["their order"]
        raise PrivacyError(
            f"the trained parameters have changed since the Step was made ({', '.join(changed)}), but noise "
            "is added only to those of that time: freeze parameters before the run, or make a new Step and "
            "load the state of this one"
        )
    _check_groups(optimizer, model)


def _check_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    known = {id(p) for p in model.parameters()}
    groups = enumerate(optimizer.param_groups)
    for place, p in ((place, p) for place, group in groups for p in group["params"]):
        if id(p) not in known:
            raise PrivacyError(
                f"group {place} of the optimizer has a parameter of shape {tuple(p.shape)} that is not the "
                "model's: its gradient would get no noise; put all trained parameters into one model"
            )


def check_parameters(model: nn.Module, ranks: Ranks) -> None:
    """Refuses ranks that begin with different parameters."""
    if ranks.count > 1:
        state = [t for t in (*model.parameters(), *model.buffers()) if not is_sharded(t)]
        mine = [int(hashed(t)) for t in state]
        if not ranks.agree(mine):
            raise PrivacyError(
                "the ranks begin with different parameters: wrap the model in DistributedDataParallel, or "
                "load the same state on all of them"
            )


class Written:
    """Sees whether a forward pass writes into buffers or parameters, which are released without noise.

    by_value: compare the values, for a step that is repeated and restores what it changes.
    parameters: look at parameters too.
    """

    def __init__(
        self, model: nn.Module, public: Iterable[str], *, by_value: bool, parameters: bool = True
    ) -> None:
        self._model, self._public, self._by_value = model, tuple(public), by_value
        self._has_parameters = parameters
        self._before = self._watched()
        self._values = self._hashes()

    def _watched(self) -> dict[str, tuple[Tensor, int]]:
        kept = [*self._model.named_buffers()]
        if self._has_parameters:
            kept += self._model.named_parameters()
        return {
            name: (t, internals.version_of(t))
            for name, t in kept
            if not is_sharded(t) and not any(fnmatchcase(name, p) for p in self._public)
        }

    def _hashes(self) -> dict[str, Tensor]:
        if not self._by_value:
            return {}
        return {name: hashed(t) for name, (t, _) in self._watched().items()}

    def check(self) -> None:
        values = self._hashes()
        for name, (t, version) in self._watched().items():
            before = self._before.get(name)
            is_same = before is not None and before[0].shape == t.shape
            if self._by_value:
                is_same = is_same and bool(values[name] == self._values[name])
            else:
                is_same = is_same and before is not None and before[0] is t and before[1] == version
            if not is_same:
                kind = "parameter" if isinstance(t, nn.Parameter) else "buffer"
                raise PrivacyError(
                    f"the forward pass changed the {kind} {name!r}, which would be released without noise: "
                    f"put its module into eval mode, or pass public_buffers=({name!r},) if it does not "
                    "depend on the data"
                )
