import pytest

from benchmarks import certificate_cost
from benchmarks.models import MODELS
from benchmarks.rows import Row


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return certificate_cost.rows("tiny", rounds=1, seed=0)


def test_every_model_has_a_row_for_each_part_of_a_certificate(rows: list[Row]) -> None:
    methods = ("plain", "norms", "attribution", "samples", "all")
    expected = [(name, method) for name in MODELS for method in methods]
    assert [(row.model, row.method) for row in rows] == expected


def test_the_cost_on_top_is_in_plain_steps_and_without_the_norms(rows: list[Row]) -> None:
    ratio = {row.method: row.ratio for row in rows if row.model == "mlp"}
    assert ratio["plain"] == 1
    assert certificate_cost.on_top(rows, "mlp") == ratio["attribution"] - ratio["norms"]
