import pytest
import torch
from torch import Tensor

from benchmarks.check import disagreement, spread
from benchmarks.methods import METHODS
from benchmarks.models import Task, build


@pytest.fixture
def task() -> Task:
    return build("mlp", "tiny", seed=0, device=torch.device("cpu")).double()


def judge(task: Task, got: dict[str, Tensor]) -> str | None:
    return disagreement(task, "grads", got, tolerance=1e-6, samples=3)


def test_exact_gradients_are_accepted(task: Task) -> None:
    assert judge(task, METHODS["vmap"].prepare(task)()) is None


@pytest.mark.parametrize("factor", [1 + 1e-4, 0.0, float("nan")])
def test_one_wrong_sample_of_one_parameter_is_named(task: Task, factor: float) -> None:
    got = METHODS["vmap"].prepare(task)()
    got["head.bias"][2] *= factor
    message = judge(task, got)
    assert message is not None
    assert message.startswith("head.bias[2]: relative error")


def test_missing_parameter_is_named(task: Task) -> None:
    got = METHODS["vmap"].prepare(task)()
    del got["head.bias"]
    assert judge(task, got) == "no result for head.bias"


def test_wrong_shape_is_named(task: Task) -> None:
    got = METHODS["vmap"].prepare(task)()
    got["head.bias"] = got["head.bias"][..., None]
    assert judge(task, got) == "head.bias[0]: shape (10, 1), expected (10,)"


def test_fewer_rows_than_samples_are_named(task: Task) -> None:
    got = METHODS["vmap"].prepare(task)()
    got["head.bias"] = got["head.bias"][:1]
    assert judge(task, got) == "head.bias: results of 1 samples, expected 3"


@pytest.mark.parametrize(("batch", "count"), [(1, 4), (3, 4), (4, 4), (5, 4), (256, 8)])
def test_spread_takes_first_and_last_and_none_twice(batch: int, count: int) -> None:
    chosen = spread(batch, count)
    assert len(set(chosen)) == len(chosen) == min(batch, count)
    assert {chosen[0], chosen[-1]} == {0, batch - 1}
