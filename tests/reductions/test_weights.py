"""`SampleWeights`: looked at and cast once, whatever they are."""

import torch

from pergrad.reductions import SampleWeights


def test_a_weight_of_zero_is_noticed() -> None:
    assert SampleWeights(torch.tensor([1.0, 0.0])).drops_any
    assert not SampleWeights(torch.tensor([1.0, -2.0])).drops_any
    assert not SampleWeights(torch.tensor([1.0, float("nan")])).drops_any


def test_what_the_caller_knows_of_weights_is_not_looked_up() -> None:
    assert SampleWeights(torch.tensor([1.0, 2.0]), drops_any=True).drops_any
    assert not SampleWeights(torch.tensor([1.0, 0.0]), drops_any=False).drops_any


def test_casts_are_made_once() -> None:
    weights = SampleWeights(torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert weights.to(torch.float64) is weights.values
    assert weights.to(torch.float32) is weights.to(torch.float32)
    assert weights.over(torch.zeros(2, 3, 4), torch.float32).shape == (2, 1, 1)
    assert SampleWeights.of(weights) is weights
