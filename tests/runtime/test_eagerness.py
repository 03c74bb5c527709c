"""Within a block nothing is compiled; afterwards the compiler is as it was, for all threads."""

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from pergrad.errors import ScopeError
from pergrad.runtime.eagerness import (
    refused_in_compiled_code,
    running_eagerly,
    traceable_callables,
    uncompiled,
)


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
