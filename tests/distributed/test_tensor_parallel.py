"""Tensor and sequence parallel models on several ranks, alone and inside of `fully_shard`."""

from __future__ import annotations

import pytest
import torch

from pergrad.distributed.tensor_parallel import len_of_chunk, pieces_of
from tests.distributed import ranks

MODULE = "tests.distributed.tensor_parallel_checks"
QUICK = (
    "check_columns_and_rows",
    "check_sequences",
    "check_weights_that_are_used_without_layers",
    "check_tensor_parallel_inside_of_fully_shard",
    "check_certificates_inside_of_fully_shard",
    "check_what_is_refused_says_so",
)


@pytest.fixture(scope="module")
def session() -> dict[str, dict[str, str]]:
    return ranks.run(MODULE, 2, QUICK)


def test_all_ranks_finish(session: dict[str, dict[str, str]]) -> None:
    assert session["session"] == {}


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks(session: dict[str, dict[str, str]], name: str) -> None:
    assert session[name] == {}, "\n".join(session[name].values())


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_checks(world: int) -> None:
    failed = {name: errors for name, errors in ranks.run(MODULE, world).items() if errors}
    assert failed == {}


def test_chunks_are_those_of_torch() -> None:
    for size in range(1, 9):
        found = [len_of_chunk(size, 3, rank) for rank in range(3)]
        cut = [len(part) for part in torch.arange(size).chunk(3)]
        assert found == cut + [0] * (3 - len(cut))


def test_plain_parameters_are_in_one_piece() -> None:
    assert pieces_of({"a": torch.ones(2)}, []) == {}
