import pytest

from benchmarks import analysis
from benchmarks.rows import read


def test_planted_duplicates_and_wrong_labels_are_found_and_counted() -> None:
    found = analysis.measured("labels", rows=1000, dim=32, seed=0)
    assert "10 planted" in found["note"]
    assert "wrong labels ranked first" in found["note"]
    assert found["peak_bytes"] > 2**20


def test_a_row_is_measured_in_a_process_of_its_own() -> None:
    row = analysis.row("loss", rows=200, dim=16, seed=0, threads=1)
    assert (row.model, row.method, row.status) == ("rows-200-16", "loss", "ok")
    assert row.seconds is not None
    assert row.seconds > 0


def test_200_000_rows_are_analysed_within_a_minute_and_a_gigabyte() -> None:
    stored = sorted((analysis.RESULTS / "analysis").glob("*.jsonl"))
    rows = [row for row in read(stored[-1]) if row.model == "rows-200000-256"]
    assert {row.method for row in rows} == {"loss", "labels"}
    for row in rows:
        assert row.seconds < 60
        assert row.peak_bytes < 1e9


@pytest.mark.parametrize("kind", analysis.KINDS)
def test_the_same_seed_gives_the_same_rows(kind) -> None:
    one, two = (analysis.samples(kind, 300, 16, seed=3)[0] for _ in range(2))
    assert one.sketch[:].tobytes() == two.sketch[:].tobytes()
