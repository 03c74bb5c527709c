"""The conditions of the zoo: plain, with checkpointed layers, under autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

__all__ = [
    "CONDITIONS",
    "Condition",
    "InapplicableError",
    "checkpointing",
    "under",
]

Condition: TypeAlias = Literal["plain", "checkpoint", "reentrant", "autocast"]
CONDITIONS: tuple[Condition, ...] = get_args(Condition)


class InapplicableError(Exception):
    """The model itself cannot be run so: there is nothing to compare."""


def under(condition: Condition, device: str) -> AbstractContextManager[Any]:
    """What the forward runs within."""
    if condition == "autocast":
        return torch.autocast(torch.device(device).type, torch.bfloat16)
    return nullcontext()


class _Counted:
    """A function that knows how often it was called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)


@contextmanager
def checkpointing(model: nn.Module, condition: Condition) -> Iterator[None]:
    """Within, the layers that the library can checkpoint are; an error if none was.

    It does so in training mode only. So just these layers are in it, and draw nothing.
    """
    if condition not in ("checkpoint", "reentrant"):
        yield
        return
    try:
        model.gradient_checkpointing_enable({"use_reentrant": condition == "reentrant"})
    except ValueError as error:
        raise InapplicableError(str(error)) from error
    counted: list[_Counted] = []
    for module in model.modules():
        if not getattr(module, "gradient_checkpointing", False):
            continue
        module.training = True
        for part in (module, getattr(module, "config", None)):
            for name, value in vars(part).items() if part is not None else ():
                if "drop" in name and isinstance(value, float):
                    setattr(part, name, 0.0)
        counted.append(_Counted(module._gradient_checkpointing_func))
        module._gradient_checkpointing_func = counted[-1]
    yield
    if not any(function.calls for function in counted):
        raise InapplicableError("no layer was checkpointed")
