"""Origins of sums over the samples: factors, signs and terms."""

import torch

from pergrad.engine.samples.origins import MEAN, SUM, joined, untold


def test_signs_are_part_of_the_loss_and_factors_are_not() -> None:
    assert SUM.times(-1.0) is SUM
    assert SUM.times(-0.5).times(4.0).factor == 2.0
    assert not SUM.times(0.5).times(2.0).has_factors


def test_terms_must_agree_and_their_factors_are_part_of_the_loss() -> None:
    assert joined([MEAN.times(0.5), MEAN.times(0.5)]) == MEAN
    assert joined([MEAN.times(0.5)]).factor == 0.5
    assert joined([SUM, MEAN]).how is None
    assert joined([SUM, untold("of a reason")]).why_not == "of a reason"


def test_scaler_must_be_on_all_terms() -> None:
    scale = torch.tensor(8.0)
    scaled = MEAN.times_found(scale, is_scaler=True)
    assert joined([scaled, scaled]) == scaled
    assert joined([scaled, MEAN]).how is None
    assert scaled.scalers == (scale,)
