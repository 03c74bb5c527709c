"""Trackers without a recording, and tensors for them."""

import torch
from torch import Tensor

from pergrad.engine.collecting.ledger import UseCounter
from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.intercepting.weights import Root
from pergrad.engine.samples.layouts import Scope
from pergrad.engine.samples.proving import note
from pergrad.factors import Factor
from pergrad.runtime.queue import Queue
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


class Nowhere:
    passes = 1
    queue = Queue()

    def expects(self, name: str) -> bool:
        return True

    def add(self, name: str, factor: Factor) -> None: ...


def with_root(tracker: Tracker, *shape: int) -> Tensor:
    value = numbers(*shape).requires_grad_()
    tracker.roots[id(value)] = Root(
        tracker.scope, "w", value, UseCounter(), Nowhere(), torch.zeros((), requires_grad=True)
    )
    return value
