"""Whole samples are cut out of a batch, and exchanged, by the owners of their rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pergrad.engine.looping.owned_slices import OwnedSlices
from pergrad.engine.recording.owning import named_leaves, ownership_of

IDS = torch.tensor([0, 1, 0, 2, 1])
X = torch.arange(10.0).view(5, 2)


def slices(*batch: Any, owners: Any = IDS, names: Any = None) -> OwnedSlices:
    return OwnedSlices(batch, named_leaves(names, batch, {}), ownership_of(owners, None))


def test_all_rows_of_a_sample_are_cut_with_what_belongs_to_them() -> None:
    mask = torch.arange(25).view(1, 5, 5)
    y, shared = torch.tensor([7, 8, 9]), torch.ones(2)
    x, of_sample, ids, block, kept = slices(X, y, IDS, mask, shared).sample(1)
    assert torch.equal(x, X[[1, 4]])
    assert of_sample.tolist() == [8]
    assert ids.tolist() == [0, 0]
    assert torch.equal(block, mask[:, [1, 4]][..., [1, 4]])
    assert kept is shared


def test_edges_are_cut_and_their_nodes_numbered_anew() -> None:
    def forward(x: Tensor, edge_index: Tensor) -> None: ...

    edges = torch.tensor([[0, 1, 2, 4, 2], [2, 4, 0, 1, 2]])
    cut = [slices(X, edges, names=forward).sample(n)[1].tolist() for n in range(3)]
    assert cut == [[[0, 1, 1], [1, 0, 1]], [[0, 1], [1, 0]], [[], []]]


def test_entries_of_lists_are_kept_or_left_out() -> None:
    images = [torch.zeros(k + 2, 2) for k in range(3)]
    (found,) = slices(images, owners=[0, 1, 0]).sample(0)
    assert [t.shape for t in found] == [images[0].shape, images[2].shape]


def test_samples_are_replaced_by_others_of_as_many_rows_or_by_their_own_reversed() -> None:
    own = slices(X)
    sources = own.sources()
    assert sources is not None
    assert sources.tolist() == [1, 0, 2]  # sample 2 has one row, as no other
    (x,) = own.taken_from(sources)
    assert torch.equal(x, X[[1, 0, 4, 3, 2]])
    uneven = slices(X, owners=[0, 0, 0, 1, 1])
    sources = uneven.sources()
    assert sources is not None
    assert sources.tolist() == [2, 3]
    (x,) = uneven.taken_from(torch.tensor([2, 1]))
    assert torch.equal(x, X[[2, 1, 0, 3, 4]])


def test_nothing_is_exchanged_where_all_rows_are_the_same() -> None:
    assert slices(torch.ones(5, 2)).sources() is None


def test_edges_of_nodes_that_no_vector_counts_are_left() -> None:
    def forward(x: Tensor, edge_index: Tensor) -> None: ...

    edges = torch.tensor([[0, 5], [5, 0]])
    assert slices(X, edges, names=forward).sample(0)[1] is edges
    nothing = torch.zeros(2, 0, dtype=torch.long)
    assert slices(X, nothing, names=forward).sample(1)[1].shape == (2, 0)


def test_what_is_no_tensor_is_left() -> None:
    assert slices(X, 2.5, "a").sample(0)[1:] == (2.5, "a")
