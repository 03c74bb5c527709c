"""`Grads`: the gradients themselves."""

import pytest
import torch
from torch import nn

import pergrad
from pergrad.errors import ScopeError
from pergrad.testing import assert_near


def test_result_has_every_trainable_parameter_in_order() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    found = pergrad.grads(model, lambda m, x: m(x).sum(1), torch.randn(5, 3))
    assert list(found) == ["0.weight", "1.weight", "1.bias"]
    for name, rows in found.items():
        assert rows.shape == (5, *model.get_parameter(name).shape)
        assert not rows.requires_grad


def test_sum_over_the_samples_is_the_ordinary_gradient() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).double(), torch.ones(6, 3)
    x = x.double() * torch.arange(6.0).double()[:, None]
    found = pergrad.grads(model, lambda m, x: m(x).pow(2).sum(1), x)
    model(x).pow(2).sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert_near(found[name].sum(0), p.grad, name)


def test_result_does_not_share_memory_with_the_parameters() -> None:
    model = nn.Linear(3, 2)
    found = pergrad.grads(model, lambda m, x: m(x).sum(1), torch.ones(4, 3))
    before = model.weight.clone()
    for rows in found.values():
        rows.add_(1)
    assert torch.equal(model.weight, before)


def test_there_is_no_result_before_the_block_ends() -> None:
    grads = pergrad.Grads()
    with pytest.raises(ScopeError, match="no result yet"):
        _ = grads.result
