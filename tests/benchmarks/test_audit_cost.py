import pytest

from benchmarks import audit_cost
from benchmarks.rows import Row, read


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return audit_cost.rows(sketch_dim=16, rounds=1, seed=0)


@pytest.mark.slow
def test_epochs_and_audits_have_a_row_each(rows: list[Row]) -> None:
    by_clock = ["plain-clock", "plain-64-clock", "audit-clock"]
    names = ["plain", "plain-64", "pass", "analysis", "audit", "audit-notebook"]
    assert [row.method for row in rows] == [*names, *by_clock]


@pytest.mark.slow
def test_ratio_is_to_the_epoch_at_the_same_batch_size(rows: list[Row]) -> None:
    (plain,) = (row.fastest for row in rows if row.method == "plain")
    assert plain is not None
    for row in rows:
        assert row.fastest is not None
        assert row.ratio == row.fastest / plain


def test_stored_rows_can_be_read() -> None:
    stored = sorted((audit_cost.RESULTS / "audit_cost").glob("*.jsonl"))
    assert stored
    assert all(read(path) for path in stored)


def test_the_documentation_has_the_stored_costs() -> None:
    page = (audit_cost.RESULTS.parents[1] / "docs/howto/audit.md").read_text()
    assert audit_cost.markdown() in page


def test_more_digits_differ_from_each_other() -> None:
    data = audit_cost.more_digits(audit_cost.digits.digits_with_flips(0.05, 0), 4000, 0)
    assert data.images.shape == (4000, 1, 8, 8)
    assert len(data.images.flatten(1).unique(dim=0)) == 4000
    assert data.flipped.float().mean() > 0.04
