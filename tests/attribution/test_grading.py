import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from pergrad.attribution import average_precision, grade
from pergrad.errors import PergradError


@pytest.mark.parametrize("seed", range(5))
def test_average_precision_is_that_of_scikit_learn(seed) -> None:
    generator = np.random.default_rng(seed)
    scores, wrong = generator.normal(size=200), generator.random(200) < 0.1
    assert average_precision(scores, wrong) == pytest.approx(average_precision_score(wrong, scores))


def test_grade_counts_known_samples_by_suspicion_and_by_loss() -> None:
    index = np.arange(100, 120)
    suspicion, loss = np.arange(20.0), np.arange(20.0)[::-1]
    found = grade(index, suspicion, loss, [119, 118, 100], shares=(0.1, 0.5))
    assert found.known == 3
    assert [(w.size, w.found, w.found_by_loss) for w in found.within] == [(2, 2, 1), (10, 2, 1)]
    assert found.average_precision == pytest.approx((1 + 1 + 3 / 20) / 3)
    assert found.average_precision_by_loss == pytest.approx((1 + 2 / 19 + 3 / 20) / 3)


def test_grade_of_a_subset_counts_what_is_in_it() -> None:
    found = grade(np.array([3, 7]), np.array([1.0, 2.0]), np.ones(2), [7, 900], shares=(0.5,))
    assert found.known == 1
    assert found.within[0].found == 1


def test_what_is_not_finite_ranks_first_in_both_rankings() -> None:
    scores, loss = np.array([1.0, np.inf, 2.0]), np.array([1.0, np.nan, 2.0])
    found = grade(np.arange(3), scores, loss, [1], shares=(1 / 3,))
    assert (found.within[0].found, found.within[0].found_by_loss) == (1, 1)


def test_grade_without_a_known_sample_is_refused() -> None:
    with pytest.raises(PergradError, match="none of the 1 samples"):
        grade(np.arange(3), np.ones(3), np.ones(3), [5])


def test_grade_as_json_is_plain() -> None:
    found = grade(np.arange(20), np.arange(20.0), np.arange(20.0), [19]).as_json()
    assert found["within"][0] == {"share": 0.05, "size": 1, "found": 1, "found_by_loss": 1}
    assert found["average_precision"] == found["average_precision_by_loss"] == 1.0
