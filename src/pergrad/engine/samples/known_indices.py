"""Knows the values of small tensors that a traced step makes without its inputs, such as positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pergrad.runtime import internals, is_traced
from pergrad.runtime.containers import map_parts, tensors_in

__all__ = ["KnownIndices", "known_index"]

_KNOWN = "_pergrad_known_index"  # attribute of traced tensors: the version and the values
_INDICES = (torch.int32, torch.int64, torch.bool)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LARGEST = 2**20  # elements: of vectors of positions and their combinations, not of data
_LARGEST_OF_FLOATS = 2**12  # the same: positions in the dtype of a model
# Functions whose results are known if their arguments are; none of them draws random numbers.
_MADE = "arange zeros ones full tensor as_tensor"
_MOVED = """
    __getitem__ unsqueeze squeeze view reshape flatten expand expand_as broadcast_to repeat repeat_interleave
    t transpose permute contiguous clone to long int bool add sub mul floor_divide remainder __add__ __radd__
    __sub__ __rsub__ __mul__ __rmul__ __floordiv__ __mod__ cat stack roll flip neg __neg__ new_tensor
    eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ logical_and logical_or logical_not __and__
    __or__ __invert__
"""
_FUNCTIONS_OF_KNOWN: frozenset[Callable[..., Any]] = frozenset(
    getattr(of, name)
    for of in (torch, Tensor)
    for name in (_MADE if of is torch else "").split() + _MOVED.split()
    if hasattr(of, name)
)


_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)


class KnownIndices(TorchFunctionMode):
    """Notes the values of small tensors that a traced step makes without its inputs, such as positions.

    Samples are followed through an index by its values, and a traced tensor has none. A range between two of
    them has a size.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = args, kwargs
        if func is torch.arange:  # its size is that of the result
            args, kwargs = map_parts(_as_number, (args, kwargs))
        elif func in _INDEXING:  # how many rows a mask selects is the size of the result
            args = (args[0], map_parts(_as_places, args[1]), *args[2:])
        found = func(*args, **kwargs)
        is_new = func in _FUNCTIONS_OF_KNOWN and isinstance(found, Tensor) and is_traced(found)
        if is_new and _is_small(found):
            self._note(found, func, *given)
        return found

    @staticmethod
    def _note(found: Tensor, func: Any, args: Any, kwargs: Any) -> None:
        given = (args, kwargs)
        if any(is_traced(t) and known_index(t) is None for t in tensors_in(given)):
            return
        with internals.outside_of_trace(), internals.DisableTorchFunction():
            args, kwargs = map_parts(_as_known, given)
            values = func(*args, **kwargs)
        if values.shape == found.shape and values.dtype == found.dtype:
            setattr(found, _KNOWN, (internals.version_of(found), values))


def _as_known(value: Any) -> Any:
    if isinstance(value, Tensor):
        return known_index(value) if is_traced(value) else value.cpu()
    is_place = isinstance(value, torch.device) or (
        isinstance(value, str) and value.partition(":")[0] in ("cuda", "xpu", "mps")
    )
    return torch.device("cpu") if is_place else value


def _as_places(value: Any) -> Any:
    """Replaces a known mask, (n,), by the numbers that it selects."""
    if not isinstance(value, Tensor) or not is_traced(value) or value.dtype is not torch.bool:
        return value
    known = known_index(value) if value.dim() == 1 else None
    return value if known is None else torch.tensor(_selected(known), device=value.device)


def _selected(mask: Tensor) -> list[int]:
    with internals.outside_of_trace(), internals.DisableTorchFunction():
        found: list[int] = mask.nonzero().flatten().tolist()
        return found


def _as_number(value: Any) -> Any:
    known = known_index(value) if isinstance(value, Tensor) and is_traced(value) else None
    return value if known is None or known.dim() else known.item()


def known_index(t: Tensor) -> Tensor | None:
    """Returns the values of a small traced tensor, on the CPU; None if they depend on the inputs."""
    known = getattr(t, _KNOWN, None)
    if known is None:
        return None
    version, values = known
    return cast(Tensor, values) if internals.version_of(t) == version else None


def _is_small(t: Tensor) -> bool:
    most = _LARGEST if t.dtype in _INDICES else _LARGEST_OF_FLOATS if t.dtype in _FLOATS else -1
    size = t.numel()
    return type(size) is int and size <= most  # sizes that depend on values are symbols
