from __future__ import annotations

import torch

from pergrad.kernels.rank_one import rank_one_squared_norms


def test_norms_are_products_of_norms(device: torch.device, dtype: torch.dtype) -> None:
    g = torch.randn(3, 70, device=device).to(dtype)
    x = torch.randn(1100, 3, device=device).to(dtype).T
    exact = g.double().square().sum(1) * x.double().square().sum(1)
    torch.testing.assert_close(rank_one_squared_norms(g, x), exact, rtol=1e-12, atol=0)


def test_a_huge_and_a_tiny_one_do_not_overflow(device: torch.device) -> None:
    g, x = torch.full((1, 4), 1e25, device=device), torch.full((1, 4), 1e-25, device=device)
    found = rank_one_squared_norms(g, x).cpu()
    torch.testing.assert_close(found, torch.tensor([16.0], dtype=torch.float64), rtol=1e-5, atol=0)
