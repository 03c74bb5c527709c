import gc
import time

import pytest
import torch
from torch import Tensor

from benchmarks.timing import middle, orders, settled_heap, visit


def test_every_round_has_each_method_once() -> None:
    found = list(orders(["x", "y", "z"], rounds=4, seed=0))
    assert [sorted(order) for order in found] == [["x", "y", "z"]] * 4


def test_rounds_differ_in_order_and_repeat_by_seed() -> None:
    found = list(orders(["x", "y", "z"], rounds=8, seed=0))
    assert found == list(orders(["x", "y", "z"], rounds=8, seed=0))
    assert len(set(map(tuple, found))) > 1


def test_clearing_and_warming_up_are_not_timed() -> None:
    calls = []

    def step() -> dict[str, Tensor]:
        calls.append("step")
        return {}

    def clear() -> None:
        calls.append("clear")
        time.sleep(0.02)

    times = visit(step, clear, steps=2, device=torch.device("cpu"))
    assert calls == ["step", "clear"] * 3
    assert len(times) == 2
    assert min(times) < 0.02


def test_middle_is_not_moved_by_one_outlier() -> None:
    assert middle([1.0, 1.0, 1.0, 1.0, 100.0]) == (1.0, (1.0, 1.0))
    assert middle([2.0]) == (2.0, (2.0, 2.0))


def test_heap_is_as_it_was_after_a_run() -> None:
    gc.unfreeze()
    before = gc.get_freeze_count()
    with settled_heap():
        assert gc.get_freeze_count() > before
    assert gc.get_freeze_count() == 0


def test_a_heap_that_was_settled_before_stays_so() -> None:
    gc.unfreeze()
    gc.freeze()
    try:
        with settled_heap():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@pytest.mark.gpu
def test_steps_on_a_gpu_are_timed_in_a_row_and_not_shorter_than_the_device_takes() -> None:
    device = torch.device("cuda")
    a = torch.randn(4096, 4096, device=device)

    def step() -> dict[str, Tensor]:
        return {"product": a @ a}

    (few,) = visit(step, lambda: None, steps=4, device=device)
    (many,) = visit(step, lambda: None, steps=16, device=device)
    assert 2 * 4096**3 / few < 2e15  # no device is that fast
    assert 0.5 < few / many < 2
