import numpy as np
import pytest

from pergrad.attribution import average_precision, label_errors


def blobs(samples: int = 300, *, classes: int = 3, wrong: int = 20, seed: int = 0):
    """Well separated classes; the first `wrong` labels are those of the next class."""
    generator = np.random.default_rng(seed)
    truth = np.arange(samples) % classes
    features = 4 * np.eye(classes)[truth] + generator.normal(size=(samples, classes))
    given = truth.copy()
    given[:wrong] = (given[:wrong] + 1) % classes
    return features, truth, given


def test_wrong_labels_have_the_most_doubt_and_the_right_suggestion() -> None:
    features, truth, given = blobs()
    found = label_errors([features], given)
    assert average_precision(found.doubt, given != truth) > 0.98
    assert (found.suggested[:20] == truth[:20]).mean() > 0.9
    assert (found.confidence[found.doubted] > found.own[found.doubted]).all()
    assert found.low <= found.expected <= found.high
    assert abs(found.expected - 20) <= 5


def test_a_mean_over_checkpoints_lies_between_them() -> None:
    features, _, given = blobs()
    other = blobs(seed=1)[0]
    one, two, both = (label_errors(f, given) for f in ([features], [other], [features, other]))
    low, high = np.minimum(one.doubt, two.doubt), np.maximum(one.doubt, two.doubt)
    assert (both.doubt <= high + 1e-9).mean() > 0.9
    assert not np.array_equal(both.doubt, one.doubt)
    assert low.min() <= both.doubt.min()


def test_probabilities_are_probabilities() -> None:
    features, _, given = blobs()
    found = label_errors([features], given)
    for values in (found.own, found.confidence):
        assert ((values >= 0) & (values <= 1)).all()
    assert np.array_equal(found.doubted, found.suggested != given)


def test_a_class_of_one_sample_is_not_judged_and_ranks_last() -> None:
    features, _, given = blobs()
    given[7] = 9
    found = label_errors([features], given)
    assert found.suggested[7] == -1
    assert not found.doubted[7]
    assert np.isnan(found.own[7])
    assert found.doubt[7] == found.doubt.min()


def test_samples_that_are_not_usable_change_nothing_for_the_others() -> None:
    features, _, given = blobs()
    usable = np.ones(len(given), dtype=bool)
    usable[[4, 50]] = False
    spoiled = features.copy()
    spoiled[~usable] = np.nan
    found = label_errors([spoiled], given, usable)
    expected = label_errors([features[usable]], given[usable])
    np.testing.assert_allclose(found.doubt[usable], expected.doubt)
    assert found.suggested[~usable].tolist() == [-1, -1]


@pytest.mark.parametrize("labels", [np.zeros(10, int), np.arange(10), np.full(10, -1)])
def test_labels_without_two_classes_of_two_are_not_judged(labels) -> None:
    assert label_errors([np.random.default_rng(0).normal(size=(10, 3))], labels) is None


def test_where_gradients_do_not_tell_the_classes_apart_no_number_is_given() -> None:
    given = np.array([0] * 80 + [1] * 20)
    for features in (np.zeros((100, 3)), np.random.default_rng(0).normal(size=(100, 3))):
        found = label_errors([features], given)
        assert (found.expected, found.low, found.high) == (None, None, None)
        assert found.skill < 0.05


@pytest.mark.parametrize(("count", "times"), [(1, 1e3), (30, 1e2), (30, 1e12)])
def test_broken_inputs_with_long_gradients_hide_no_wrong_label(count, times) -> None:
    features, truth, given = blobs()
    before = label_errors([features], given)
    features[100 : 100 + count] *= times
    found = label_errors([features], given)
    kept = np.setdiff1d(np.arange(300), np.arange(100, 100 + count))
    assert average_precision(found.doubt[kept], (given != truth)[kept]) > 0.98
    assert abs(found.expected - before.expected) <= 3
    assert found.influence[100 : 100 + count].min() > found.influence[kept].max()
