"""The origin of every loss of torch.nn.functional is known; `test_loss_units` compares the numbers."""

import inspect

import pytest
import torch
import torch.nn.functional as F

from pergrad.engine.samples.origins import SUM
from pergrad.engine.samples.propagation.totals import _places, origin_after
from tests.engine.samples.propagation.calls import call_of

KNOWN = {
    *"binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss".split(),
    *"cross_entropy ctc_loss gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss".split(),
    *"margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss".split(),
    *"multilabel_soft_margin_loss nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss".split(),
    *"triplet_margin_loss triplet_margin_with_distance_loss".split(),
}


def test_places_are_those_of_the_signature() -> None:
    for name in KNOWN:
        function = getattr(F, name)
        assert list(_places(function)) == list(inspect.signature(function).parameters)


def test_functions_that_are_not_torch_s_have_none() -> None:
    def cross_entropy(input: object, reduction: str = "mean") -> None: ...

    assert _places(cross_entropy) == {}


@pytest.mark.parametrize("count", [1, 3])
def test_a_mean_of_the_losses_divides_by_their_number_unless_there_is_one(count: int) -> None:
    losses = torch.rand(count, requires_grad=True) * 1
    call = call_of(torch.mean, losses, count=count)
    call.scope.tells_reduction = True
    call.layouts[0] = call.total(SUM)
    assert origin_after(call) == (SUM if count == 1 else SUM.divided(3))
