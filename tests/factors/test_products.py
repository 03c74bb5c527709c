"""All ways to materialise an outer product agree."""

import pytest
import torch

from pergrad.factors import OuterProduct
from pergrad.factors.choosing import transposed_is_cheaper
from pergrad.testing import assert_near


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("o", [9, 16, 64])
@pytest.mark.parametrize("i", [3, 9, 16, 27, 80])
def test_gradients_are_sums_of_outer_products_whichever_way_is_cheaper(
    o: int, i: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    g, x = torch.randn(3, 5, o).to(dtype), torch.randn(3, 5, i).to(dtype)
    found = OuterProduct(g, x).materialize(torch.float32 if dtype == torch.bfloat16 else None)
    assert found.is_contiguous()
    exact = torch.einsum("nto,nti->noi", g.double(), x.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    if dtype == torch.float64:
        assert_near(found, exact)


def test_narrow_gradients_are_computed_transposed() -> None:
    assert transposed_is_cheaper(64, 27)
    assert not transposed_is_cheaper(64, 32)
    assert not transposed_is_cheaper(10, 9)
    assert not transposed_is_cheaper(1024, 1000)
