from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from pergrad.kernels import kernels_for, launchers, launching
from pergrad.kernels.launching import Kernel, float32_precision, power_of_two, same_dtype
from pergrad.runtime import internals, triton_internals


def test_every_launcher_leaves_its_operation_in_a_trace(device: torch.device) -> None:
    g, x = torch.randn(2, 5, 4, device=device), torch.randn(2, 5, 3, device=device)
    index, weights = torch.randint(9, (2, 5), device=device), torch.rand(2, device=device)
    images = torch.randn(2, 1, 4, 5, 5, device=device)
    one, none = [1, 1], [0, 0]
    norms = torch.ones(len(g), dtype=torch.float64, device=device)
    calls = {
        "gram_squared_norms": ([g], [x]),
        "mended_squared_norms": (norms, norms, g, x),
        "column_squared_norms": ([g], [], [], []),
        "column_sums": ([g], [], [], []),
        "tile_squared_norms": (g, x),
        "rank_one_squared_norms": (g[:, 0], x[:, 0]),
        "table_squared_norms": (index, g),
        "scaled_samples": (g, weights, True),
        "weighted_outer_products": ([g], [x], weights),
        "weighted_rows": (g.flatten(1), weights),
        "mend_weighted_outer_products": ([torch.zeros(4, 3, device=device)], [g], [x], weights),
        "convolution_by_tiles": (images, images, one, one, none, one, 1),
        "convolution_by_gram": (images, images, one, one, none, one, 1),
    }
    launches = {name for name in launchers.__all__ if callable(getattr(launchers, name))}
    costs = {
        "gram_microseconds",
        "tile_microseconds",
        "convolution_gram_is_cheaper",
        "float32_precision",
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


class _Compiled:
    """Stands for what Triton has compiled: notes its launches."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def run(self, x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        assert stream == 77
        assert arguments[:5] == ("function", "metadata", None, None, None)
        self.launches.append(((x, y, z), *arguments[5:]))


class _Jitted:
    """Stands for a jitted kernel: compiles anew for every call that gets as far as here."""

    arg_names = ("x", "size", "BLOCK")

    def __init__(self) -> None:
        self.compiled: list[_Compiled] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(x: Tensor, size: int, *, BLOCK: int, num_warps: int) -> _Compiled:
            self.compiled.append(_Compiled())
            return self.compiled[-1]

        return launch


class _Devices:
    """Stands for `torch.cuda`'s current device, which is that of tensors in the memory of the CPU."""

    def __init__(self) -> None:
        self.current = -1
        self.entered: list[int] = []

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        self.entered.append(index)
        yield
        self.current = before


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> _Devices:
    devices = _Devices()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices.current)
    monkeypatch.setattr(torch.cuda, "device", devices.device)
    return devices


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, devices: _Devices) -> None:
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(triton_internals, "CompiledKernel", _Compiled)
    monkeypatch.setattr(internals, "current_raw_stream", lambda _: 77)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_call_like_an_earlier_one_is_launched_by_what_was_compiled() -> None:
    jitted = _Jitted()
    kernel, first, second = Kernel(jitted), torch.zeros(4), torch.zeros(9)
    kernel(3, first, 7, BLOCK=16, num_warps=4)
    kernel(5, second, 7, BLOCK=16, num_warps=4)
    (compiled,) = jitted.compiled
    ((grid, *arguments),) = compiled.launches
    assert grid == (5, 1, 1)
    assert arguments[0] is second
    assert arguments[1:] == [7, 16]  # the constants too, but no option of Triton's


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_kernel_runs_where_its_tensors_are(devices: _Devices) -> None:
    jitted = _Jitted()
    kernel, x = Kernel(jitted), torch.zeros(4)
    kernel(3, x, 7, BLOCK=16, num_warps=4)
    assert devices.entered == []
    devices.current = 1
    kernel(3, x, 7, BLOCK=16, num_warps=4)
    assert devices.entered == [-1]
    assert devices.current == 1
    (compiled,) = jitted.compiled
    assert len(compiled.launches) == 1


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_triton_compiles_for_is_never_shared() -> None:
    jitted = _Jitted()
    kernel, x = Kernel(jitted), torch.zeros(8)
    calls: list[tuple[Tensor, int, int, int]] = [
        (x, 7, 16, 4),
        (x[1:], 7, 16, 4),  # begins where wide loads may not
        (x.double(), 7, 16, 4),
        (x, 1, 16, 4),
        (x, 16, 16, 4),
        (x, 2**40, 16, 4),
        (x, 7, 32, 4),
        (x, 7, 16, 8),
    ]
    for t, size, block, warps in calls:
        kernel(1, t, size, BLOCK=block, num_warps=warps)
    assert len(jitted.compiled) == len(calls)
    assert not any(compiled.launches for compiled in jitted.compiled)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_calls_that_always_differ_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernel, "most", 3)
    kernel, x = Kernel(_Jitted()), torch.zeros(8)
    for size in range(10):
        kernel(1, x, size, BLOCK=16, num_warps=4)
        assert len(kernel._compiled) <= 3
