import pytest

from benchmarks import eager_cost
from benchmarks.rows import Row


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return eager_cost.rows(rounds=2, seed=0)


def test_every_model_has_a_plain_and_a_recorded_row(rows: list[Row]) -> None:
    expected = [
        (name, quantity, method)
        for name in eager_cost.MODELS
        for quantity in eager_cost.QUANTITIES
        for method in ("plain", "pergrad")
    ]
    assert [(row.model, row.quantity, row.method) for row in rows] == expected


def test_ratio_is_to_the_plain_step_of_the_same_model(rows: list[Row]) -> None:
    for plain, recorded in zip(rows[::2], rows[1::2], strict=True):
        assert plain.ratio == 1
        assert plain.fastest is not None
        assert recorded.fastest is not None
        assert recorded.ratio == recorded.fastest / plain.fastest
