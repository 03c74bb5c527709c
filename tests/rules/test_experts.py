"""Rows that go through the matrix of their group, against one backward a sample: in float32, all there is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pergrad
from pergrad.testing import loop_grads

EXPERTS, IN, OUT = 3, 8, 16


class Experts(nn.Module):
    """A matrix for each token by its first feature; tokens whose last one is large go through none."""

    def __init__(self, *, is_transposed: bool) -> None:
        super().__init__()
        shape = (OUT, IN) if is_transposed else (IN, OUT)
        self.weight = nn.Parameter(torch.randn(EXPERTS, *shape))
        self.is_transposed = is_transposed

    def forward(self, x: Tensor) -> Tensor:  # (n, t, i) -> (n, t, o)
        tokens = x.flatten(0, 1)
        expert = (tokens[:, 0] > 0).long() * 2  # nothing goes to the second
        expert = expert.masked_fill(tokens[:, -1] > 1.5, EXPERTS)
        expert, order = expert.sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(EXPERTS, device=x.device), right=True).int()
        weight = self.weight.transpose(-2, -1) if self.is_transposed else self.weight
        found = F.grouped_mm(tokens[order], weight, offs=ends)
        found = found.masked_fill((expert == EXPERTS).unsqueeze(-1), 0)
        return found[order.argsort()].unflatten(0, x.shape[:2])


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum((1, 2))


@pytest.fixture(params=[False, True], ids=["as it is", "transposed"])
def model(request: pytest.FixtureRequest) -> Experts:
    torch.manual_seed(0)
    return Experts(is_transposed=request.param)


@pytest.mark.parametrize("n", [1, 4, EXPERTS])
def test_gradients_norms_and_sums_are_those_of_the_loop(model: Experts, n: int) -> None:
    x = torch.randn(n, 6, IN)
    (exact,) = loop_grads(model, losses, x).values()
    grads, norms, clipped = pergrad.Grads(), pergrad.Norms(), pergrad.ClippedSum(5.0)
    dots = pergrad.Dots({"weight": torch.ones_like(model.weight)})
    for quantity in (grads, norms, clipped, dots):  # each by its own way
        with pergrad.record(model, quantity):
            losses(model, x).sum().backward()
    torch.testing.assert_close(grads.result["weight"], exact)
    size = exact.flatten(1).norm(dim=1)
    torch.testing.assert_close(norms.result, size)
    scaled = exact * (5 / size).clamp(max=1).view(-1, 1, 1, 1)
    torch.testing.assert_close(clipped.result["weight"], scaled.sum(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dots.result, exact.flatten(1).sum(1), rtol=1e-4, atol=1e-4)


def test_gradients_stay_in_the_form_of_their_rows(model: Experts) -> None:
    (row,) = pergrad.explain(model, losses, torch.randn(4, 6, IN)).rows
    assert row.factors == ("Stacked",)


def test_a_sample_that_is_not_a_number_reaches_no_other(model: Experts) -> None:
    x = torch.randn(4, 6, IN)
    clean = pergrad.grads(model, losses, x)["weight"]
    x[1] = float("nan")
    spoilt = pergrad.grads(model, losses, x)["weight"]
    assert spoilt[1].isnan().any()
    others = [0, 2, 3]
    torch.testing.assert_close(spoilt[others], clean[others])


@pytest.mark.parametrize("n", [2, 4, EXPERTS])
def test_a_traced_step_goes_by_grouped_products(model: Experts, n: int) -> None:
    norms, clipped, grads = pergrad.Norms(), pergrad.ClippedSum(5.0), pergrad.Grads()
    dots = pergrad.Dots({"weight": torch.ones_like(model.weight)})
    step = pergrad.compiled(model, losses, norms, clipped, grads, dots, backend="eager")
    for _ in range(3):
        x = torch.randn(n, 6, IN)
        step(x)
        (exact,) = loop_grads(model, losses, x).values()
        torch.testing.assert_close(grads.result["weight"], exact, rtol=1e-4, atol=1e-4)
        size = exact.flatten(1).norm(dim=1)
        torch.testing.assert_close(norms.result, size)
        scaled = exact * (5 / size).clamp(max=1).view(-1, 1, 1, 1)
        torch.testing.assert_close(clipped.result["weight"], scaled.sum(0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(dots.result, exact.flatten(1).sum(1), rtol=1e-4, atol=1e-3)
    assert step.graphs == 1


@pytest.mark.gpu
def test_halves_on_a_gpu_are_those_of_the_loop(model: Experts) -> None:
    x = torch.randn(4, 30, IN, device="cuda", dtype=torch.bfloat16)
    model = model.to("cuda", torch.bfloat16)
    (exact,) = loop_grads(model, losses, x).values()
    found, norms = pergrad.grads(model, losses, x)["weight"], pergrad.norms(model, losses, x)
    assert (found - exact).norm() <= 0.02 * exact.norm()
    torch.testing.assert_close(
        norms.double(), exact.double().flatten(1).norm(dim=1), rtol=0.02, atol=0
    )
