"""Layouts through operations that join tensors or take them apart."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.engine.samples.propagation.dependence import Batched, assert_followed
from tests.engine.samples.propagation.inputs import batches

Batch = tuple[int, Batched]
properties = settings(deadline=None, derandomize=True, max_examples=100)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


@properties
@given(batches(), st.data())
def test_joining_a_tensor_with_itself_is_followed(batch: Batch, data: st.DataObject) -> None:
    count, x = batch
    dim = data.draw(st.integers(-len(x.shape), len(x.shape) - 1))
    assert_followed(count, lambda t: torch.cat([t, 2 * t], dim), x)
    assert_followed(count, lambda t: torch.cat((t, t.flip(x.dim)), dim=x.dim), x)
    at = data.draw(st.integers(-len(x.shape) - 1, len(x.shape)))
    assert_followed(count, lambda t: (torch.stack([t, 2 * t], at), torch.stack((t, t), dim=at)), x)


@properties
@given(batches(min_rank=2), st.data())
def test_joining_with_a_constant_is_followed(batch: Batch, data: st.DataObject) -> None:
    count, x = batch
    dim = data.draw(st.sampled_from([d for d in range(len(x.shape)) if d != x.dim]))
    c = ones(*x.shape)
    assert_followed(
        count, lambda t: (torch.cat([c, t], dim), torch.cat([t, c, t], dim), torch.stack([c, t])), x
    )


JOINS_ACROSS: dict[str, Callable[[Tensor], object]] = {
    "cat": lambda x: torch.cat([x, x.flip(0)], 1),
    "cat, owners first": lambda x: torch.cat([x.flip(0), x], 1),
    "cat of owners": lambda x: torch.cat([x.flip(0), x[[1, 2, 0]]], 1),
    "stack": lambda x: torch.stack([x, x.flip(0)]),
    "stack of owners": lambda x: torch.stack([x.flip(0), x[[1, 2, 0]]], 1),
    "cat of two places": lambda x: torch.cat([x, x.t()], 1),
    "stack of two places": lambda x: torch.stack([x, x.t()], 1),
    "hstack": lambda x: torch.hstack([x, x.flip(0)]),
    "dstack": lambda x: torch.dstack([x, x.flip(0)]),
    "column_stack": lambda x: torch.column_stack([x, x.flip(0)]),
    "samples and others in one dimension": lambda x: torch.cat([x, ones(1, 3)]),
}


@pytest.mark.parametrize("name", JOINS_ACROSS)
def test_joining_different_samples_is_not_false(name: str) -> None:
    assert_followed(3, JOINS_ACROSS[name], Batched((3, 3)), exact=False)


def test_joining_tensors_of_one_other_order_is_followed() -> None:
    assert_followed(
        3,
        lambda x, y: (torch.cat([x, y], 1), torch.stack([x, y], 1)),
        Batched((4, 2), owners=(2, 0, 2, 1)),
        Batched((4, 2), owners=(2, 0, 2, 1)),
    )


STACKS: dict[str, Callable[[Tensor], object]] = {
    "vstack": lambda x: torch.vstack([x, x]),
    "hstack": lambda x: torch.hstack([x, x]),
    "dstack": lambda x: torch.dstack([x, x]),
    "column_stack": lambda x: torch.column_stack([x, x]),
    "hstack of vectors": lambda x: torch.hstack([x[:, 0], x[:, 1]]),
    "block_diag": lambda x: torch.block_diag(x, x),
    "concat": lambda x: torch.concat([x, x]),
    "concatenate by axis": lambda x: torch.concatenate([x, x], axis=1),
}


@pytest.mark.parametrize("count", [3, 2, 1])
@pytest.mark.parametrize("name", STACKS)
def test_other_names_of_joining_are_not_false(name: str, count: int) -> None:
    assert_followed(count, STACKS[name], Batched((count, 2)), exact=False)


@properties
@given(batches(), st.data())
def test_splitting_is_followed(batch: Batch, data: st.DataObject) -> None:
    count, x = batch
    dim = data.draw(st.integers(-len(x.shape), len(x.shape) - 1))
    size = x.shape[dim]
    cut = data.draw(st.integers(0, size))
    pieces = data.draw(st.integers(1, size + 1))
    assert_followed(
        count,
        lambda t: (
            t.split(min(pieces, size), dim),
            torch.split(t, [cut, size - cut], dim),
            t.split_with_sizes([cut, size - cut], dim=dim),
            t.chunk(pieces, dim),
            torch.chunk(t, chunks=pieces, dim=dim),
            t.tensor_split(pieces, dim),
            t.tensor_split([cut], dim=dim),
        ),
        x,
    )


@properties
@given(batches(min_rank=2), st.data())
def test_unbinding_other_dimensions_is_followed(batch: Batch, data: st.DataObject) -> None:
    count, x = batch
    rank = len(x.shape)
    dim = data.draw(st.sampled_from([d for d in range(-rank, rank) if d % rank != x.dim]))
    assert_followed(count, lambda t: (t.unbind(dim), torch.unbind(t, dim=dim)), x)
    assert_followed(count, lambda t: torch.stack(t.unbind(dim), dim), x)


def test_unbinding_the_samples_is_not_false() -> None:
    assert_followed(3, lambda x: x.unbind(0), Batched((3, 3)), exact=False)
    assert_followed(3, lambda x: list(x), Batched((3, 3)), exact=False)


@pytest.mark.parametrize("lengths", [[4, 3, 1], [4, 4, 4], [1, 4, 2], [2, 1, 4]], ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
def test_packing_and_padding_are_followed(lengths: list[int], batch_first: bool) -> None:
    def there(x: Tensor) -> object:
        packed = pack_padded_sequence(
            x, torch.tensor(lengths), batch_first=batch_first, enforce_sorted=False
        )
        back, _ = pad_packed_sequence(packed, batch_first=batch_first)
        return packed.data, back

    shape = (3, 4, 2) if batch_first else (4, 3, 2)
    assert_followed(3, there, Batched(shape, 0 if batch_first else 1))
