"""Owners say where the samples of each argument are, by name, position or length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from pergrad.engine.recording.owning import (
    Ownership,
    named_leaves,
    ownership_of,
    ownership_of_graphs,
)
from pergrad.errors import BatchSizeError
from tests.engine.ragged import graph_batch

NODES, EDGES = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0, 1, 1, 2])


@dataclass
class Parts:
    x: Tensor


def place(own: Ownership, *names: str | int, shape: tuple[int, ...], **kinds: Any) -> Any:
    found = own.place_of(names, torch.zeros(shape, **kinds))
    return found if found is None else (found[0], None if found[1] is None else found[1].tolist())


def test_one_vector_fits_rows_of_its_length_in_the_first_or_only_dimension() -> None:
    own = ownership_of(NODES, None)
    assert own.count == 3
    assert place(own, "x", shape=(5, 7)) == (0, NODES.tolist())
    assert place(own, "x", shape=(1, 5)) == (1, NODES.tolist())
    assert place(own, "y", shape=(3, 2)) == (0, None)
    assert place(own, "mask", shape=(1, 1, 5, 5)) is None
    assert place(own, "scale", shape=(2,)) is None
    assert place(own, "edge_index", shape=(2, 5), dtype=torch.long) is None


def test_the_ids_themselves_are_shared() -> None:
    own = ownership_of(NODES, None)
    assert own.place_of(("batch",), NODES.clone()) is None
    assert own.place_of(("batch",), NODES.int()) is None
    assert own.place_of(("batch",), NODES.flip(0)) is not None


def test_vectors_by_name_and_position_come_before_lengths() -> None:
    own = ownership_of({"x": NODES, 2: EDGES, "shared": None}, None)
    assert place(own, 0, "x", shape=(5, 2)) == (0, NODES.tolist())
    assert place(own, 2, "attributes", shape=(4, 2)) == (0, EDGES.tolist())
    assert place(own, 1, "weights", shape=(4,)) == (0, EDGES.tolist())
    assert place(own, 3, "shared", shape=(5, 2)) is None
    with pytest.raises(BatchSizeError, match=r"owners\['x'\] has 5 ids, but that argument"):
        place(own, 0, "x", shape=(6, 2))


def test_a_sequence_of_vectors_is_by_position() -> None:
    first, second = torch.tensor([0, 0, 1]), [1, 0]
    for given in ((first, second), [first, second], (first, second, None)):
        vectors = ownership_of(given, None).vectors
        assert list(vectors) == list(range(len(given)))
        assert torch.equal(vectors[0], first)  # type: ignore[arg-type]
        assert vectors[1].tolist() == second  # type: ignore[union-attr]
    scalars = tuple(first)
    assert list(ownership_of(scalars, None).vectors) == [""]  # type: ignore[arg-type]


def test_entries_of_a_list_belong_to_one_sample_each() -> None:
    own = ownership_of([0, 1, 1], None)
    found = own.place_of(("images",), torch.zeros(4, 4), (2, 3))
    assert found is not None
    assert found[0] == 0
    assert found[1] is not None
    assert found[1].tolist() == [1, 1, 1, 1]


def test_leaves_have_the_names_of_arguments_keys_and_fields() -> None:
    def loss(model: Any, x: Any, *, edges: Any = None) -> None: ...

    t = torch.zeros(1)
    named = named_leaves(loss, ({"a": t, "b": [t, 1]}, Parts(t)), {"edges": t}, skipped=1)
    assert [(names, entry) for names, _, entry in named] == [
        ((0, "x", "a"), None),
        ((0, "x", "b"), (0, 2)),
        ((0, "x", "b"), (1, 2)),
        ((1, "x"), None),
        (("edges",), None),
    ]
    assert named_leaves(print, (t,), {})[0][0][0] == 0


def test_losses_of_rows_are_summed_and_others_are_left() -> None:
    own = ownership_of({"x": NODES, "e": EDGES}, None)
    rows = torch.arange(5.0)
    assert own.summed(rows).tolist() == [1, 2, 7]
    assert own.summed(torch.ones(4)).tolist() == [1, 2, 1]
    for kept in (torch.ones(3), torch.ones(())):
        assert own.summed(kept) is kept


def test_ids_may_come_in_any_order_and_from_a_sequence() -> None:
    assert ownership_of([2, 0, 1, 0], None).count == 3
    assert ownership_of(torch.tensor([1, 0], dtype=torch.int32), 2).count == 2


def test_graphs_say_whose_nodes_and_edges_are_whose() -> None:
    (data,) = graph_batch("GIN").batch
    own = ownership_of_graphs(named_leaves(None, (data,), {}))
    assert own is not None
    assert own.count == 4
    found = {key: None if ids is None else ids.tolist() for key, ids in own.vectors.items()}
    assert found["x"] == data.batch.tolist()
    assert found["edge_attr"] == data.batch[data.edge_index[0]].tolist()
    assert found["y"] == [0, 1, 2, 3]
    assert found["edge_index"] is found["batch"] is found["ptr"] is None
    del data._slice_dict  # a batch that was not made by joining graphs
    again = ownership_of_graphs(named_leaves(None, (data,), {}))
    assert again is not None
    assert again.vectors["edge_attr"] is not None
    assert again.vectors["edge_attr"].tolist() == found["edge_attr"]
    assert ownership_of_graphs(named_leaves(None, (torch.zeros(2),), {})) is None


def test_an_entry_of_a_named_list_belongs_to_the_sample_of_its_place() -> None:
    own = ownership_of({"images": [1, 0, 1]}, None)
    for k, sample in enumerate([1, 0, 1]):
        found = own.place_of(("images",), torch.zeros(4, 2), (k, 3))
        assert found is not None
        assert found[0] == 0
        assert found[1] is not None
        assert found[1].tolist() == [sample] * 4


def test_rows_of_results_are_told_by_their_number_or_not_at_all() -> None:
    own = ownership_of({"x": NODES, "e": EDGES}, None)
    assert own.layout_of_rows(torch.zeros(2, 3)) == (1, None)
    found = own.layout_of_rows(torch.zeros(4, 2))
    assert found is not None
    assert (found[0], found[1].tolist()) == (0, EDGES.tolist())  # type: ignore[union-attr]
    assert own.layout_of_rows(torch.zeros(7, 2)) is None
    assert own.ids_of_losses(torch.zeros(7)) is None
    assert own.ids_of_losses(torch.zeros(3)) is None


def test_arguments_of_functions_without_a_signature_have_positions_alone() -> None:
    t = torch.zeros(1)
    assert [names for names, _, _ in named_leaves(max, (t, t), {})] == [(0,), (1,)]
