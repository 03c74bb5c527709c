"""Makes tests of a module's checks on ranks: each on two ranks in one session, all on other numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.distributed import ranks

Session = dict[str, dict[str, str]]  # the errors of each check, by rank


def checks_on_ranks(
    module: str, *, quick: Sequence[str] = (), worlds: Sequence[int] = (1, 4)
) -> type:
    """Returns a class of tests.

    Args:
        module: the name of the module with the checks.
        quick: the checks that run on two ranks by default; all, if none is given.
        worlds: numbers of ranks for all checks, in tests that are marked slow.
    """
    names = tuple(quick) or tuple(ranks.checks_of(module))

    class TestOnRanks:
        @pytest.fixture(scope="class")
        @classmethod
        def session(cls) -> Session:
            return ranks.run(module, 2, quick)

        def test_all_ranks_finish(self, session: Session) -> None:
            assert session["session"] == {}

        @pytest.mark.parametrize("name", names)
        def test_two_ranks(self, session: Session, name: str) -> None:
            assert session[name] == {}, "\n".join(session[name].values())

        @pytest.mark.slow
        @pytest.mark.parametrize("world", worlds)
        def test_all_checks(self, world: int) -> None:
            failed = {name: errors for name, errors in ranks.run(module, world).items() if errors}
            assert failed == {}

    return TestOnRanks
