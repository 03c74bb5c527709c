import pytest

from pergrad.errors import AuditError
from pergrad.reports.comparing import compared
from pergrad.reports.reading import read_results
from tests.reports.edge_cases import changed
from tests.reports.result_folders import clustered, doubted, write_folder


def test_changed_labels_and_settled_samples_are_told(tmp_path) -> None:
    before, after = (
        read_results(doubted(tmp_path / str(settled), settled=settled)) for settled in (False, True)
    )
    found = compared(before, after)
    assert [row["index"] for row in found["changed"]] == list(range(7, 120, 10))
    assert found["gone"] == list(range(7, 120, 10))
    assert (found["before"]["first"], found["after"]["first"]) == (12, 0)
    same = compared(before, before)
    assert same["changed"] == same["gone"] == same["new"] == []


def test_another_size_of_the_data_is_told(tmp_path) -> None:
    folders = [write_folder(tmp_path / str(size), clustered(size)) for size in (40, 38)]
    first, *_ = compared(*map(read_results, folders))["words"]
    assert first.startswith("The data set had 40 samples and now has 38")


def test_audits_without_a_common_sample_are_refused(tmp_path) -> None:
    one = clustered(20)
    two = changed(one, index=one.index + 100)
    folders = [write_folder(tmp_path / name, s) for name, s in (("a", one), ("b", two))]
    with pytest.raises(AuditError, match="no sample in common"):
        compared(*map(read_results, folders))
