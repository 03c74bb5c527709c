"""Casts and contexts of autocast are those that torch itself would use."""

import pytest
import torch

from pergrad.runtime import autocast_state, cast_as_autocast, current_autocast


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64])
def test_tensors_are_cast_as_autocast_casts_them_for_a_product(dtype: torch.dtype) -> None:
    x = torch.ones(2, 2, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found = cast_as_autocast(x)
        if dtype.is_floating_point:
            assert found.dtype == (x @ x).dtype
        else:
            assert found is x
    assert cast_as_autocast(x) is x


@pytest.mark.parametrize("enabled", [True, False])
def test_functions_run_again_under_the_autocast_of_their_first_run(enabled: bool) -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        again = current_autocast("cpu")
        wanted = (x @ x).dtype
    with torch.autocast("cpu", torch.float16, enabled=not enabled), again():
        assert (x @ x).dtype == wanted
    for _ in range(2):  # a context each time
        with again():
            assert (x @ x).dtype == wanted


def test_casts_of_weights_are_not_kept_for_later() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        with current_autocast("cpu")():
            (weight @ torch.ones(2, 2)).sum().backward()
        with torch.no_grad():
            weight.fill_(3.0)
        assert (weight @ torch.ones(2, 2)).max() == 6


def test_state_of_autocast_is_whether_it_is_on_and_its_type() -> None:
    assert autocast_state("cpu")[0] is False
    with torch.autocast("cpu", torch.float16):
        assert autocast_state("cpu") == (True, torch.float16)
