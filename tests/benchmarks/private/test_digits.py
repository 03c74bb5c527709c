"""The recipes of the benchmark learn, by either library, with the noise of the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.private import digits
from pergrad.private import Plan

QUICK = digits.Recipe(kind="linear", lr=4.0, batch_size=360, epochs=4.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["pergrad", "opacus"])
def test_both_libraries_learn(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(
        noise_multiplier=1.0, sample_rate=0.25, steps=16, max_norm=1.0, expected_batch_size=360
    )
    monkeypatch.setattr(digits.Recipe, "plan", lambda self, epsilon: plan)
    assert digits.accuracy(replace(QUICK, library=library), 8.0, seed=0) > 0.75


def test_fixed_features_do_not_depend_on_other_images() -> None:
    features = digits.Slopes(8)
    x = torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(features(x)[2:3], features(x[2:3]))
    assert features(x).shape == (5, features.size)


def test_the_first_view_of_an_image_is_the_image() -> None:
    train, _ = digits.data(0)
    views = digits.Views(train, digits.Recipe(views=3, shift=1.0, turn=20.0))
    x, y = views[4]
    assert x.shape == (3, 1, 8, 8)
    torch.testing.assert_close(x[0], train.tensors[0][4], atol=1e-5, rtol=0)
    assert not torch.allclose(x[1], x[0], atol=0.05)
    assert y == train.tensors[1][4]


def test_the_documented_accuracies_are_the_stored_ones() -> None:
    root = Path(digits.__file__).parents[2]
    page = (root / "docs" / "howto" / "private.md").read_text()
    stored = json.loads((root / "benchmarks" / "results" / "private" / "digits.json").read_text())
    for row in stored["rows"]:
        assert f"{100 * row['mean']:.1f} ± {100 * row['deviation']:.1f}" in page
        assert len(row["accuracies"]) == 10
