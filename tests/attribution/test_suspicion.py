import numpy as np
import pytest

from pergrad.attribution import holding_half, ranks, suspicion


def test_suspicion_is_the_excess_loss_times_the_length_of_the_whitened_gradient() -> None:
    loss, influence = np.array([-3.0, 1.0, 0.5]), np.array([4.0, 4.0, 9.0])
    assert suspicion(loss, influence).tolist() == [0.0, 8.0, 10.5]


@pytest.mark.parametrize(("shift", "scale"), [(5.0, 1.0), (-100.0, 1.0), (0.0, 1e6)])
def test_the_order_depends_on_neither_unit_nor_origin_of_the_loss(shift, scale) -> None:
    generator = np.random.default_rng(0)
    loss, influence = generator.exponential(size=(2, 50))
    expected = ranks(suspicion(loss, influence))
    assert ranks(suspicion(scale * loss + shift, influence)).tolist() == expected.tolist()


def test_what_is_not_finite_is_the_most_suspicious() -> None:
    scores = suspicion(np.array([1.0, np.nan, 1.0, 9.0]), np.array([1.0, 1.0, np.nan, 9.0]))
    assert np.isinf(scores).tolist() == [False, True, True, False]
    assert ranks(scores).tolist() == [4, 1, 2, 3]


def test_equal_losses_are_not_suspicious() -> None:
    assert suspicion(np.ones(3), np.arange(3.0)).tolist() == [0.0, 0.0, 0.0]


def test_ranks_are_a_permutation_and_ties_go_by_the_row() -> None:
    assert ranks(np.array([1.0, 2.0, 2.0, 0.0])).tolist() == [3, 1, 2, 4]


@pytest.mark.parametrize("seed", range(5))
def test_half_is_held_by_the_fewest_samples_that_can_hold_it(seed) -> None:
    scores = np.random.default_rng(seed).exponential(size=101) ** 3
    count = holding_half(scores)
    ordered = sorted(scores, reverse=True)
    assert sum(ordered[:count]) >= sum(scores) / 2 > sum(ordered[: count - 1])


def test_half_of_nothing_is_held_by_none_but_the_infinite() -> None:
    assert holding_half(np.zeros(4)) == 0
    assert holding_half(np.array([np.inf, 0.0])) == 1
    assert holding_half(np.array([np.inf, np.inf])) == 2
    assert holding_half(np.array([1e308, 1e308, 1e308])) == 2
