"""Private steps of sharded models on two ranks: one batch, noise of the right variance."""

from __future__ import annotations

import pytest

from tests.distributed import ranks

MODULE = "tests.private.stepping.fsdp_checks"


@pytest.fixture(scope="module")
def session() -> dict[str, dict[str, str]]:
    return ranks.run(MODULE, 2)


def test_all_ranks_finish(session: dict[str, dict[str, str]]) -> None:
    assert session["session"] == {}


@pytest.mark.parametrize("name", ranks.checks_of(MODULE))
def test_two_ranks(session: dict[str, dict[str, str]], name: str) -> None:
    assert session[name] == {}, "\n".join(session[name].values())
