import numpy as np
import pytest

from pergrad.reports.reading import read_results
from pergrad.reports.words import (
    first_count,
    grade_words,
    headline,
    layer_words,
    noise_words,
    opposing_label,
    size_words,
    why_first,
)
from tests.reports.edge_cases import all_equal, changed, not_finite, single
from tests.reports.result_folders import clustered, write_folder

CLASSES = ["zero", "one", "two", "three"]
LABELS = [CLASSES[n % 4] for n in range(300)]


def results_of(folder, **options):
    return read_results(write_folder(folder, clustered(), **options))


def test_the_first_are_those_that_hold_half_of_the_suspicion(tmp_path) -> None:
    results = results_of(tmp_path)
    first = first_count(results)
    suspicion = np.sort(results.samples["suspicion"])[::-1]
    assert suspicion[:first].sum() >= suspicion.sum() / 2 > suspicion[: first - 1].sum()
    assert set(results.top(first)) <= set(range(15))
    assert headline(results)[0] == f"Look first at {first} of 300 samples."


def test_where_suspicion_is_spread_nobody_is_first(tmp_path) -> None:
    results = read_results(all_equal(tmp_path))
    assert first_count(results) == 0
    assert headline(results)[0] == "No small group among the 50 samples stands out."
    assert why_first(results).startswith("Suspicion is spread over many samples")


def test_samples_that_are_not_finite_are_told(tmp_path) -> None:
    results = read_results(not_finite(tmp_path))
    assert "3 of them have a loss or gradient that is not finite." in why_first(results)
    assert size_words(results, "norm", "gradient norm").endswith(
        "2 samples are not finite and not drawn."
    )


def test_of_equal_samples_those_that_are_not_finite_are_first(tmp_path) -> None:
    samples = clustered(40, wrong=0)
    loss = np.ones(40)
    loss[4] = np.nan
    results = read_results(write_folder(tmp_path, changed(samples, loss=loss)))
    assert headline(results)[0] == "Look first at 1 sample whose loss or gradient is not finite."


def test_one_sample_is_not_compared(tmp_path) -> None:
    lines = headline(read_results(single(tmp_path)))
    assert lines == (
        "One sample was audited: there is nothing to compare it with.",
        "The noise scale needs at least two samples.",
    )


def test_those_that_push_against_a_wrong_label_say_the_right_one(tmp_path) -> None:
    """Sample n < 15 pulls against class n + 1, which is what the others of that class say it is."""
    results = results_of(tmp_path, labels=LABELS)
    named = [opposing_label(results, index) for index in range(15)]
    assert named == [CLASSES[(index + 1) % 4] for index in range(15)]
    first = first_count(results)
    assert (
        f"All of the first {first} are pushed against by samples that agree" in headline(results)[1]
    )


def test_without_labels_nobody_says_another_one(tmp_path) -> None:
    results = results_of(tmp_path)
    assert opposing_label(results, 0) is None
    assert not any("label" in line for line in headline(results))


def test_samples_that_disagree_or_agree_with_the_label_say_nothing(tmp_path) -> None:
    same = results_of(tmp_path / "same", labels=["same"] * 300)
    apart = results_of(tmp_path / "apart", labels=[str(n) for n in range(300)])
    assert opposing_label(same, 0) is None
    assert opposing_label(apart, 0) is None


def graded(ours: float, by_loss: float, found: int = 90) -> list[str]:
    within = [
        {"share": 0.05, "size": 90, "found": 80, "found_by_loss": 79},
        {"share": 0.1, "size": 180, "found": found, "found_by_loss": 88},
    ]
    return grade_words(
        {
            "known": 90,
            "within": within,
            "average_precision": ours,
            "average_precision_by_loss": by_loss,
        }
    )


def test_a_grade_says_how_many_are_found_beside_loss_alone() -> None:
    assert graded(0.99, 0.98)[0] == (
        "All 90 samples known to be wrong are among the 10% ranked highest; loss alone finds 88 there."
    )
    assert graded(0.99, 0.98, found=88)[0].startswith("88 of 90 samples")
    assert graded(0.99, 0.98, found=88)[0].endswith("loss alone finds as many there.")
    assert grade_words(None) == []


@pytest.mark.parametrize(
    ("ours", "by_loss", "words"),
    [
        (0.995, 0.994, "loss alone ranks as well here"),
        (0.990, 0.994, "loss alone ranks as well here"),
        (0.97, 0.94, "The gradients rank better than loss alone"),
        (0.90, 0.94, "Loss alone ranks better here"),
    ],
)
def test_a_grade_is_honest_about_loss_alone(ours, by_loss, words) -> None:
    told = graded(ours, by_loss)[1]
    assert words in told
    assert f"{ours:.3f}" in told
    assert f"{by_loss:.3f}" in told


@pytest.mark.parametrize(
    ("scale", "low", "high", "words"),
    [
        (289.0, 87.0, None, "suggests batches of about 290 (at least 87)."),
        (289.0, 200.0, 512.0, "suggests batches of about 290 (200 to 510)."),
        (0.2, None, None, "suggests batches of about 1."),
        (None, 19209.0, None, "suggests batches of 19,000 or more."),
        (None, None, None, "suggest no batch size: the model has converged."),
    ],
)
def test_the_noise_is_put_into_words(scale, low, high, words) -> None:
    summary = {"samples": 9, "noise_scale": scale, "noise": {"low": low, "high": high}}
    first, meaning = noise_words(summary)
    assert first.endswith(words)
    assert len(meaning) > 80


def test_a_summary_without_an_interval_still_has_its_noise() -> None:
    assert "about 64." in noise_words({"samples": 9, "noise_scale": 64.0})[0]


def test_layers_are_put_into_words() -> None:
    groups = [
        {"name": "head", "share": 0.95, "parameters": 10},
        {"name": "body", "share": 0.05, "parameters": 90},
    ]
    assert layer_words(groups) == (
        "head holds 95% of the squared gradients with 10% of the parameters: the others hardly learn from "
        "these samples."
    )
    numbered = [{**group, "name": f"{n}.{n}"} for n, group in enumerate(groups)]
    assert layer_words(numbered).startswith("Layer 0.0 holds 95%")
    assert layer_words([]) == "No layer has a gradient."
    assert layer_words([{"name": "a", "share": 0.0, "parameters": 0}]) == "No layer has a gradient."


def test_sizes_are_put_into_words(tmp_path) -> None:
    samples = clustered(40, wrong=0)
    norm = np.array([0.0] + [1.0] * 38 + [50.0])
    results = read_results(write_folder(tmp_path, changed(samples, norm=norm)))
    assert size_words(results, "norm", "gradient norm") == (
        "Half of the samples have a gradient norm below 1; the largest is 50, of sample 39, 50 times the "
        "median. 1 sample has no gradient at all."
    )
