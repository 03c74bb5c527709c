import gc
import time

import torch
from torch import Tensor

from benchmarks.timing import middle, orders, settled_heap, visit


def test_every_round_has_each_pair_once() -> None:
    visits = list(orders(["a", "b"], ["x", "y", "z"], rounds=4, seed=0))
    for number in range(4):
        pairs = [pair[1:] for pair in visits if pair[0] == number]
        assert len(pairs) == len(set(pairs)) == 6


def test_rounds_differ_in_order_and_repeat_by_seed() -> None:
    visits = list(orders(["a", "b"], ["x", "y", "z"], rounds=8, seed=0))
    assert visits == list(orders(["a", "b"], ["x", "y", "z"], rounds=8, seed=0))
    rounds = {tuple(v[1:] for v in visits if v[0] == number) for number in range(8)}
    assert len(rounds) > 1


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
    before = gc.get_freeze_count()
    with settled_heap():
        assert gc.get_freeze_count() > before
    assert gc.get_freeze_count() == 0
