"""Rows in half precision keep their digits at any scale; rows that are not finite are marked."""

from __future__ import annotations

import pytest
import torch

from pergrad.errors import IndexingError
from pergrad.index.store.numbers import as_stored, checked_dtype, unscaled


@pytest.mark.parametrize(
    ("dtype", "error"), [("float16", 1e-3), ("bfloat16", 8e-3), ("float64", 0.0)]
)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_stored_rows_are_close(dtype: str, error: float, size: float) -> None:
    torch.manual_seed(0)
    rows = torch.randn(4, 50, dtype=torch.float64) * size
    values, scale = as_stored(rows, checked_dtype(dtype))
    found = unscaled(values, scale[:, None], checked_dtype(dtype))[:, 0].double()
    assert ((found - rows).norm(dim=1) <= error * rows.norm(dim=1)).all()


def test_rows_that_are_not_finite_are_nan_and_zeros_stay() -> None:
    rows = torch.tensor([[1.0, torch.inf], [torch.nan, 0.0], [0.0, 0.0]])
    values, scale = as_stored(rows, "float16")
    found = unscaled(values, scale[:, None], "float16")[:, 0]
    assert torch.isnan(found[:2]).all()
    assert (found[2] == 0).all()


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(IndexingError, match="one of float16, bfloat16"):
        checked_dtype("int8")
