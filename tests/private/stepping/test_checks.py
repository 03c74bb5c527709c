"""Models and optimizers of other packages are taken out of their wrappers, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pergrad.errors import PrivacyError
from pergrad.private import Step
from tests.private.stepping.cases import losses, mlp, plan, run, sgd, weights


def test_the_optimizer_within_accelerate_s_is_used() -> None:
    accelerate = pytest.importorskip("accelerate")
    ends = []
    for is_prepared in (False, True):
        model = mlp()
        optimizer: Any = sgd(model)
        if is_prepared:
            optimizer = accelerate.Accelerator(cpu=True).prepare(optimizer)
        step, loader = run(plan(), model, optimizer=optimizer)
        for batch in loader:
            step(*batch)
        ends.append(weights(model))
    assert torch.equal(*ends)


def test_a_wrapper_that_changes_steps_is_refused() -> None:
    class Twice(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.param_groups = inner, inner.param_groups

    model = mlp()
    with pytest.raises(
        PrivacyError, match=r"Twice wraps an optimizer .*pass the one that it wraps"
    ):
        Step(model, Twice(sgd(model)), losses, plan())


def test_a_model_in_opacus_s_wrapper_is_refused() -> None:
    class AbstractGradSampleModule(nn.Module):
        pass

    class GradSampleModule(AbstractGradSampleModule):
        pass

    model = GradSampleModule()
    with pytest.raises(PrivacyError, match="GradSampleModule is Opacus's wrapper"):
        Step(model, sgd(mlp()), losses, plan())
