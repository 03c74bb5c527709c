from __future__ import annotations

import pytest
import torch

from pergrad.kernels.scaled import scaled_samples


@pytest.mark.parametrize("shape", [(3, 5, 7), (3, 40, 16), (3, 2, 3, 5, 4), (3, 6)])
def test_samples_are_scaled_or_left_out(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> None:
    x = torch.randn(shape, device=device).to(dtype)
    weights = torch.tensor([0.5, 0.0, 2.0], device=device, dtype=torch.float64)
    x[1] = float("nan")
    scale = weights.to(torch.float32).view(-1, *[1] * (x.dim() - 1))
    for is_scaled in (True, False):
        found = scaled_samples(x, weights, is_scaled)
        exact = (x.float() * scale).to(dtype) if is_scaled else x.clone()
        exact[1] = 0
        torch.testing.assert_close(found[..., : shape[-1]], exact)
        assert not found[..., shape[-1] :].any()


def test_rows_of_halves_are_padded_to_multiples_of_eight(device: torch.device) -> None:
    x = torch.randn(2, 3, 13, device=device)
    weights = torch.ones(2, device=device)
    assert scaled_samples(x.bfloat16(), weights, True).shape == (2, 3, 16)
    assert scaled_samples(x, weights, True).shape == (2, 3, 13)
