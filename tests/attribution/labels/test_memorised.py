import numpy as np

from pergrad.attribution import memorised


def test_a_model_that_predicts_most_doubted_labels_has_memorised_them() -> None:
    labels = np.zeros(100, dtype=int)
    doubted = np.arange(100) < 10
    predicted = np.where((np.arange(100) < 6) | ~doubted, 0, 1)
    found = memorised(doubted, predicted, labels, np.arange(100))
    assert (found.doubted, found.predicted, found.share, found.is_so) == (10, 6, 0.96, True)
    assert not memorised(doubted, 1 - labels, labels, np.arange(100)).is_so


def test_a_model_that_has_hardly_learnt_has_learnt_nothing_by_heart() -> None:
    labels = np.zeros(100, dtype=int)
    labels[90:] = -1  # unknown ones do not count
    doubted = np.arange(100) < 10
    predicted = np.where(np.arange(100) < 70, 0, 1)
    found = memorised(doubted, predicted, labels, np.arange(100))
    assert (found.predicted, found.share) == (10, 70 / 90)
    assert not found.is_so


def test_few_doubted_labels_say_nothing() -> None:
    labels = np.zeros(20, dtype=int)
    assert not memorised(np.arange(20) < 4, labels, labels, np.arange(20)).is_so
    assert memorised(np.arange(20) < 9, labels, labels, np.arange(3)).doubted == 3
