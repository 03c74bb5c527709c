"""Layouts through reshapes, permutations, repetitions and reorderings."""

from collections.abc import Callable, Iterator
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.samples.propagation.dependence import Batched, assert_followed
from tests.engine.samples.propagation.inputs import batches

Batch = tuple[int, Batched]
properties = settings(deadline=None, derandomize=True, max_examples=120)


def factorings(size: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `size` as an ordered product of `parts` factors."""
    if parts == 1:
        yield (size,)
        return
    for first in range(1, size + 1):
        if size % first == 0:
            yield from ((first, *rest) for rest in factorings(size // first, parts - 1))


@settings(properties, max_examples=250)
@given(batches(), st.integers(1, 4), st.data())
def test_reshape_keeps_samples_apart_or_says_that_it_cannot(
    batch: Batch, rank: int, data: st.DataObject
) -> None:
    count, x = batch
    shape = data.draw(st.sampled_from(list(factorings(prod(x.shape), rank))))
    # Owners given by value are not searched for in every grouping of the new dimensions.
    assert_followed(count, lambda t: t.reshape(shape), x, exact=x.owners is None)


RESHAPES: dict[str, Callable[[Tensor], object]] = {
    "view": lambda x: x.view(-1, 4),
    "flatten": lambda x: x.flatten(),
    "flatten first": lambda x: x.flatten(0, 1),
    "flatten last": lambda x: x.flatten(1),
    "ravel": lambda x: x.ravel(),
    "unflatten": lambda x: x.flatten().unflatten(0, (-1, 4)),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(),
    "squeeze dim": lambda x: x.unsqueeze(0).squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "unsqueeze last": lambda x: x.unsqueeze(-1),
    "view_as": lambda x: x.view_as(torch.empty(x.shape[0], 8)),
    "there and back": lambda x: x.flatten(0, 1).view(x.shape[0], 4, 2),
    "heads": lambda x: x.view(x.shape[0], 4, 2, 1).transpose(1, 2).flatten(0, 1),
    "heads and back": lambda x: (
        x.transpose(1, 2).flatten(0, 1).unflatten(0, (x.shape[0], 2)).transpose(1, 2)
    ),
    "keyword": lambda x: torch.reshape(input=x, shape=(-1, 2)),
}


@pytest.mark.parametrize("count", [3, 4, 2, 1])
@pytest.mark.parametrize("name", RESHAPES)
def test_every_form_of_reshape_is_followed(name: str, count: int) -> None:
    assert_followed(count, RESHAPES[name], Batched((count, 4, 2)))


@properties
@given(batches(min_rank=2), st.data())
def test_permutation_moves_the_samples_along(batch: Batch, data: st.DataObject) -> None:
    count, x = batch
    rank = len(x.shape)
    order = data.draw(st.permutations(range(rank)))
    order = [d - rank if data.draw(st.booleans()) else d for d in order]
    assert_followed(count, lambda t: (t.permute(order), t.permute(*order)), x)
    a, b = order[:2]
    assert_followed(count, lambda t: (t.transpose(a, b), t.movedim(a, b), t.swapaxes(a, b)), x)
    assert_followed(count, lambda t: t.movedim(order[:2], order[-2:]), x)


TRANSPOSES: dict[str, Callable[[Tensor], object]] = {
    "mT": lambda x: x.mT,
    "adjoint": lambda x: x.adjoint(),
    "t": lambda x: x[:, :, 0].t(),
    "T": lambda x: x[:, :, 0].T,
    "transpose by keyword": lambda x: torch.transpose(x, dim0=0, dim1=2),
    "transpose, keywords swapped": lambda x: torch.transpose(x, dim1=2, dim0=0),
    "permute by keyword": lambda x: torch.permute(x, dims=(2, 0, 1)),
    "movedim by keyword": lambda x: torch.movedim(x, source=0, destination=-1),
    "movedim, keywords swapped": lambda x: torch.movedim(x, destination=2, source=0),
    "input by keyword": lambda x: torch.transpose(input=x, dim0=0, dim1=1),
}


@pytest.mark.parametrize("count", [3, 4, 1])
@pytest.mark.parametrize("name", TRANSPOSES)
def test_every_form_of_transpose_is_followed(name: str, count: int) -> None:
    assert_followed(count, TRANSPOSES[name], Batched((count, 4, 3)))


@properties
@given(batches(), st.data())
def test_repetition_is_followed(batch: Batch, data: st.DataObject) -> None:
    count, x = batch
    rank = len(x.shape) + data.draw(st.integers(0, 1))
    times = data.draw(st.lists(st.integers(1, 2), min_size=rank, max_size=rank))
    assert_followed(count, lambda t: (t.repeat(times), t.repeat(*times), t.tile(times)), x)


@properties
@given(batches(), st.data())
def test_interleaved_repetition_is_followed(batch: Batch, data: st.DataObject) -> None:
    count, x = batch
    dim = data.draw(st.integers(-len(x.shape), len(x.shape) - 1))
    size = x.shape[dim]
    each = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)))
    each[0] = 1
    assert_followed(
        count,
        lambda t: (t.repeat_interleave(2, dim), torch.repeat_interleave(t, each, dim=dim)),
        x,
    )


def test_interleaved_repetition_of_all_elements_is_not_false() -> None:
    assert_followed(3, lambda x: x.repeat_interleave(2), Batched((3, 2)), exact=False)


@properties
@given(batches(max_rank=2), st.data())
def test_expansion_is_followed(batch: Batch, data: st.DataObject) -> None:
    count, x = batch
    sizes = [
        data.draw(st.sampled_from([2, 3, count])) if size == 1 and d != x.dim else size
        for d, size in enumerate(x.shape)
    ]
    front = data.draw(st.lists(st.sampled_from([1, 2, count]), max_size=1))
    shape = [*front, *sizes]
    assert_followed(
        count,
        lambda t: (t.expand(shape), t.expand(*shape), t.broadcast_to(shape)),
        x,
    )


def test_batch_of_one_expanded_belongs_to_its_one_sample() -> None:
    assert_followed(1, lambda x: x.expand(4, 3), Batched((1, 3)))


@properties
@given(batches(), st.data())
def test_flip_moves_the_owners(batch: Batch, data: st.DataObject) -> None:
    count, x = batch
    dims = data.draw(st.lists(st.integers(0, len(x.shape) - 1), unique=True, min_size=1))
    assert_followed(count, lambda t: (t.flip(dims), t.flip(*dims)), x)


@properties
@given(batches(), st.data())
def test_roll_moves_the_owners(batch: Batch, data: st.DataObject) -> None:
    count, x = batch
    dims = data.draw(st.lists(st.integers(0, len(x.shape) - 1), unique=True, min_size=1))
    shifts = [data.draw(st.integers(-3, 3)) for _ in dims]
    assert_followed(count, lambda t: t.roll(shifts, dims), x)


@pytest.mark.parametrize("x", [Batched((3, 4)), Batched((4, 3), 1), Batched((3,))], ids=str)
def test_roll_over_all_elements_is_not_false(x: Batched) -> None:
    assert_followed(3, lambda t: t.roll(1), x, exact=False)


@pytest.mark.parametrize("dim", [0, 1])
def test_left_right_and_up_down_are_followed(dim: int) -> None:
    x = Batched((3, 3), dim)
    assert_followed(3, lambda t: (t.fliplr(), t.flipud()), x)


@pytest.mark.parametrize("turns", [1, 2, 3, -1])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_quarter_turns_are_not_false(turns: int, dim: int) -> None:
    x = Batched((3, 3, 3), dim)
    assert_followed(3, lambda t: torch.rot90(t, turns, (0, 1)), x, exact=False)


@pytest.mark.parametrize("along", [0, 1, 2])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_windows_are_followed_unless_they_cross_samples(dim: int, along: int) -> None:
    x = Batched((3, 3, 3), dim)
    assert_followed(3, lambda t: t.unfold(along, 2, 1), x, exact=along != dim)


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda x: x.flatten(0, 1) if x.dim() > 1 else x,
    "unsqueeze": lambda x: x.unsqueeze(1) if x.dim() < 4 else x,
    "transpose": lambda x: x.transpose(0, -1),
    "pairs": lambda x: x.unflatten(0, (-1, 2)) if x.shape[0] % 2 == 0 and x.dim() < 4 else x,
    "flip": lambda x: x.flip(0),
    "repeat": lambda x: torch.cat([x, x], 0) if x.numel() < 30 else x,
    "half": lambda x: x[: (x.shape[0] + 1) // 2],
    "odd": lambda x: x[::2],
    "add": lambda x: x + x,
}


@settings(properties, max_examples=200)
@given(batches(), st.lists(st.sampled_from(sorted(STEPS)), min_size=2, max_size=5))
def test_chains_of_steps_are_not_false(batch: Batch, names: list[str]) -> None:
    def chain(x: Tensor) -> Tensor:
        for name in names:
            x = STEPS[name](x)
        return x

    count, x = batch
    assert_followed(count, chain, x, exact=False)
