import threading

import numpy as np
import pytest
import torch

from pergrad.attribution import Samples, analyse, quantiles
from pergrad.attribution.findings import _side_by_side
from tests.attribution.gradient_cases import gradients, samples_of


def test_findings_have_one_row_a_sample_in_its_order() -> None:
    found = analyse(samples_of(gradients(30, 6)))
    for values in (found.alignment, found.self_influence, found.suspicion, found.evidence):
        assert len(values) == 30
    assert sorted(found.rank) == list(range(1, 31))
    assert (np.diff(found.suspicion[np.argsort(found.rank)]) <= 0).all()
    assert list(found.dominant_groups) in (["body", "head"], ["head", "body"])


def test_top_gives_the_highest_ranked_first() -> None:
    found = analyse(samples_of(gradients(30, 6)))
    assert found.rank[found.top(4)].tolist() == [1, 2, 3, 4]
    assert len(found.top(1000)) == 30


@pytest.mark.parametrize("spoiled", ["loss", "norm", "sketch"])
def test_a_sample_that_is_not_finite_ranks_first_and_spoils_no_other(spoiled) -> None:
    rows = gradients(30, 6)
    clean = samples_of(np.delete(rows, 4, axis=0))
    dirty = samples_of(rows)
    getattr(dirty, spoiled)[4] = np.nan
    found, expected = analyse(dirty), analyse(clean)
    assert found.rank[4] == 1
    assert np.isnan(found.alignment[4])
    assert found.suspicion[4] == np.inf
    for name in ("alignment", "self_influence", "suspicion"):
        np.testing.assert_allclose(np.delete(getattr(found, name), 4), getattr(expected, name))
    assert found.noise.scale == expected.noise.scale


def test_data_of_which_nothing_is_finite_has_findings_too() -> None:
    nan = np.full(2, np.nan)
    found = analyse(Samples(np.arange(2), nan, nan, {"head": nan}, np.full((2, 3), np.nan)))
    assert found.rank.tolist() == [1, 2]
    assert found.noise_scale is None
    assert len(found.duplicates) == len(found.pushes) == 0


@pytest.mark.parametrize("samples", [1, 2])
def test_tiny_data_has_findings(samples) -> None:
    found = analyse(samples_of(gradients(samples, 6)))
    assert found.rank.max() == samples
    assert found.critical_batch_size is None or found.critical_batch_size >= 1


def test_equal_gradients_have_findings() -> None:
    found = analyse(samples_of(np.ones((5, 4))))
    assert found.duplicates.count == 10
    assert found.rank.tolist() == [1, 2, 3, 4, 5]
    assert found.evidence == ((),) * 5


def test_worth_showing_are_top_ranked_duplicates_and_those_that_push() -> None:
    rows = gradients(200, 6)
    rows[150] = rows[3]
    found = analyse(samples_of(rows), top=2)
    shown = set(found.worth_showing(top=2, groups=1).tolist())
    assert {*found.top(2).tolist(), 3, 150, *found.pushes.other.tolist()} == shown


def test_the_same_samples_give_the_same_findings() -> None:
    one, two = (analyse(samples_of(gradients(50, 6))) for _ in range(2))
    assert one.suspicion.tobytes() == two.suspicion.tobytes()
    assert one.evidence == two.evidence


def test_quantiles_are_of_the_finite_values() -> None:
    values = np.array([*np.arange(101.0), np.nan])
    found = quantiles(values)
    assert (found["0"], found["0.05"], found["0.5"], found["1"]) == (0, 5, 50, 100)
    assert (found["mean"], found["not_finite"]) == (50, 1)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_both_results_come_in_order(threads):
    assert _side_by_side(lambda: 1, lambda: "b", threads=threads) == (1, "b")


def test_two_threads_run_both_at_the_same_time():
    both = threading.Barrier(2, timeout=20)
    _side_by_side(both.wait, both.wait, threads=2)


def test_one_thread_is_that_of_the_caller():
    found = _side_by_side(threading.get_ident, threading.get_ident, threads=1)
    assert found == (threading.get_ident(),) * 2


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_of_either_is_raised(number, threads):
    def wrong():
        raise ValueError("of this part")

    parts = [lambda: 1, lambda: 1]
    parts[number] = wrong
    with pytest.raises(ValueError, match="of this part"):
        _side_by_side(*parts, threads=threads)


def test_numpys_handling_of_errors_is_that_of_the_caller():
    def overflows():
        return np.float32(1e30) * np.float32(1e30)

    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        _side_by_side(lambda: 1, overflows, threads=2)


def test_findings_are_the_same_on_any_number_of_threads():
    rows = gradients(300, 40)
    plain = samples_of(rows)
    free, target = gradients(300, 24)[:, None].astype(np.float32), np.arange(300) % 3
    samples = Samples(
        *(plain.index, plain.loss, plain.norm, plain.group_norms, plain.sketch),
        *(free, target, target, np.full((300, 2), 0.5)),
    )
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(analyse(samples))
    finally:
        torch.set_num_threads(before)
    one, two = found
    assert one.evidence == two.evidence
    np.testing.assert_array_equal(one.outlier, two.outlier)
    np.testing.assert_array_equal(one.labels.doubt, two.labels.doubt)
    np.testing.assert_array_equal(one.duplicates.cosine, two.duplicates.cosine)
    np.testing.assert_array_equal(one.rank, two.rank)


def test_an_input_with_a_long_gradient_makes_the_others_no_duplicates():
    generator = np.random.default_rng(0)
    free = generator.normal(size=(60, 1, 8)).astype(np.float32)
    free[50] = free[40]
    free[3] *= np.float32(1e12)
    labels = np.arange(60) % 2
    ones = np.ones(60)
    given = Samples(np.arange(60), ones, ones, {}, free[:, 0] / np.float32(1e12), free, labels)
    found = analyse(given)
    pairs = list(zip(found.duplicates.index_a, found.duplicates.index_b, strict=True))
    assert pairs == [(40, 50)]
    assert found.outliers(1) == [3]
