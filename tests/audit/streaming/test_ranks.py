import pytest

from pergrad.audit.streaming.ranks import Ranks, joined_ranks, ranks_from
from pergrad.errors import AuditError, ToldElsewhereError


def test_ranks_are_read_off_the_environment():
    assert ranks_from({}) == Ranks()
    assert ranks_from({"WORLD_SIZE": "1", "RANK": "0"}) == Ranks()
    environment = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}
    assert ranks_from(environment) == Ranks(3, 4, 1)
    assert not ranks_from(environment).is_first


def test_one_process_agrees_with_itself(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined_ranks() as ranks:
        assert ranks.all_agree(3) == [3]
        assert ranks.first_decides(lambda: 4) == 4
        with pytest.raises(AuditError, match="no"):
            ranks.together(fail)


class Two(Ranks):
    """The second of two ranks, the first of which has failed."""

    def all_agree(self, value):
        return ["the disk is full", value]


def fail():
    raise AuditError("no")


def test_where_a_rank_fails_all_do_and_the_first_of_them_says_why():
    with pytest.raises(ToldElsewhereError, match="rank 0: the disk is full"):
        Two(1, 2).together(lambda: 3)
    with pytest.raises(ToldElsewhereError, match="rank 0: the disk is full"):
        Two(1, 2).together(fail)
