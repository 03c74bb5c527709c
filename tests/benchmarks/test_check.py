import pytest
import torch
from torch import Tensor

from benchmarks.check import disagreement
from benchmarks.loop import batch_gradients, clip_bound, clipped_sum, norm, spread
from benchmarks.methods import METHODS, Quantity
from benchmarks.models import Task, build


@pytest.fixture
def task() -> Task:
    return build("mlp", "tiny", seed=0, device=torch.device("cpu")).double()


def judge(task: Task, got: dict[str, Tensor], quantity: Quantity = "grads") -> str | None:
    return disagreement(task, quantity, got, tolerance=1e-6, samples=3)


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


def test_one_wrong_norm_is_named(task: Task) -> None:
    got = METHODS["vmap-norms"].prepare(task)()
    assert judge(task, got, "norms") is None
    got["norms"][2] *= 1 + 1e-4
    message = judge(task, got, "norms")
    assert message is not None
    assert message.startswith("norms[2]: relative error 1.0e-04")


def test_norms_of_fewer_samples_are_named(task: Task) -> None:
    got = {"norms": METHODS["vmap-norms"].prepare(task)()["norms"][:1]}
    assert judge(task, got, "norms") == "norms: results of 1 samples, expected 3"


def test_clipped_sum_that_leaves_one_sample_unclipped_is_named(task: Task) -> None:
    exact = clipped_sum(task, clip_bound(task))
    assert judge(task, exact, "clipped") is None
    unclipped = batch_gradients(task, slice(None))
    message = judge(task, {**exact, "head.bias": unclipped["head.bias"]}, "clipped")
    assert message is not None
    assert message.startswith("head.bias: relative error")


def test_clipped_sum_of_a_large_bound_is_the_sum_and_of_a_small_one_within_it(task: Task) -> None:
    torch.testing.assert_close(clipped_sum(task, 1e9), batch_gradients(task, slice(None)))
    assert norm(clipped_sum(task, 1e-3)) <= 3 * 1e-3


@pytest.mark.parametrize("model", ["mlp", "vit"])
def test_bound_clips_some_samples_and_not_all(model: str) -> None:
    task = build(model, "tiny", seed=0, device=torch.device("cpu"))
    norms = [norm(batch_gradients(task, slice(n, n + 1))) for n in range(task.inputs.shape[0])]
    clipped = sum(one > clip_bound(task) for one in norms)
    assert 0.2 <= clipped / len(norms) <= 0.8


def test_wrong_gradient_of_the_first_layers_output_is_named(task: Task) -> None:
    fresh = build("mlp", "tiny", seed=0, device=torch.device("cpu")).double()
    got = METHODS["inputs"].prepare(task)()
    assert judge(fresh, got, "floor") is None
    got["layers.0"][1] *= 2
    message = judge(fresh, got, "floor")
    assert message is not None
    assert message.startswith("layers.0[1]: relative error")
