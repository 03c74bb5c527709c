import numpy as np
import pytest

from pergrad.attribution import dominant_groups
from pergrad.attribution.groups import unusual_group


def test_shares_are_of_the_squared_norms_and_come_largest_first() -> None:
    norms = {"a": np.array([1.0, 2.0]), "b": np.array([5.0, 1.0]), "c": np.array([0.0, 3.0])}
    found = dominant_groups(norms)
    assert list(found) == ["b", "c", "a"]
    assert found == {
        "a": pytest.approx(5 / 40),
        "b": pytest.approx(26 / 40),
        "c": pytest.approx(9 / 40),
    }
    assert sum(found.values()) == pytest.approx(1)


def test_samples_that_are_not_finite_are_left_out_of_every_group() -> None:
    norms = {"a": np.array([3.0, np.inf]), "b": np.array([4.0, 7.0])}
    assert dominant_groups(norms) == {"b": pytest.approx(0.64), "a": pytest.approx(0.36)}


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_shares_have_no_unit(scale) -> None:
    norms = {"a": np.array([3.0]) * scale, "b": np.array([4.0]) * scale}
    assert dominant_groups(norms)["b"] == pytest.approx(0.64)


def test_without_gradients_there_are_no_shares() -> None:
    assert dominant_groups({}) == {}
    assert dominant_groups({"a": np.zeros(2), "b": np.array([np.nan, 0.0])}) == {"a": 0.0, "b": 0.0}


def test_an_unusual_group_holds_half_of_a_sample_and_little_of_the_others() -> None:
    body, head = (
        np.array([1.0, 1.0, 1.0, 3.0, np.nan, 0.0]),
        np.array([3.0, 3.0, 3.0, 3.0, 1.0, 0.0]),
    )
    assert unusual_group({"body": body, "head": head}, 6) == [None, None, None, "body", None, None]


def test_without_gradients_no_group_is_unusual() -> None:
    assert unusual_group({}, 2) == [None, None]
    assert unusual_group({"a": np.zeros(2)}, 2) == [None, None]
