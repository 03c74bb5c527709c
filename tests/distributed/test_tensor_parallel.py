"""Tensor and sequence parallel models on several ranks, alone and inside of `fully_shard`."""

from __future__ import annotations

import torch

from pergrad.distributed.tensor_parallel import len_of_chunk, pieces_of
from tests.distributed.sessions import checks_on_ranks

QUICK = (
    "check_columns_and_rows",
    "check_sequences",
    "check_weights_that_are_used_without_layers",
    "check_tensor_parallel_inside_of_fully_shard",
    "check_certificates_inside_of_fully_shard",
    "check_what_is_refused_says_so",
)


TestOnRanks = checks_on_ranks(
    "tests.distributed.tensor_parallel_checks", quick=QUICK, worlds=(1, 2, 4)
)


def test_chunks_are_those_of_torch() -> None:
    for size in range(1, 9):
        found = [len_of_chunk(size, 3, rank) for rank in range(3)]
        cut = [len(part) for part in torch.arange(size).chunk(3)]
        assert found == cut + [0] * (3 - len(cut))


def test_plain_parameters_are_in_one_piece() -> None:
    assert pieces_of({"a": torch.ones(2)}, []) == {}
