"""Declares how functions of this package move samples, for the engine to read.

The engine has handlers for torch's own functions, by name. A function that a rule or a decomposition
introduces declares its movement with `moves`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

__all__ = [
    "DECLARED",
    "AreSamples",
    "LikeFunction",
    "Movement",
    "RowsTimesWeight",
    "SamplesOf",
    "SequencesOf",
    "StartedFrom",
    "StatesOf",
    "are_samples",
    "carry_samples",
    "moves",
]


@dataclass(frozen=True)
class SamplesOf:
    """The result has its samples where the argument has them, unless it needs gradients and has its own."""

    argument: int


@dataclass(frozen=True)
class RowsTimesWeight:
    """The result has the rows of `input`, each multiplied with some matrix of `weight`."""

    input: int
    weight: int


@dataclass(frozen=True)
class AreSamples:
    """The rows of the only argument are the samples, if there are as many and its layout is unknown."""


@dataclass(frozen=True)
class LikeFunction:
    """Samples move as in another function, which takes its first arguments in the same order."""

    function: Callable[..., Any]


@dataclass(frozen=True)
class SequencesOf:
    """The result has the samples of `rows`; each of its sequences must belong to one sample.

    The argument `steps` describes the sequences: the `dim` of time, or their `sizes` if packed.
    """

    steps: int
    rows: int


@dataclass(frozen=True)
class StartedFrom:
    """The result has the samples of `input`; those of `state`, of each sequence, if it has none.

    The argument `steps` describes the sequences, as for `SequencesOf`.
    """

    steps: int
    input: int
    state: int


@dataclass(frozen=True)
class StatesOf:
    """The first result has the samples of `hidden`, all others those of `start`, which must be the same.

    The argument `steps` describes the sequences, as for `SequencesOf`.
    """

    steps: int
    start: int
    hidden: int


Movement: TypeAlias = (
    SamplesOf | RowsTimesWeight | AreSamples | LikeFunction | SequencesOf | StartedFrom | StatesOf
)
DECLARED: dict[Callable[..., Any], Movement] = {}
F = TypeVar("F", bound=Callable[..., Any])


def moves(
    kind: type[Movement], function: Callable[..., Any] | None = None, **arguments: str
) -> Callable[[F], F]:
    """Declares how the decorated function moves samples; its arguments are given by their names.

    >>> @moves(SamplesOf, argument="input")
    ... def doubled(scale, input):
    ...     return input * scale
    >>> DECLARED.pop(doubled)
    SamplesOf(argument=1)
    """

    def declare(declaring: F) -> F:
        names = [*inspect.signature(declaring).parameters]
        places: dict[str, Any] = {role: names.index(name) for role, name in arguments.items()}
        if function is not None:
            places["function"] = function
        DECLARED[declaring] = kind(**places)
        return declaring

    return declare


@moves(SamplesOf, argument="like")
def carry_samples(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns `tensor`, declaring that its rows belong to the same samples as the rows of `like`."""
    if has_torch_function((tensor, like)):
        return handle_torch_function(carry_samples, (tensor, like), tensor, like)
    return tensor


@moves(AreSamples)
def are_samples(tensor: Tensor) -> Tensor:
    """Returns `tensor`, declaring that its rows are the samples, if its layout is unknown."""
    if has_torch_function((tensor,)):
        return handle_torch_function(are_samples, (tensor,), tensor)
    return tensor
