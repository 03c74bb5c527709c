"""Infers the layouts of tensors that are created from sizes alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pergrad.engine.samples.layouts import Layout
from pergrad.engine.samples.propagation.table import Call, moves_samples
from pergrad.engine.samples.sizes import BatchSize

__all__ = ["layout_by_sizes", "sizes_in"]


# Numbers of samples: what belongs to a sample is what they are an index of.
_ENUMERATIONS = frozenset(["arange", "range", "randperm"])


def sizes_in(value: Any) -> Iterator[BatchSize]:
    """Yields the sizes among a function's arguments that count samples."""
    if isinstance(value, BatchSize):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from sizes_in(item)


@moves_samples("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")
def layout_by_sizes(call: Call) -> Layout:
    """Finds the dimension whose given size counts samples, as in `zeros(x.shape[0], T)`."""
    sizes = [*sizes_in(call.args), *sizes_in(tuple(call.kwargs.values()))]
    if sizes and call.name not in _ENUMERATIONS:
        count = call.scope.count
        given = _positions(call)
        for dim, size in enumerate(call.output.shape):
            tagged = isinstance(given[dim], BatchSize) if given else size in sizes
            if tagged and size and size % count == 0:
                return call.scope.samples(dim, 1, size // count)
    return call.scope.constant()


def _positions(call: Call) -> list[Any] | None:
    """Returns the sizes as given, one for each dimension of the output; None if they cannot be found."""
    rank = call.output.dim()
    for given in (call.args, call.args[1:], *call.args, *call.kwargs.values()):
        if not isinstance(given, list | tuple) or len(given) != rank:
            continue
        if all(isinstance(x, int) for x in given):
            return list(given)
    return None
