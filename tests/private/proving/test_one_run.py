"""The one-run audit has its reference values, and refuses scores that prove nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pergrad.errors import PrivacyError
from pergrad.private import one_run_audit

SCORES = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(10_000).double() + 0.5) / 10_000)


@pytest.mark.parametrize(
    ("claim", "shift", "epsilon"),
    [
        ("dp", 0, 0.0),
        ("dp", 1, 1.13346),
        ("dp", 2, 2.311945),
        ("dp", 4, 4.395568),
        ("f-dp", 0, 0.0),
        ("f-dp", 1, 2.164749),
        ("f-dp", 2, 4.7218075),
        ("f-dp", 4, 9.133752),
    ],
)
def test_the_bound_is_the_reference_value(claim: Any, shift: float, epsilon: float) -> None:
    found = one_run_audit(SCORES + shift, SCORES, claim=claim)
    assert found == pytest.approx(epsilon, rel=1e-5)


def test_a_thousand_right_guesses_prove_little_more_than_five() -> None:
    found = one_run_audit(torch.ones(1000), torch.zeros(1000), threshold=0.5)
    assert found == pytest.approx(5.80, abs=0.01)


@pytest.mark.parametrize("seed", range(20))
def test_scores_that_know_nothing_rarely_prove_anything(seed: int) -> None:
    scores = torch.randn(2, 300, generator=torch.Generator().manual_seed(seed))
    assert one_run_audit(*scores) < 0.4


def test_a_threshold_chosen_before_proves_more_than_the_best_of_many() -> None:
    few = SCORES[::20]
    assert one_run_audit(few + 2, few, threshold=2.0) > one_run_audit(few + 2, few) > 0.5


def test_more_delta_and_less_significance_prove_less() -> None:
    few = SCORES[::20]
    usual = one_run_audit(few + 2, few)
    assert one_run_audit(few + 2, few, delta=1e-3) < usual
    assert one_run_audit(few + 2, few, significance=1e-4) < usual
    assert one_run_audit(few, few + 2) == 0


@pytest.mark.parametrize(
    ("arguments", "options", "reason"),
    [
        (([], [1.0]), {}, "no scores of included canaries"),
        (([1.0], []), {}, "no scores of excluded canaries"),
        (([float("nan")], [1.0]), {}, "not all finite"),
        (([1.0], [1.0]), {"delta": 0}, "delta must be"),
        (([1.0], [1.0]), {"delta": None}, "delta must be"),
        (([1.0], [1.0]), {"significance": 1}, "significance must be"),
        (([1.0], [1.0]), {"threshold": float("nan")}, "threshold must be a number"),
        ((["high"], [1.0]), {}, "scores of included canaries are not numbers"),
        (([1.0], [1.0]), {"claim": "zcdp"}, "claim must be one of"),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, options: Any, reason: str) -> None:
    with pytest.raises(PrivacyError, match=reason):
        one_run_audit(*arguments, **options)
