from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel
from triton.knobs import runtime
from triton.runtime import driver
from triton.runtime.jit import JITFunction

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
        "depthwise_gradients": (images, images, one, one, none, one, 4),
    }
    launches = {name for name in launchers.__all__ if callable(getattr(launchers, name))}
    costs = {
        "gram_microseconds",
        "tile_microseconds",
        "convolution_gram_is_cheaper",
        "convolution_gram_microseconds",
        "convolution_tile_microseconds",
        "one_tap_microseconds",
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


# What follows is about the installed Triton, so that a change of how it launches is noticed.


class _Noting(_Compiled):
    """Stands for what Triton has compiled, and notes all that a launch gets."""

    def launch_metadata(self, *_: Any) -> str:
        return "for hooks"

    def run(self, *given: Any) -> None:  # type: ignore[override]
        self.launches.append(given)


def _doubling(x, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + k, 2 * tl.load(x + k, mask=k < size), mask=k < size)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_repeated_launch_gets_what_tritons_own_launch_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noting = _Noting()
    monkeypatch.setattr(JITFunction, "_do_compile", lambda *_, **__: noting)
    # A driver as `JITFunction.run` asks for one; to compile for this target needs no GPU.
    gpu = SimpleNamespace(
        get_current_device=lambda: -1,
        get_current_stream=lambda _: 77,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(driver, "_active", gpu)
    kernel, x, out = Kernel(JITFunction(_doubling)), torch.zeros(9), torch.zeros(9)
    for _ in range(2):
        kernel(3, x, out, 9, BLOCK=16, num_warps=4)
    by_triton, by_us = noting.launches
    assert by_triton[:6] == by_us[:6] == (3, 1, 1, 77, "function", "metadata")
    assert by_triton[6:9] == ("for hooks", runtime.launch_enter_hook, runtime.launch_exit_hook)
    assert by_us[6:9] == (None, None, None)
    assert len(by_triton[9:]) == 4
    assert all(a is b for a, b in zip(by_triton[9:], by_us[9:], strict=True))


def test_tritons_launcher_takes_what_a_repeated_launch_gives() -> None:
    launcher = inspect.signature(CudaLauncher.__call__)
    begin = ["self", "gridX", "gridY", "gridZ", "stream", "function"]
    assert [*launcher.parameters][:6] == begin
    arguments = launcher.bind(*range(15)).arguments  # 9 for the launch, and those of the kernel
    rest = ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook", "args"]
    assert [*arguments][6:] in (rest, ["args"])  # Triton 3.6 hands all of them on as they are


def test_what_triton_compiles_has_all_that_a_repeated_launch_reads() -> None:
    assert isinstance(CompiledKernel.run, property)
    made = inspect.getsource(CompiledKernel.__init__)
    assert "self.packed_metadata =" in made
    assert "self.function =" in made
    assert JITFunction(_doubling).arg_names == ["x", "out", "size", "BLOCK"]


@pytest.mark.gpu
def test_a_repeated_launch_computes_what_tritons_own_does() -> None:
    jitted = triton.jit(_doubling)
    kernel, x = Kernel(jitted), torch.randn(1000, device="cuda")
    expected, first, again = (torch.zeros_like(x) for _ in range(3))
    jitted[(8,)](x, expected, 1000, BLOCK=128, num_warps=4)
    kernel(8, x, first, 1000, BLOCK=128, num_warps=4)
    assert len(kernel._compiled) == 1
    kernel._jitted = None  # from here on only by what was compiled
    kernel(8, x, again, 1000, BLOCK=128, num_warps=4)
    assert torch.equal(expected, 2 * x)
    assert torch.equal(first, expected)
    assert torch.equal(again, expected)
