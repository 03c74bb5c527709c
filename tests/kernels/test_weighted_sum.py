from __future__ import annotations

import pytest
import torch

from pergrad.kernels.weighted_sum import weighted_outer_products


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
