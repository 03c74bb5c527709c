"""Deferred rules and launches give what rules and launches give at once."""

import gc
import weakref
from functools import partial
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pergrad
from pergrad.engine.collecting import ledger
from pergrad.errors import PergradError, ScopeError
from pergrad.runtime.queue import Queue
from pergrad.testing import assert_near, loop_grads

Gradients = dict[str, Tensor]


def assert_all_near(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys()
    for name, t in expected.items():
        assert_near(found[name], t, name)


def test_work_runs_in_order_and_once_when_too_many_bytes_are_held() -> None:
    done: list[int] = []
    queue = Queue(10)
    for number in range(2):
        queue.put(partial(done.append, number), 4)
    assert done == []
    queue.put(partial(done.append, 2), 4)
    assert done == [0, 1, 2]
    assert not queue.work
    queue.put(partial(done.append, 3), 9)
    assert done == [0, 1, 2]
    queue.drain()
    queue.drain()
    assert done == [0, 1, 2, 3]


def test_bytes_held_by_earlier_work_count_until_they_are_released() -> None:
    done: list[int] = []
    queue = Queue(10)
    queue.put(partial(done.append, 0))
    queue.hold(6)
    queue.release(6)
    queue.hold(6)
    assert done == []
    queue.hold(4)
    assert done == [0]


def test_work_may_enqueue_more_which_runs_after_all_that_was_there() -> None:
    done: list[str] = []
    queue = Queue(10**6)
    queue.put(lambda: (queue.put(partial(done.append, "late")), done.append("first")))
    queue.put(partial(done.append, "second"))
    queue.drain()
    assert done == ["first", "second", "late"]


def test_a_queue_without_a_bound_of_its_own_defers_nothing() -> None:
    done: list[int] = []
    Queue().put(partial(done.append, 1), 1)
    assert done == [1]


def test_work_that_another_thread_enqueues_during_a_drain_is_not_lost() -> None:
    done: list[int] = []
    queue = Queue(10**9)

    def add(start: int) -> None:
        for number in range(start, start + 500):
            queue.put(partial(done.append, number), 10**7)

    threads = [Thread(target=add, args=(start,)) for start in range(0, 2000, 500)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.drain()
    assert sorted(done) == list(range(2000))


def test_what_is_taken_in_is_no_part_of_a_graph() -> None:
    seen: list[bool] = []
    queue = Queue(10)
    queue.put(lambda: seen.append(torch.is_grad_enabled()), 1)
    queue.drain()
    assert seen == [False]
    assert torch.is_grad_enabled()


def test_after_an_error_the_others_are_let_go() -> None:
    def fails() -> None:
        raise KeyError

    queue, done = Queue(10), []
    queue.put(fails, 1)
    queue.put(partial(done.append, 1), 1)
    with pytest.raises(KeyError):
        queue.drain()
    queue.drain()
    assert done == []


class Model(nn.Module):
    """Layers whose gradients wait, tied weights, and a scale, which goes another way."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6)
        self.first = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.randn(6))
        self.last = nn.Linear(6, 7, bias=False)
        self.last.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(self.words(x)) * self.scale)
        return self.last(checkpoint(self.first, h, use_reentrant=False))  # type: ignore[no-any-return]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1)  # type: ignore[no-any-return]


@pytest.fixture
def _all_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_is_bound_by_python", lambda _: True)


@pytest.mark.usefixtures("_all_wait")
@pytest.mark.parametrize("bound", [None, 1, 500])
def test_every_quantity_of_what_waits_is_that_of_the_loop(bound: int | None) -> None:
    torch.manual_seed(0)
    model, x = Model().double(), torch.randint(7, (4, 3))
    expected = loop_grads(model, loss, x)
    grads, norms = pergrad.Grads(), pergrad.Norms()
    clipped = pergrad.ClippedSum(max_norm=1.0)
    with pergrad.record(model, grads, norms, clipped, max_bytes=bound):
        loss(model, x).sum().backward()
    squares = {name: g.flatten(1).square().sum(1) for name, g in expected.items()}
    total = torch.stack(list(squares.values())).sum(0).sqrt()
    assert_all_near(grads.result, expected)
    assert_all_near(norms.per_param, {name: s.sqrt() for name, s in squares.items()})
    weights = (1 / total).clamp(max=1)
    assert_all_near(
        clipped.result,
        {name: torch.einsum("n,n...->...", weights, g) for name, g in expected.items()},
    )


@pytest.mark.usefixtures("_all_wait")
def test_two_backwards_add_up() -> None:
    torch.manual_seed(0)
    model, x = Model().double(), torch.randint(7, (4, 3))
    with pergrad.record(model, pergrad.Grads()) as grads:
        total = loss(model, x).sum()
        total.backward(retain_graph=True)
        total.backward()
    assert_all_near(grads.result, {name: 2 * g for name, g in loop_grads(model, loss, x).items()})


@pytest.mark.usefixtures("_all_wait")
def test_nothing_waits_longer_than_the_backward() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(4, 5, 3, dtype=torch.float64)
    expected = loop_grads(model, loss, x)
    with pergrad.record(model, pergrad.Norms()) as norms:
        loss(model, x).sum().backward()
        x.zero_()  # what the next batch is read into
    of_each = {name: g.flatten(1).norm(dim=1) for name, g in expected.items()}
    assert_all_near(norms.per_param, of_each)


@pytest.mark.usefixtures("_all_wait")
def test_a_backward_out_of_sight_is_taken_in_at_the_end_of_the_block() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(4, 5, 3, dtype=torch.float64)
    with pergrad.record(model, pergrad.Grads()) as grads:
        total = loss(model, x).sum()
        with torch._C.DisableTorchFunction():
            total.backward()
    assert_all_near(grads.result, loop_grads(model, loss, x))


@pytest.mark.usefixtures("_all_wait")
def test_what_has_waited_may_not_have_changed() -> None:
    class Changes(nn.Module):
        """Writes over what its last layer has read, between the backward of that layer and the first's."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            h.register_hook(lambda _: h.detach().zero_())
            return self.last(h)  # type: ignore[no-any-return]

    def step() -> None:
        model = Changes()
        with pergrad.record(model, pergrad.Norms()):
            model(torch.randn(4, 3)).sum().backward()

    with pytest.raises(PergradError, match="`linear` was changed in place"):
        step()


@pytest.mark.usefixtures("_all_wait")
def test_after_an_error_nothing_that_waited_is_left() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            numbers = np.zeros(x.shape, dtype=np.float32)  # there as long as a tensor reads them
            read.append(weakref.ref(numbers))
            return torch.from_numpy(numbers).copy_(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 1

    def fails(_: Tensor) -> None:
        raise KeyError

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            hidden.register_hook(fails)
            return self.last(Reads.apply(hidden))  # type: ignore[no-any-return]

    def step() -> None:
        model = Model()
        with pergrad.record(model, pergrad.Norms()):
            model(torch.randn(4, 3)).sum().backward()

    read: list[weakref.ref[Any]] = []
    gc.disable()
    try:
        with pytest.raises(KeyError):
            step()
        assert read[0]() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("_all_wait")
def test_a_backward_after_the_block_is_an_error() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with pergrad.record(model, pergrad.Norms()):
        late = model(x).sum()
        late.backward(retain_graph=True)
    with pytest.raises(ScopeError, match="outside of its scope"):
        late.backward()
