from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from pergrad.kernels import kernels_for, launchers
from pergrad.kernels.launching import float32_precision, power_of_two, same_dtype


def test_every_launcher_leaves_its_operation_in_a_trace(device: torch.device) -> None:
    g, x = torch.randn(2, 5, 4, device=device), torch.randn(2, 5, 3, device=device)
    index, weights = torch.randint(9, (2, 5), device=device), torch.rand(2, device=device)
    images = torch.randn(2, 1, 4, 5, 5, device=device)
    one, none = [1, 1], [0, 0]
    calls = {
        "gram_squared_norms": ([g], [x]),
        "column_squared_norms": ([g], []),
        "tile_squared_norms": (g, x),
        "rank_one_squared_norms": (g[:, 0], x[:, 0]),
        "table_squared_norms": (index, g),
        "scaled_samples": (g, weights, True),
        "weighted_outer_products": ([g], [x], weights),
        "mend_weighted_outer_products": ([torch.zeros(4, 3, device=device)], [g], [x], weights),
        "convolution_by_tiles": (images, images, one, one, none, one, 1),
        "convolution_by_gram": (images, images, one, one, none, one, 1),
    }
    launches = {name for name in launchers.__all__ if callable(getattr(launchers, name))}
    costs = {
        "gram_microseconds",
        "tile_microseconds",
        "convolution_gram_is_cheaper",
    }
    assert calls.keys() == launches - costs
    for name, arguments in calls.items():
        launch = getattr(launchers, name)
        leaves, spec = pytree.tree_flatten(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        def run(
            *tensors: Tensor, launch: Any = launch, leaves: Any = leaves, spec: Any = spec
        ) -> Tensor:
            others = leaves[len(tensors) :]  # tensors come first in all of them
            found: Tensor = launch(*pytree.tree_unflatten([*tensors, *others], spec))
            return found

        traced = make_fx(run, tracing_mode="fake")(*tensors)
        assert f"pergrad.{name}" in traced.code, name
        torch.testing.assert_close(traced(*tensors), launch(*arguments))


def test_no_kernel_runs_on_what_it_was_not_made_for() -> None:
    assert kernels_for(torch.ones(3)) is None  # not on a GPU
    if torch.cuda.is_available():
        assert kernels_for(torch.ones(3, device="cuda")) is launchers
        assert kernels_for(torch.ones(3, device="cuda", dtype=torch.float64)) is None
        assert kernels_for(torch.ones(0, device="cuda")) is None


def test_products_of_float32_are_exact_on_request() -> None:
    assert float32_precision() == "tf32x3"
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        assert float32_precision() == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_two_types_meet_in_the_wider() -> None:
    low, high = torch.ones(1, dtype=torch.bfloat16), torch.ones(1)
    assert [t.dtype for t in same_dtype(low, high)] == [torch.float32] * 2


def test_powers_of_two_stay_within_bounds() -> None:
    assert [power_of_two(size, 16, 64) for size in (1, 16, 17, 64, 65)] == [16, 16, 32, 64, 64]
