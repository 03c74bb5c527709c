"""The exact preconditioner is the explicit inverse Hessian of a linear model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import pergrad
from pergrad.errors import IndexingError
from tests.index.cases import built, data, flat_gradients


def logistic(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(x)[:, 0], y, reduction="none")


def test_scores_of_logistic_regression_are_those_of_the_inverse_hessian() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 4, dtype=torch.float64)
    y = (torch.rand(50) < 0.5).double()
    model = nn.Linear(4, 1).double()
    index = pergrad.Index.build(
        *(model, TensorDataset(x, y), None, logistic),
        projection="none",
        dtype="float64",
        preconditioner="gauss_newton",
        damping=0.0,
        quiet=True,
        certify=False,
    )

    def total(flat: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(x @ flat[:4] + flat[4], y)

    flat = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
    hessian = torch.autograd.functional.hessian(total, flat)
    z = torch.sigmoid(model(x)[:, 0]).detach() - y
    g = z[:, None] * torch.cat([x, torch.ones(50, 1, dtype=torch.float64)], 1)
    expected = g[:7] @ torch.linalg.solve(hessian, g.T)
    torch.testing.assert_close(index.scores((x[:7], y[:7])), expected, rtol=1e-9, atol=1e-9)


def test_scores_of_softmax_regression_are_those_of_the_damped_inverse_hessian() -> None:
    x, y = data().tensors
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 3, bias=False)).double()
    options = {"preconditioner": "gauss_newton", "damping": 0.0, "ridge": 1e-3}
    index = built(model=model, **options)
    hessian = torch.autograd.functional.hessian(
        lambda w: F.cross_entropy(x @ w.view(3, 6).T, y), model[0].weight.detach().flatten()
    )
    g = flat_gradients(model, x, y)
    damped = hessian + 1e-3 * torch.eye(18, dtype=torch.float64)
    expected = g[:5] @ torch.linalg.solve(damped, g.T)
    torch.testing.assert_close(index.scores((x[:5], y[:5])), expected, rtol=1e-8, atol=1e-8)


def test_a_singular_matrix_without_damping_is_refused() -> None:
    index = built(preconditioner="gauss_newton", damping=0.0)
    with pytest.raises(IndexingError, match="Gauss-Newton matrix is singular"):
        index.scores(data().tensors)


def test_samples_that_are_not_finite_are_refused() -> None:
    x, y = data().tensors
    x[3] = float("nan")
    with pytest.raises(IndexingError, match="the gradients of some samples are not finite"):
        built(dataset=TensorDataset(x, y), preconditioner="gauss_newton")


def test_a_model_that_is_too_large_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 2000), nn.Linear(2000, 3)).double()
    with pytest.raises(IndexingError, match="ekfac"):
        built(model=model, projection="count", preconditioner="gauss_newton")
