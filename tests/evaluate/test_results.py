import math

import numpy as np
import pytest

from pergrad.errors import EvaluationError
from pergrad.evaluate import Evaluation

VALUES = {
    "good": np.array([[0.9, 0.8, 0.7], [0.7, 0.8, 0.9]]),
    "bad": np.array([[0.1, 0.2, 0.3]] * 2),
}


def test_the_mean_the_interval_and_the_seeds():
    found = Evaluation("LDS", VALUES)
    assert found["bad"].mean == pytest.approx(0.2)
    assert found["bad"].low < 0.2 < found["bad"].high
    assert found["good"].by_seed == pytest.approx((0.8, 0.8))
    assert found["good"].low == found["good"].high  # whole queries are drawn: each has .8


def test_unpaired_queries_are_drawn_one_by_one():
    found = Evaluation("AP", VALUES, paired=False)
    assert found["good"].low < found["good"].mean < found["good"].high


def test_the_interval_covers_the_mean_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        estimate = Evaluation("x", {"a": generator.normal(size=(1, 40))})["a"]
        inside += estimate.low <= 0 <= estimate.high
    assert 0.88 <= inside / 200 <= 0.99


def test_differences_are_paired():
    noise = np.random.default_rng(0).normal(size=(1, 50))
    found = Evaluation("x", {"a": noise + 0.1, "b": noise})
    assert found.difference("a", "b").low == pytest.approx(0.1)
    assert found["a"].half_width > 0.1


def test_one_query_has_no_interval():
    assert math.isnan(Evaluation("x", {"a": np.ones((2, 1))})["a"].low)


def test_the_table_has_the_best_first_and_the_notes_last():
    found = Evaluation("LDS", VALUES, {"subsets": 5}, ("a note",))
    lines = repr(found).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["method", "good", "bad"]
    assert lines[3:] == ["5 subsets", "note: a note"]
    assert list(found.frame["method"]) == ["good", "bad"]
    assert found.as_json()["rows"][0]["LDS"] == pytest.approx(0.8)
    assert list(found) == ["good", "bad"]
    assert len(found) == 2


def test_an_unknown_method_is_named():
    with pytest.raises(
        EvaluationError, match="no method 'c' was evaluated; there are 'good', 'bad'"
    ):
        Evaluation("LDS", VALUES)["c"]
