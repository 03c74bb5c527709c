from __future__ import annotations

import pytest
import torch

from pergrad.kernels.table import table_squared_norms


@pytest.mark.parametrize("rows", [1, 4, 1000])
def test_norms_are_those_of_the_table(rows: int, device: torch.device, dtype: torch.dtype) -> None:
    index = torch.randint(rows, (3, 20), device=device)
    g = torch.randn(3, 20, 33, device=device).to(dtype)
    table = torch.zeros(3, rows, 33, dtype=torch.float64, device=device)
    for one, at, add in zip(table, index, g, strict=True):
        one.index_add_(0, at, add.double())
    exact = table.flatten(1).square().sum(1)
    torch.testing.assert_close(table_squared_norms(index, g), exact, rtol=1e-5, atol=0)
