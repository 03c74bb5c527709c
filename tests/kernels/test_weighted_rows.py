from __future__ import annotations

import pytest
import torch

from pergrad.kernels.weighted_rows import weighted_rows


@pytest.mark.parametrize("shape", [(3, 5), (1, 200), (20, 1500), (16, 1024)])
def test_rows_are_summed_with_their_weights(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> None:
    rows = torch.randn(shape, device=device).to(dtype)
    weights = torch.rand(shape[0], device=device, dtype=torch.float64) + 0.5
    found = weighted_rows(rows, weights)
    assert found.dtype == torch.float32
    exact = weights @ rows.double()
    assert (found - exact).norm() <= 1e-6 * exact.norm()


def test_rows_need_not_be_neighbours(device: torch.device) -> None:
    weights = torch.rand(4, device=device)
    with_room = torch.randn(4, 300, device=device)[:, 3:290]
    transposed = torch.randn(287, 4, device=device).T
    for rows in (with_room, transposed):
        torch.testing.assert_close(weighted_rows(rows, weights), weights @ rows)


def test_a_row_of_weight_zero_adds_nothing_whatever_is_in_it(device: torch.device) -> None:
    rows, weights = torch.randn(18, 40, device=device), torch.rand(18, device=device)
    rows[17], rows[2] = float("nan"), float("inf")
    weights[[2, 17]] = 0
    is_kept = weights != 0
    found = weighted_rows(rows, weights)
    torch.testing.assert_close(found, weights[is_kept] @ rows[is_kept])
