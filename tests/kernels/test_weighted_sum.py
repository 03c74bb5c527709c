from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pergrad.kernels.weighted_sum import mend_weighted_outer_products, weighted_outer_products


@pytest.mark.parametrize("shape", [(3, 5, 7, 9), (5, 70, 20, 33), (1, 1, 16, 16)])
def test_sums_are_weighted(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> None:
    n, t, o, i = shape
    g = torch.randn(n, t, o, device=device).to(dtype)
    x = torch.randn(n, i, t, device=device).to(dtype).mT
    weights = torch.rand(n, device=device) + 0.5
    exact = torch.einsum("n,nto,nti->oi", weights.double(), g.double(), x.double())
    other = torch.einsum("n,nto,nti->io", weights.double(), g.double(), x.double())
    found = weighted_outer_products([g, x], [x, g], weights)
    for one, expected in zip(found, (exact, other), strict=True):
        assert (one - expected).norm() <= 1e-5 * expected.norm()


def test_a_sample_of_weight_zero_adds_nothing_whatever_is_in_it(device: torch.device) -> None:
    g, x = torch.randn(3, 4, 5, device=device), torch.randn(3, 4, 6, device=device)
    g[1], x[1] = float("nan"), float("inf")
    (found,) = weighted_outer_products([g], [x], torch.tensor([1.0, 0.0, 1.0], device=device))
    exact = torch.einsum("nto,nti->oi", g[[0, 2]].double(), x[[0, 2]].double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


def _plain(g: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("n,nto,nti->oi", weights.float(), g.float(), x.float())


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_sums_that_are_finite_stay_as_they_are(weight: float, device: torch.device) -> None:
    g, x = torch.randn(3, 4, 5, device=device), torch.randn(3, 4, 6, device=device)
    weights = torch.tensor([1.0, weight, 1.0], device=device)
    sums = torch.randn(5, 6, device=device)  # not theirs: any change would show
    before = sums.clone()
    mend_weighted_outer_products([sums], [g], [x], weights)
    assert torch.equal(sums, before)


def test_what_a_sample_that_is_left_out_has_spoilt_is_mended(
    device: torch.device, dtype: torch.dtype
) -> None:
    gs = [torch.randn(20, 40, o, device=device).to(dtype) for o in (8, 160)]
    xs = [torch.randn(20, 40, 24, device=device).to(dtype) for _ in gs]
    weights = torch.rand(20, device=device, dtype=torch.float64) + 0.5
    weights[17] = 0
    exact = [_plain(g, x, weights) for g, x in zip(gs, xs, strict=True)]
    gs[0][17], gs[1][17, 3, 150], xs[1][17] = float("nan"), float("inf"), 0
    sums = [_plain(g, x, weights) for g, x in zip(gs, xs, strict=True)]
    assert sums[0].isnan().all()
    assert sums[1].isnan().any(1).nonzero().tolist() == [[150]]
    mend_weighted_outer_products(sums, gs, xs, weights)
    torch.testing.assert_close(sums, exact, rtol=1e-4, atol=1e-4)


def test_infinite_sums_of_samples_that_count_stay_infinite(device: torch.device) -> None:
    g, x = torch.randn(3, 4, 5, device=device), torch.randn(3, 4, 6, device=device)
    g[1] = float("inf")
    sums = _plain(g, x, torch.ones(3, device=device))
    mend_weighted_outer_products([sums], [g], [x], torch.ones(3, device=device))
    assert not sums.isfinite().any()
