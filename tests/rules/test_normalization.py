"""Group normalisation by torch's own kernel, against the product with the normalised input."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pergrad
from pergrad.factors import Dense, ElementProduct, NormalizedProduct
from pergrad.factors.choosing import CHOOSERS
from pergrad.rules import RULES, normalization
from pergrad.rules.normalization import batch_norm, group_norm, layer_norm
from pergrad.runtime import MACHINES
from pergrad.testing import assert_near


@pytest.mark.parametrize("shape", [(4, 1, 6, 5), (3, 2, 6, 4, 3), (2, 3, 6)])
@pytest.mark.parametrize("groups", [1, 3])
def test_scale_and_shift_are_sums_over_each_samples_positions(shape, groups):
    generator = torch.Generator().manual_seed(0)
    g, x = (torch.randn(shape, dtype=torch.float64, generator=generator) * 3 + 1 for _ in range(2))
    g, x = (
        t.transpose(1, -1).contiguous().transpose(1, -1) for t in (g, x)
    )  # out of order in memory
    found = {name: factor() for name, factor in group_norm(g, x, groups).items()}
    normalized = F.group_norm(x.flatten(0, 1), groups).view(shape)
    dims = [1, *range(3, len(shape))]
    assert_near(found["weight"].materialize(), (g * normalized).sum(dims))
    assert_near(found["bias"].materialize(), g.sum(dims))


def test_low_precision_is_summed_up_in_the_type_that_is_asked_for():
    g = torch.ones(2, 1, 4, 3000, dtype=torch.bfloat16)
    factor = group_norm(g, torch.randn_like(g), 2)["bias"]()
    assert not isinstance(factor, Dense)
    assert factor.materialize(torch.float32)[0, 0] == 3000


def test_a_shift_alone_needs_no_input():
    g = torch.ones(2, 1, 4, 5)
    assert_near(group_norm(g, None, 2)["bias"]().materialize(), torch.full((2, 4), 5.0))


@pytest.mark.parametrize("shape", [(4, 1, 6, 5), (3, 2, 6, 4, 3)])
def test_statistics_may_be_given(shape):
    g, x = (torch.randn(shape, dtype=torch.float64) + 1 for _ in range(2))
    flat = x.flatten(0, 1)
    _, mean, inverse = torch.native_group_norm(
        flat, None, None, len(flat), 6, flat[0, 0].numel(), 2, 1e-5
    )
    found, expected = (
        {name: factor().materialize() for name, factor in group_norm(g, x, 2, **given).items()}
        for given in ({"mean": mean, "inverse": inverse}, {})
    )
    for name, gradients in found.items():
        assert_near(gradients, expected[name], name)


class Halves(nn.Module):
    """Normalises images, or their halves as if each were an image."""

    def __init__(self, is_halved):
        super().__init__()
        self.norm, self.is_halved = nn.GroupNorm(2, 4), is_halved

    def forward(self, x):  # (n, 4, 6)
        if self.is_halved:
            x = x.unflatten(2, (2, 3)).movedim(2, 1).flatten(0, 1)
        return self.norm(x).square().flatten(1)


@pytest.mark.parametrize("is_halved", [False, True])
def test_statistics_of_the_forward_are_used_where_samples_are_its_rows(is_halved, monkeypatch):
    given = []

    def seen(*args, mean=None, inverse=None, **kwargs):
        given.append(mean is not None and inverse is not None)
        return rule.gradients(*args, mean=mean, inverse=inverse, **kwargs)

    rule = RULES[F.group_norm]
    monkeypatch.setitem(RULES, F.group_norm, replace(rule, gradients=seen))
    model = Halves(is_halved).double()
    x = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    with pergrad.record(model, pergrad.Grads(), batch_size=3) as grads:
        model(x).sum().backward()
    assert given == [not is_halved]
    alone = [torch.autograd.grad(model(x[n : n + 1]).sum(), model.norm.weight)[0] for n in range(3)]
    assert_near(grads.result["norm.weight"], torch.stack(alone))


def of_a_gpu(monkeypatch):
    """Has the rules choose as on a GPU."""
    chooser = CHOOSERS[MACHINES["cuda", "eager"]]
    monkeypatch.setattr(normalization, "chooser_of", lambda _: chooser)


def test_a_gpu_leaves_the_input_to_reductions_where_the_statistics_are_known(monkeypatch):
    of_a_gpu(monkeypatch)
    g, x = (torch.randn(3, 2, 4, dtype=torch.float64) + 1 for _ in range(2))
    _, mean, inverse = torch.native_layer_norm(x, (4,), None, None, 1e-5)
    for given, kind in (
        ({"mean": mean, "inverse": inverse}, NormalizedProduct),
        ({"mean": mean}, ElementProduct),
        ({"inverse": inverse}, ElementProduct),
    ):
        factor = layer_norm(g, x, (4,), **given)["weight"]()
        assert type(factor) is kind
        assert_near(factor.materialize(), (g * F.layer_norm(x, (4,))).sum(1))


def test_a_gpu_leaves_groups_to_reductions_where_the_statistics_are_known(monkeypatch):
    of_a_gpu(monkeypatch)
    g, x = (torch.randn(3, 1, 4, 5, dtype=torch.float64) + 1 for _ in range(2))
    flat = x.flatten(0, 1)
    normalized, mean, inverse = torch.native_group_norm(flat, None, None, 3, 4, 5, 2, 1e-5)
    factor = group_norm(g, x, 2, mean=mean, inverse=inverse)["weight"]()
    assert type(factor) is NormalizedProduct
    assert_near(factor.materialize(), (g[:, 0] * normalized).sum(2))


@pytest.mark.parametrize("shape", [(3, 2, 4), (3, 2, 4, 5), (3, 1, 4, 2, 3)])
def test_a_gpu_leaves_the_input_of_a_batch_norm_to_reductions(shape, monkeypatch):
    g, x = (torch.randn(shape, dtype=torch.float64) + 1 for _ in range(2))
    mean, variance = torch.randn(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64) + 1
    written = {name: f() for name, f in batch_norm(g, x, mean, variance, eps=0.1).items()}
    assert type(written["weight"]) is ElementProduct
    of_a_gpu(monkeypatch)
    left = batch_norm(g, x, mean, variance, eps=0.1)
    factor = left["weight"]()
    assert type(factor) is NormalizedProduct
    assert factor.grad_output is left["bias"]().grad_output  # so that one launch reads it once
    for name, found in left.items():
        assert_near(found().materialize(), written[name].materialize(), name)
