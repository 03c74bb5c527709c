"""Within a block nothing is compiled; afterwards the compiler is as it was, for all threads."""

import operator
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pergrad.errors import ScopeError
from pergrad.runtime import internals
from pergrad.runtime.eagerness import (
    refused_in_compiled_code,
    running_eagerly,
    traceable_callables,
    uncompiled,
    unfused_scripts,
)
from tests.scripts import fusing_scripts

scripting = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    yield
    torch.compiler.reset()


class Counting:
    """A backend that counts what it compiles."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, _: Any) -> Any:
        self.graphs += 1
        return graph.forward


def double(x: Tensor) -> Tensor:
    return 2 * x


def test_nothing_is_compiled_within_and_everything_after_it() -> None:
    backend = Counting()
    function = torch.compile(double, backend=backend)
    with running_eagerly(), running_eagerly():
        assert function(torch.ones(2)).tolist() == [2, 2]
    assert backend.graphs == 0
    function(torch.ones(2))
    assert backend.graphs == 1


def test_blocks_of_threads_may_end_in_any_order() -> None:
    backend, first, second = Counting(), threading.Event(), threading.Event()

    def other() -> None:
        with running_eagerly():
            first.set()
            second.wait()

    thread = threading.Thread(target=other)
    with running_eagerly():
        thread.start()
        first.wait()
    torch.compile(double, backend=backend)(torch.ones(2))
    assert backend.graphs == 0  # the other one is still open
    second.set()
    thread.join()
    torch.compile(double, backend=backend)(torch.ones(2))
    assert backend.graphs == 1


def test_an_uncompiled_function_is_no_part_of_a_graph() -> None:
    backend, seen = Counting(), []

    @uncompiled
    def apart(x: Tensor) -> Tensor:
        seen.append(type(x))
        return x * 3

    def function(x: Tensor) -> Tensor:
        return apart(x + 1) + 1

    assert torch.compile(function, backend=backend)(torch.ones(2)).tolist() == [7, 7]
    assert seen == [Tensor]
    assert backend.graphs == 2  # before and after
    assert apart(torch.ones(1)).tolist() == [3]


def test_a_refused_function_is_an_error_in_compiled_code_only() -> None:
    refused = refused_in_compiled_code(double)
    assert refused(torch.ones(1)).tolist() == [2]
    with pytest.raises(ScopeError, match="`double` cannot open a block"):
        torch.compile(lambda x: refused(x), backend="eager")(torch.ones(1))


def test_a_trace_sees_what_a_compiled_function_calls() -> None:
    function = torch.compile(double, backend="eager")
    with running_eagerly(), traceable_callables():
        graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: function(x))(torch.ones(2))
    assert graph(torch.ones(2)).tolist() == [2, 2]


def test_the_compiler_is_not_loaded_and_may_be_loaded_within() -> None:
    program = """
import sys, torch
from pergrad.runtime.eagerness import running_eagerly
own = torch.compile
with running_eagerly():
    assert "torch._dynamo" not in sys.modules
    seen = []
    def backend(graph, _):
        seen.append(graph)
        return graph.forward
    double = torch.compile(lambda x: 2 * x, backend=backend)
    assert double(torch.ones(1)).item() == 2 and not seen
assert torch.compile is own
assert double(torch.ones(1)).item() == 2 and seen
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# Scripted functions


def shrunk(x: Tensor) -> Tensor:
    return (x * 2 + 1).tanh() * x.sigmoid()


class Shrunk(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2 + 1).tanh() * x.sigmoid()


X = torch.randn(4, 3)


@pytest.fixture(params=["function", "module", "loaded module", "traced"])
def fused(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A scripted function that torch has fused already."""
    with fusing_scripts():
        if request.param == "traced":
            scripted = torch.jit.trace(shrunk, X)
        else:
            scripted = torch.jit.script(shrunk if request.param == "function" else Shrunk())
        if request.param == "loaded module":
            scripted.save(tmp_path / "shrunk.pt")
            scripted = torch.jit.load(tmp_path / "shrunk.pt")
        for _ in range(3):
            scripted(X)
        yield scripted


def traced(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    call: Callable[[Tensor], Tensor] = internals.trace(lambda x: function(x))(X)
    return call


@scripting
def test_a_trace_sees_what_a_fused_function_calls(fused: Any) -> None:
    with pytest.raises(RuntimeError, match="data pointer"), torch.jit.optimized_execution(False):
        traced(fused)
    with unfused_scripts(), unfused_scripts():
        graph = traced(fused)
    torch.testing.assert_close(graph(X), shrunk(X))
    assert "tanh" in str(graph.graph)


@scripting
def test_functions_are_fused_again_after_a_trace(fused: Any) -> None:
    with unfused_scripts():
        traced(fused)
    for _ in range(3):
        torch.testing.assert_close(fused(X), shrunk(X))
    assert "TensorExprGroup" in str(fused.graph_for(X))


@scripting
def test_other_threads_keep_their_fused_functions(fused: Any) -> None:
    failed = []

    def other() -> None:
        try:
            traced(fused)
        except RuntimeError as error:
            failed.append(error)

    with unfused_scripts():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(failed) == 1


def own_calls() -> list[Any]:
    return [vars(scripted)["__call__"] for scripted in internals.plan_flushers()]


def test_an_error_leaves_no_replaced_call_behind() -> None:
    def fail() -> None:
        assert not any(map(operator.is_, own_calls(), before))
        raise ZeroDivisionError

    before = own_calls()
    with pytest.raises(ZeroDivisionError), unfused_scripts():
        fail()
    assert all(map(operator.is_, own_calls(), before))
    assert len(before) == 2  # functions and methods


def test_replaced_calls_end_with_the_last_thread() -> None:
    (before, _), first, second = own_calls(), threading.Event(), threading.Event()

    def other() -> None:
        with unfused_scripts():
            first.set()
            second.wait()

    thread = threading.Thread(target=other)
    with unfused_scripts():
        thread.start()
        first.wait()
    assert own_calls()[0] is not before
    second.set()
    thread.join()
    assert own_calls()[0] is before
