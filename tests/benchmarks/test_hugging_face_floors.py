"""The floors of Hugging Face models: counted by hand for one layer, and shown in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.hugging_face import floors
from benchmarks.hugging_face.floors import BYTES, OPERATIONS, Layer, floor_of, table


class Logits(nn.Module):
    """One linear layer at four positions of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 32, bias=False)

    def forward(self, x: Tensor) -> Logits:
        self.logits = self.layer(x)
        return self


def test_the_floor_of_one_layer_is_counted_by_hand() -> None:
    batch = {"x": torch.randn(2, 4, 8), "labels": torch.randint(0, 32, (2, 4))}
    found = floor_of(Logits(), batch)
    product = 2 * 2 * 4 * 8 * 32  # no gradient of the inputs: a step has two such products
    inner = 2 * 4 * 4 * (8 + 32)
    kept = 2 * 8 * 32 * 2 / BYTES * OPERATIONS
    assert found.norms == pytest.approx((product + inner) / (2 * product))
    assert found.clipped == pytest.approx((2 * product + min(inner, 3 * kept)) / (2 * product))
    assert found.grads == pytest.approx((2 * product + kept) / (2 * product))


def test_norms_of_long_samples_take_their_gradients() -> None:
    long = Layer(samples=1, positions=1000, inputs=4, outputs=4)
    assert long.norms == long.summing
    grouped = Layer(samples=3, positions=2, inputs=9, outputs=1, groups=16)
    assert grouped.weights == 144
    assert grouped.norms == min(3 * 2**2 * 16 * 10, 2 * 3 * 2 * 144)


def test_the_documentation_shows_the_floors() -> None:
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    assert table(["gpt2"]).splitlines()[-1] in page
    assert floors.main(["--models", "vit-b"]) == 0
