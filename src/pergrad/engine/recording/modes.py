"""Enters a recorder beneath the modes of the user, which may change what functions do."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode

from pergrad.runtime import internals

__all__ = ["entered_beneath_modes", "foreign_modes", "signature_of_modes"]

_PACKAGES = frozenset(["torch", "pergrad"])


@contextmanager
def entered_beneath_modes(recorder: TorchFunctionMode) -> Iterator[None]:
    """Enters a mode such that modes of others that are active already get each function first.

    What they call instead of it is what the recorder sees, as if they had been entered within the block.
    """
    modes, foreign = internals.function_modes(), foreign_modes()
    order = [*(mode for mode in modes if _is_known(mode)), recorder, *foreign]
    _exchange(len(modes), order)
    try:
        yield
    finally:
        _exchange(len(order), modes)


def foreign_modes() -> list[TorchFunctionMode]:
    """Lists the active modes of the user."""
    return [mode for mode in internals.function_modes() if not _is_known(mode)]


def signature_of_modes() -> Hashable:
    """Returns what a cached answer may depend on: kinds of the user's modes, and their attributes."""
    return tuple((type(mode), *map(_signature, vars(mode).items())) for mode in foreign_modes())


def _signature(attribute: tuple[str, Any]) -> Hashable:
    """Returns an attribute itself, or what equals nothing else if it may change."""
    try:
        hash(attribute)
    except TypeError:
        return object()
    return type(attribute[1]), attribute


def _exchange(count: int, modes: list[TorchFunctionMode]) -> None:
    """Replaces the `count` uppermost modes of the thread."""
    for _ in range(count):
        internals.pop_uppermost_mode()
    for mode in modes:
        internals.push_mode(mode)


def _is_known(mode: TorchFunctionMode) -> bool:
    """Whether a mode is torch's own, such as a default device, or one of this package."""
    return type(mode).__module__.partition(".")[0] in _PACKAGES
