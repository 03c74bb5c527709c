"""Layouts of new tensors, inferred from sizes that are tagged as counting samples."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Constant, Samples, Scope
from pergrad.engine.samples.sizes import BatchSize
from tests.engine.samples.propagation.dependence import Batched, assert_followed, recording

COUNT = 4  # and every other size too: only the tags tell


def layout_of(make: Callable[[Tensor], Tensor], *, shape: tuple[int, ...] = (4, 4)) -> Any:
    """Make a tensor from x, whose samples are in dimension 0, and give its layout."""
    scope, x = Scope(COUNT), torch.randn(shape)
    with recording(scope) as tracker:
        tracker.mark(x, scope.samples(0))
        return tracker.layout(make(x))


FIRST: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: torch.zeros(x.shape[0], 4),
    "zeros of a tuple": lambda x: torch.zeros((x.shape[0], 4)),
    "zeros of a list": lambda x: torch.zeros([x.size(0), 4]),
    "zeros by keyword": lambda x: torch.zeros(size=(x.shape[0], 4)),
    "ones": lambda x: torch.ones(x.size(0), 4, 4),
    "size": lambda x: torch.zeros(x.size(dim=0), 4),
    "negative size": lambda x: torch.zeros(x.size(-2), 4),
    "shape": lambda x: torch.zeros(x.shape),
    "all of size": lambda x: torch.zeros(x.size()),
    "unpacked": lambda x: torch.zeros(*x.shape),
    "shape sliced": lambda x: torch.zeros(x.shape[:1] + torch.Size([4])),
    "shape joined": lambda x: torch.zeros((*x.shape[:-1], 4)),
    "full": lambda x: torch.full((x.shape[0], 4), 1.0),
    "full by keyword": lambda x: torch.full(fill_value=1.0, size=(x.shape[0], 4)),
    "randn": lambda x: torch.randn(x.shape[0], 4),
    "randint": lambda x: torch.randint(4, (x.shape[0], 4)),
    "randint with bounds": lambda x: torch.randint(0, 4, (x.shape[0], 4)),
    "empty": lambda x: torch.empty(x.shape[0], 4),
    "new_zeros": lambda x: x.new_zeros(x.shape[0], 4),
    "new_zeros of a constant": lambda x: torch.ones(2).new_zeros(x.shape[0], 4),
    "new_full": lambda x: torch.ones(2).new_full((x.shape[0], 4), 2.0),
    "zeros_like": lambda x: torch.zeros_like(x),
    "expand": lambda x: torch.ones(4).expand(x.shape[0], 4),
    "expand, the rest kept": lambda x: torch.ones(1, 4).expand(x.shape[0], -1),
    "expand of more": lambda x: torch.ones(1, 1, 4).expand(x.shape[0], -1, -1),
    "repeat": lambda x: torch.ones(1, 4).repeat(x.shape[0], 1),
    "tile": lambda x: torch.ones(1, 4).tile((x.shape[0], 1)),
}
SECOND: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: torch.zeros(4, x.shape[0]),
    "zeros of a tuple": lambda x: torch.zeros((4, x.size(0), 4)),
    "expand": lambda x: torch.ones(4, 1).expand(4, x.shape[0]),
    "expand, the rest kept": lambda x: torch.ones(4, 1, 4).expand(-1, x.shape[0], -1),
    "repeat": lambda x: torch.ones(4, 1).repeat(1, x.shape[0]),
    "zeros of a transpose": lambda x: torch.zeros(x.t().shape),
    "zeros of transposed sizes": lambda x: torch.zeros(x.shape[1], x.shape[0]),
}
NONE: dict[str, Callable[[Tensor], Tensor]] = {
    "other sizes": lambda x: torch.zeros(4, 4),
    "other size of a batch": lambda x: torch.zeros(x.shape[1], 4),
    "one more": lambda x: torch.zeros(x.shape[0] + 1, 4),
    "count as a value": lambda x: torch.full((4, 4), float(x.shape[0])),
    "tensor of the count": lambda x: torch.tensor(x.shape[0]),
    "count of an arange elsewhere": lambda x: torch.arange(x.shape[1]),
    # The numbers of the samples are the same for all: their values tell whose rows they pick.
    "arange": lambda x: torch.arange(x.shape[0]),
    "arange with bounds": lambda x: torch.arange(0, x.shape[0]),
    "randperm": lambda x: torch.randperm(x.shape[0]),
}


def place(layout: Any) -> tuple[int, int, int] | None:
    if isinstance(layout, Constant):
        return None
    assert isinstance(layout, Samples), layout
    return layout.dim, layout.pre, layout.post


@pytest.mark.parametrize("name", FIRST)
def test_batch_size_in_front_puts_samples_in_front(name: str) -> None:
    assert place(layout_of(FIRST[name])) == (0, 1, 1)


@pytest.mark.parametrize("name", SECOND)
def test_batch_size_in_second_place_puts_samples_there(name: str) -> None:
    assert place(layout_of(SECOND[name])) == (1, 1, 1)


@pytest.mark.parametrize("name", NONE)
def test_sizes_that_do_not_count_samples_put_none(name: str) -> None:
    assert place(layout_of(NONE[name])) is None


MULTIPLES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: torch.zeros(x.shape[0] * 2, 4),
    "zeros, turned round": lambda x: torch.zeros(2 * x.shape[0], 4),
    "halved again": lambda x: torch.zeros(x.shape[0] * 4 // 2, 4),
    "flattened": lambda x: torch.zeros(x.view(x.shape[0] * 2, 2).shape),
}


@pytest.mark.parametrize("name", MULTIPLES)
def test_multiples_of_the_batch_size_put_several_rows_a_sample(name: str) -> None:
    assert place(layout_of(MULTIPLES[name])) == (0, 1, 2)


def test_reshape_by_tagged_sizes_is_unambiguous() -> None:
    assert place(layout_of(lambda x: x.view(x.shape[0], 2, 2))) == (0, 1, 1)
    assert place(layout_of(lambda x: x.t().reshape(4, x.shape[0]))) == (1, 1, 1)


@pytest.mark.parametrize(
    ("size", "is_tagged"),
    [
        (BatchSize(4) * 3, True),
        (3 * BatchSize(4), True),
        (BatchSize(12) // 3, True),
        (BatchSize(12) // 5, False),
        (BatchSize(4) // 4, False),
        (BatchSize(4) + 1, False),
        (BatchSize(4) - 1, False),
        (-BatchSize(4), False),
        (BatchSize(4) * 0.5, False),
        (BatchSize(4) / 2, False),
    ],
    ids=str,
)
def test_size_stays_tagged_only_while_it_counts_samples(size: Any, is_tagged: bool) -> None:
    assert isinstance(size, BatchSize) == is_tagged


def test_tagged_size_is_an_ordinary_int_elsewhere() -> None:
    size = BatchSize(4)
    assert size == 4
    assert hash(size) == hash(4)
    assert list(range(size)) == [0, 1, 2, 3]
    assert [0] * size == [0, 0, 0, 0]
    assert f"{size}" == "4"
    assert type(pickle.loads(pickle.dumps(size))) is int
    assert type(copy.deepcopy(size)) in (int, BatchSize)


def test_new_tensors_of_a_batch_join_it_without_falsehood() -> None:
    def start_token(x: Tensor) -> Tensor:
        token = torch.ones(1, 1, 4, dtype=torch.float64).expand(x.shape[0], -1, -1)
        return torch.cat([token, x], 1)

    def recurrence(x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 4, dtype=torch.float64)
        for step in x.unbind(1):
            h = h * 0.5 + step
        return h

    for function in (start_token, recurrence):
        assert_followed(4, function, Batched((4, 4, 4)))


PICKED: dict[str, Callable[[Tensor], Tensor]] = {
    "in order": lambda x: x[torch.arange(x.shape[0])],
    "backwards": lambda x: x[torch.arange(x.shape[0]).flip(0)],
    "in any order": lambda x: x[torch.randperm(x.shape[0])],
    "one column of each": lambda x: x[torch.arange(x.shape[0]), torch.tensor([0, 2, 1, 3])],
    "selected": lambda x: x.index_select(0, torch.randperm(x.shape[0])),
    "columns": lambda x: x[:, torch.arange(x.shape[0])],
    "there and back": lambda x: (
        x[order := torch.randperm(x.shape[0])].exp()[torch.argsort(order)] + x
    ),
}


@pytest.mark.parametrize("name", PICKED)
def test_numbers_of_samples_pick_rows_by_their_values(name: str) -> None:
    assert_followed(4, PICKED[name], Batched((4, 4)))
