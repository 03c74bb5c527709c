"""DistributedDataParallel on several ranks: quantities, training, plain steps between recorded ones."""

from __future__ import annotations

import pytest

from tests.distributed import ranks

MODULE = "tests.distributed.ddp_checks"


@pytest.fixture(scope="module")
def session() -> dict[str, dict[str, str]]:
    return ranks.run(MODULE, 2)


def test_all_ranks_finish(session: dict[str, dict[str, str]]) -> None:
    assert session["session"] == {}


@pytest.mark.parametrize("name", ranks.checks_of(MODULE))
def test_two_ranks(session: dict[str, dict[str, str]], name: str) -> None:
    assert session[name] == {}, "\n".join(session[name].values())


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 4])
def test_other_numbers_of_ranks(world: int) -> None:
    failed = {name: errors for name, errors in ranks.run(MODULE, world).items() if errors}
    assert failed == {}
