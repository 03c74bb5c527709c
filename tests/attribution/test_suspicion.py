import numpy as np

from pergrad.attribution import ranks, suspicion


def test_what_is_not_finite_is_the_most_suspicious() -> None:
    loss = np.array([1.0, np.nan, 1.0, 9.0])
    norm = np.array([1.0, 1.0, np.inf, 9.0])
    scores = suspicion(loss, norm, np.array([1.0, np.nan, np.nan, 9.0]))
    assert np.isinf(scores).tolist() == [False, True, True, False]
    assert ranks(scores).tolist() == [4, 1, 2, 3]


def test_ranks_are_a_permutation_and_ties_go_by_the_row() -> None:
    assert ranks(np.array([1.0, 2.0, 2.0, 0.0])).tolist() == [3, 1, 2, 4]
