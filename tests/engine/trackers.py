"""Trackers without a recording, and tensors for them."""

from torch import Tensor

from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.samples.layouts import Scope
from pergrad.engine.samples.proving import note
from tests.engine.exactness import numbers

N = 4


def tracker_of(count: int = N, batch_dim: int = 0, own: tuple[Tensor, ...] = ()) -> Tracker:
    return Tracker(Scope(count), batch_dim, own)


def samples(tracker: Tracker, *shape: int, dim: int = 0, grad: bool = False) -> Tensor:
    t = numbers(*shape).requires_grad_(grad)
    tracker.mark(t, tracker.scope.samples(dim))
    return t


def use(tracker: Tracker, *shape: int, dim: int = 0) -> Tensor:
    """A result of a use of a weight, as a rule makes it: tagged, and noted in the graph."""
    t = numbers(*shape).requires_grad_() * 1
    note(t, tracker.scope.samples(dim))
    tracker.mark(t, tracker.scope.samples(dim))
    return t
