"""Counts of data over the batch are followed through functions that keep the number, and no further."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.samples.layouts import Constant, Counted, Layout, Scope
from pergrad.engine.samples.propagation.totals import parts_of

MASK = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1]], dtype=torch.float64)


def layout_of(make: Callable[[Tensor, Callable[..., Tensor]], Tensor]) -> Layout:
    """Returns the layout of a function of a mask of four samples; `make` calls functions by its argument."""
    tracker, mask = Tracker(Scope(4), 0), MASK.clone()
    tracker.mark_input(mask, 0)

    def call(func: Callable[..., Tensor], *args: object, **kwargs: object) -> Tensor:
        output = func(*args, **kwargs)
        tracker.propagate(func, args, kwargs, output)
        return output

    return tracker.layout(make(mask, call))  # type: ignore[arg-type]


KEPT: dict[str, Callable[[Tensor, Callable[..., Tensor]], Tensor]] = {
    "sum": lambda k, f: f(Tensor.sum, k),
    "mean": lambda k, f: f(torch.mean, k),
    "count_nonzero": lambda k, f: f(torch.count_nonzero, k),
    "cast": lambda k, f: f(Tensor.float, f(Tensor.sum, k)),
    "clamped": lambda k, f: f(Tensor.clamp, f(Tensor.sum, k), min=1),
    "maximum": lambda k, f: f(torch.maximum, f(Tensor.sum, k), torch.ones((), dtype=k.dtype)),
    "plus little": lambda k, f: f(Tensor.add, f(Tensor.sum, k), 1e-8),
    "times a number": lambda k, f: f(Tensor.mul, f(Tensor.sum, k), 3),
    "over a number": lambda k, f: f(Tensor.div, f(Tensor.sum, k), 3),
    "flat": lambda k, f: f(Tensor.sum, f(Tensor.flatten, k)),
}
DROPPED: dict[str, Callable[[Tensor, Callable[..., Tensor]], Tensor]] = {
    "plus one": lambda k, f: f(Tensor.add, f(Tensor.sum, k), 1),
    "plus one in place": lambda k, f: f(Tensor.add_, f(Tensor.sum, k), 1),
    "square root": lambda k, f: f(torch.sqrt, f(Tensor.sum, k)),
    "reciprocal": lambda k, f: f(torch.div, torch.ones(()), f(Tensor.sum, k)),
    "of two": lambda k, f: f(Tensor.add, f(Tensor.sum, k), f(Tensor.sum, k)),
    "largest": lambda k, f: f(Tensor.max, k),
    "over samples only": lambda k, f: f(Tensor.sum, k, 0),
}


@pytest.mark.parametrize("name", KEPT)
def test_same_numbers_and_multiples_stay_counts(name: str) -> None:
    layout = layout_of(KEPT[name])
    assert isinstance(layout, Counted)
    assert parts_of(layout).tolist() == [2, 2, 2, 3]


@pytest.mark.parametrize("name", DROPPED)
def test_other_numbers_are_constants(name: str) -> None:
    layout = layout_of(DROPPED[name])
    assert isinstance(layout, Constant)
    assert not isinstance(layout, Counted)
