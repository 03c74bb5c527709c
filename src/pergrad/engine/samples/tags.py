"""Names the attributes by which tensors carry their layouts, and takes them off when a recording ends."""

from __future__ import annotations

from collections import OrderedDict
from operator import call
from typing import Any, TypeVar
from weakref import ref

from torch import Tensor

__all__ = [
    "DATA",
    "TAG",
    "VERSION",
    "Tag",
    "Tagged",
    "leaving_tags_out_of_files",
    "remove_tags",
]

TAG = "_pergrad_layout"  # the attribute of a tensor that holds its layout or its weight
DATA = "_pergrad_data"  # the same, of a tensor that was made while gradients were off
VERSION = "_pergrad_version"  # the version of the tensor that the tag speaks of, if it is not 0
_NAMES = frozenset([TAG, DATA, VERSION])

Self = TypeVar("Self", bound="Tag")


class Tag:
    """Base class of layouts and weights. Copies share them; in a file, an empty dict stands for one.

    The dict loads with `weights_only=True`, and is of no scope. It is in a file only where the recorder does
    not see that a tensor is saved, as in another thread.
    """

    __slots__ = ()

    def __copy__(self: Self) -> Self:
        return self

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), {"scope": None}


class _State(dict[str, Any]):
    """The attributes of a tensor: a copy gets all of them, and a file all but tags."""

    def __reduce__(self) -> tuple[Any, ...]:
        kept = [(name, value) for name, value in self.items() if name not in _NAMES]
        return OrderedDict, (), None, None, iter(kept)


def leaving_tags_out_of_files(reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Changes what `Tensor.__reduce_ex__` returns, for both copies and files, so that files have no tags."""
    make, args, *others = reduced
    state = args[-1] if args else None
    if not isinstance(state, dict) or _NAMES.isdisjoint(state):
        return reduced
    return make, (*args[:-1], _State(state)), *others


class Tagged(list["ref[Tensor]"]):
    """Refers weakly to the tensors that one recording has tagged."""

    _left = 0  # references after the last time that dead ones were dropped

    def forget_dead(self) -> None:
        """Drops the references to tensors that are gone, as most are after a backward pass.

        Not before there are twice as many as the last time: a forward may run a backward pass at each step.
        """
        count = len(self)
        if count > 2 * self._left:
            self[:count] = [reference for reference in self[:count] if reference() is not None]
            self._left = len(self)

    def untag(self, scope: Any) -> None:
        """Takes the tags of a scope off the tensors that are still there."""
        for t in map(call, self):
            if t is not None:
                remove_tags(t, scope)
        self.clear()


def remove_tags(t: Tensor, scope: Any = None) -> None:
    """Takes the tags off a tensor: those of one scope, or all."""
    is_any = False
    for name in (TAG, DATA):
        tag = getattr(t, name, None)
        if tag is not None and (scope is None or tag.scope is scope):
            delattr(t, name)
            is_any = True
    if is_any and hasattr(t, VERSION):
        delattr(t, VERSION)
