"""Trials cut, change and repeat a batch, and leave model and random state as they were."""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import pergrad
from pergrad.engine.checking.trial import Trial
from pergrad.testing import loop_grads
from tests.engine.exactness import Formula, assert_all_near, numbers

SIZE, D, OUT = 5, 4, 3


def loss(model: Callable[..., Any], *batch: Any) -> Tensor:
    return (model(*batch) + 0.5).pow(3).flatten(1).sum(1)


def trial(*batch: Any, model: nn.Module | None = None, batch_first: bool = True) -> Trial:
    model = nn.Linear(D, OUT).double() if model is None else model
    return Trial(model, loss, batch, None, "sum", batch_first)


@pytest.mark.parametrize("name", ["batch norm", "spectral norm"])
def test_buffers_that_a_forward_changes_are_put_back(name: str) -> None:
    model = nn.Linear(D, OUT)
    model = nn.Sequential(model, nn.BatchNorm1d(OUT)) if name[0] == "b" else spectral_norm(model)
    values = [t.clone() for t in model.double().buffers()]
    pergrad.verify(model, loss, numbers(SIZE, D), quiet=True)
    torch.testing.assert_close(list(model.buffers()), values, rtol=0, atol=0)


@dataclass
class Pair:
    x: Tensor
    n: int = SIZE


WRAPPERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda x: x, lambda given: given),
    "dict": (lambda x: {"x": x}, lambda given: given["x"]),
    "mapping": (lambda x: UserDict(x=x), lambda given: given["x"]),
    "dataclass": (Pair, lambda given: given.x),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_sample_is_cut_out_of_whatever_holds_it(name: str) -> None:
    wrap, unwrap = WRAPPERS[name]
    x = numbers(SIZE, D)
    for n in range(SIZE):
        (given,) = trial(wrap(x)).sample(n, SIZE)
        assert torch.equal(unwrap(given), x[n : n + 1])


def test_samples_of_the_second_dimension_are_cut_there_and_vectors_along_their_only_one() -> None:
    x, y = numbers(3, SIZE, D), torch.arange(SIZE)
    cut, label = trial(x, y, batch_first=False).sample(2, SIZE)
    assert torch.equal(cut, x[:, 2:3])
    assert torch.equal(label, y[2:3])


def test_what_has_no_samples_is_left_as_it_is() -> None:
    table, flag = numbers(D, SIZE), True
    assert [id(v) for v in trial(numbers(SIZE), flag, "mean").sample(1, SIZE)[1:]] == [
        id(flag),
        id("mean"),
    ]
    (given,) = trial(table).sample(1, SIZE)
    assert torch.equal(given, table)


def test_one_sample_is_made_nan_and_the_callers_batch_is_not() -> None:
    x, ids = numbers(SIZE, D), torch.arange(SIZE)
    batch = trial(x, ids).spoilt(1, SIZE)
    assert batch is not None
    assert batch[0].isnan().all(1).tolist() == [n == 1 for n in range(SIZE)]
    assert torch.equal(batch[1], ids)
    assert not x.isnan().any()
    assert trial(ids).spoilt(1, SIZE) is None


def test_a_copy_is_of_a_sample_that_differs() -> None:
    ids = torch.tensor([[1, 2], [1, 2], [3, 4]])
    batch = trial(ids).with_copy(0, 3)
    assert batch is not None
    assert batch[0].tolist() == [[3, 4], [1, 2], [3, 4]]
    assert ids.tolist() == [[1, 2], [1, 2], [3, 4]]
    assert trial(ids[:2]).with_copy(0, 2) is None


def test_recorded_and_ordinary_gradients_are_those_of_the_loop() -> None:
    x = numbers(SIZE, D)
    run = trial(x)
    expected = loop_grads(run.model, loss, x)
    assert_all_near(run.per_sample(run.batch).result, expected)
    assert_all_near(run.ordinary(run.batch), {name: g.sum(0) for name, g in expected.items()})


def test_ordinary_gradients_are_dense_and_zero_where_nothing_reaches() -> None:
    table = nn.Embedding(7, 2, sparse=True)
    model = Formula(lambda m, ids: m.table(ids), table=table, unused=numbers(2)).double()
    found = trial(torch.arange(SIZE), model=model).ordinary((torch.arange(SIZE),))
    assert not found["table.weight"].is_sparse
    assert found["table.weight"].any()
    assert not found["unused"].any()


@pytest.mark.parametrize("is_always_random", [False, True])
def test_a_model_that_draws_numbers_is_put_into_eval_mode_and_back(is_always_random: bool) -> None:
    drop = nn.Linear(D, D) if is_always_random else nn.Dropout()

    def noisy(m: Any, x: Tensor) -> Tensor:
        return m.drop(x) + (torch.rand_like(x) if is_always_random else 0)

    model = Formula(noisy, drop=drop).double()
    with trial(numbers(SIZE, D), model=model).repeatable() as notes:
        assert not model.drop.training
    assert model.drop.training
    assert len(notes) == 1
    assert ("even in eval mode" in notes[0]) is is_always_random


def test_a_model_that_draws_none_stays_in_its_mode() -> None:
    run = trial(numbers(SIZE, D))
    with run.repeatable() as notes:
        assert run.model.training
    assert notes == []
