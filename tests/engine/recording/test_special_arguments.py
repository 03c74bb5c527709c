"""Arguments of torch.nn's modules whose samples lie elsewhere than the input's, or that have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.recording.inputs import batch_size_of, inputs_of, mark_inputs
from pergrad.engine.samples.layouts import Owners, Scope
from pergrad.errors import BatchSizeError

D = 4
MASKS = {"tgt_mask": None, "memory_mask": None, "tgt_key_padding_mask": 0}
MODULES: dict[str, tuple[nn.Module, list[str], dict[str, int | None]]] = {
    "RNN": (nn.RNN(D, D), ["input"], {"hx": 1}),
    "GRU": (nn.GRU(D, D), ["input"], {"hx": 1}),
    "MultiheadAttention": (
        nn.MultiheadAttention(D, 1),
        ["query", "key", "value"],
        {"attn_mask": None, "key_padding_mask": 0},
    ),
    "TransformerEncoderLayer": (
        nn.TransformerEncoderLayer(D, 1, D),
        ["src"],
        {"src_mask": None, "src_key_padding_mask": 0},
    ),
    "TransformerEncoder": (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 1, D), 1, enable_nested_tensor=False),
        ["src"],
        {"mask": None, "src_key_padding_mask": 0},
    ),
    "TransformerDecoderLayer": (
        nn.TransformerDecoderLayer(D, 1, D),
        ["tgt", "memory"],
        {**MASKS, "memory_key_padding_mask": 0},
    ),
    "TransformerDecoder": (
        nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 1, D), 1),
        ["tgt", "memory"],
        {**MASKS, "memory_key_padding_mask": 0},
    ),
    "Transformer": (
        nn.Transformer(D, 2, 1, 1, D, batch_first=True),
        ["src", "tgt"],
        {
            **MASKS,
            "memory_key_padding_mask": 0,
            "src_mask": None,
            "src_key_padding_mask": 0,
        },
    ),
}


@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize("name", MODULES)
def test_samples_of_special_arguments_are_looked_for_in_their_own_dimension(
    name: str, batch_dim: int
) -> None:
    module, inputs, special = MODULES[name]
    given: dict[str, Tensor] = {k: torch.ones(D, D, D) for k in [*inputs, *special]}
    args = [given[k] for k in inputs]
    found = inputs_of(module, batch_dim, tuple(args), {k: given[k] for k in special})
    places = {id(leaf): dim for leaf, dim in found}
    expected = {**dict.fromkeys(inputs, batch_dim), **special}
    assert {k: places.get(id(t)) for k, t in given.items()} == expected


def test_states_of_an_lstm_are_both_found() -> None:
    x, h, c = torch.ones(2, 3, D), torch.ones(1, 3, D), torch.ones(1, 3, D)
    found = inputs_of(nn.LSTM(D, D), 0, (x, (h, c)), {})
    assert [dim for _, dim in found] == [0, 1, 1]
    assert [leaf is t for (leaf, _), t in zip(found, (x, h, c), strict=True)] == [True] * 3


def test_other_modules_have_no_special_arguments() -> None:
    found = inputs_of(nn.Linear(D, D), 1, (torch.ones(2, 3), "text"), {"hx": torch.ones(3, 3)})
    assert [dim for _, dim in found] == [1, 1]


def test_batch_size_is_read_in_the_dimension_of_each_input() -> None:
    args: tuple[Any, ...] = ()
    assert batch_size_of([(torch.ones(5, 3), 1), (torch.ones(3), 0)], args, {}) == 3
    assert batch_size_of([(torch.ones(3), 1), (torch.ones(2, 4), 1)], args, {}) == 4
    packed = pack_sequence([torch.ones(3, D), torch.ones(2, D)])
    assert batch_size_of([(packed, 0)], args, {}) == 2
    with pytest.raises(BatchSizeError, match="batch size 5 and one with batch size 3"):
        batch_size_of([(torch.ones(5, 3), 0), (torch.ones(3), 0)], args, {})
    with pytest.raises(BatchSizeError, match="0 is not a valid batch size"):
        batch_size_of([(torch.ones(0, 3), 0)], args, {})
    with pytest.raises(BatchSizeError, match="Unable to find a tensor"):
        batch_size_of([(torch.ones(3), 1)], args, {})


def test_inputs_are_marked_in_their_dimension() -> None:
    scope = Scope(3)
    tracker = Tracker(scope, 0)
    x, h = torch.ones(3, 2), torch.ones(2, 3)
    marked = mark_inputs(tracker, [(x, 0), (h, 1)])
    assert [t is own for t, own in zip(marked, (x, h), strict=True)] == [True, True]
    assert tracker.layout(x) == scope.samples(0)
    assert tracker.layout(h) == scope.samples(1)
    Tracker.unmark(x, h)


@pytest.mark.parametrize("lengths", [[3, 2, 1], [1, 3, 2]], ids=["sorted", "unsorted"])
def test_rows_of_a_packed_sequence_belong_to_the_sequences_as_given(lengths: list[int]) -> None:
    scope = Scope(3)
    tracker = Tracker(scope, 0)
    rows = [torch.full((length, 1), float(k)) for k, length in enumerate(lengths)]
    packed = pack_sequence(rows, enforce_sorted=lengths == [3, 2, 1])
    assert [t is packed.data for t in mark_inputs(tracker, [(packed, 0)])] == [True]
    layout = tracker.layout(packed.data)
    assert isinstance(layout, Owners)
    assert layout.dim == 0
    assert layout.owner.tolist() == packed.data.flatten().long().tolist()
    assert mark_inputs(tracker, [(packed, 0)]) == []  # its samples are known
    Tracker.unmark(packed.data)


def test_inputs_of_another_batch_size_are_refused_if_none_has_the_right_one() -> None:
    with pytest.raises(BatchSizeError, match="size of 4 with ExpandedWeight of batch size 3"):
        mark_inputs(Tracker(Scope(3), 0), [(torch.ones(4, 2), 0), (torch.ones(4), 0)])
