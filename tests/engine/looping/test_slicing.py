"""Slices take samples out of whatever holds them, and leave all else as it is."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from pergrad.engine.looping.slicing import Slices

SIZE = 3
X = torch.arange(12.0).view(SIZE, 4)
SEQUENCES = [torch.arange(2.0), torch.arange(4.0) + 10, torch.arange(3.0) + 20]


@dataclass(frozen=True)
class Pair:
    x: Tensor
    scale: float


def test_a_sample_keeps_its_dimension_in_every_container() -> None:
    shared = torch.ones(4)
    batch = ({"x": X, "all": shared}, [X + 1, 5], Pair(X, 2.0))
    mapping, values, pair = Slices.by_shape(batch, SIZE, 0).sample(1)
    assert torch.equal(mapping["x"], X[1:2])
    assert mapping["all"] is shared
    assert torch.equal(values[0], X[1:2] + 1)
    assert values[1] == 5
    assert torch.equal(pair.x, X[1:2])


def test_samples_in_the_second_dimension_are_cut_there_and_vectors_in_their_only_one() -> None:
    x, y = Slices.by_shape((X.T, torch.arange(SIZE)), SIZE, 1).sample(2)
    assert torch.equal(x, X.T[:, 2:])
    assert y.tolist() == [2]


def test_lists_of_one_entry_for_each_sample_are_cut_and_shapes_are_not() -> None:
    images = [torch.zeros(1, k + 1) for k in range(SIZE)]
    sizes = (7, 8, 9)
    batch = (images, ["a", "b", "c"], sizes, {"nested": images})
    found: Any = Slices.by_shape(batch, SIZE, 0).sample(1)
    assert found[0][0] is images[1]
    assert len(found[0]) == 1
    assert found[1] == ["b"]
    assert found[2] == sizes
    assert found[3]["nested"][0] is images[1]


def test_a_packed_sequence_is_cut_whatever_its_order() -> None:
    packed = pack_sequence(SEQUENCES, enforce_sorted=False)
    for n, sequence in enumerate(SEQUENCES):
        (alone,) = Slices.by_shape((packed,), SIZE, 0).sample(n)
        data, lengths = pad_packed_sequence(alone, batch_first=True)
        assert lengths.tolist() == [len(sequence)]
        assert torch.equal(data[0], sequence)


def test_samples_are_replaced_by_others_in_all_that_holds_them() -> None:
    names = ["a", "b", "c"]
    slices = Slices.by_shape((X, names), SIZE, 0)
    x, found = slices.taken_from(torch.tensor([0, 0, 1]))
    assert torch.equal(x, X[[0, 0, 1]])
    assert found == ["a", "a", "b"]


def test_the_source_of_a_sample_differs_from_it() -> None:
    same_first = X.clone()
    same_first[1] = same_first[0]
    sources = Slices.by_shape((same_first,), SIZE, 0).sources()
    assert sources is not None
    assert all(
        not torch.equal(same_first[n], same_first[m]) for n, m in enumerate(sources.tolist())
    )
    assert Slices.by_shape((torch.ones(SIZE, 2),), SIZE, 0).sources() is None
    assert Slices.by_shape((["a", "a", "a"],), SIZE, 0).sources() is None
    assert Slices.by_shape((["a", "b", "c"],), SIZE, 0).sources() is not None
