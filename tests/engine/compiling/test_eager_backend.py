"""A traced step without a compiler: its own functions, with nothing between and nothing left over."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import pergrad
from pergrad.engine.compiling.eager_backend import _BOUND, as_python
from pergrad.testing import assert_near, loop_grads


def _targets(graph: Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_what_was_for_autograd_or_a_compiler_is_left_out() -> None:
    def step(x: Tensor) -> list[Tensor]:
        once = torch.ops.pergrad.computed_once(x.detach() * 2)
        return [once.detach() + x.cos() * 0 + once, x.sin()]

    x = torch.randn(3)
    graph = make_fx(step, tracing_mode="fake")(x)
    call = as_python(graph)
    left = _targets(graph.graph)
    assert not [name for name in left if "detach" in name or "computed_once" in name]
    for found, wanted in zip(call(x), step(x), strict=True):
        torch.testing.assert_close(found, wanted)


def test_writes_to_an_input_are_kept() -> None:
    def step(x: Tensor, count: Tensor) -> list[Tensor]:
        count.add_(1)
        return [x * count]

    x, count = torch.randn(3), torch.zeros(())
    graph: GraphModule = make_fx(step, tracing_mode="fake")(x, count.clone())
    (found,) = as_python(graph)(x, count)
    assert float(count) == 1
    torch.testing.assert_close(found, x)


def test_every_tensor_is_let_go_of_once_it_was_read_for_the_last_time() -> None:
    model, norms = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)]), pergrad.Norms()
    step = pergrad.compiled(model, lambda model, x: model(x).sum(1), norms, backend="eager")
    x = torch.randn(512, 64)
    for _ in range(3):
        step(x)
    gc.collect()

    held: list[int] = []
    seen: list[weakref.ref[Tensor]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            of_call = pytree.tree_leaves((args, kwargs, result))
            seen.extend(weakref.ref(t) for t in of_call if isinstance(t, Tensor))
            tensors = [t for ref in seen if (t := ref()) is not None and t.shape == x.shape]
            held.append(len({t.untyped_storage().data_ptr() for t in tensors}))
            return result

    with Watch():
        step(x)
    # Inputs of layers, which the norms need, and no gradient of a layer that is done.
    assert max(held) <= 12 + 6


class Turned(nn.Module):
    """Gradients come to a softplus otherwise than torch foresees, and go on through a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 4), nn.Conv1d(4, 3, 3)

    def forward(self, x: Tensor) -> Tensor:  # (n, t, 6) -> (n, 3, t - 2)
        return self.last(F.softplus(self.second(self.first(x))).transpose(1, 2))


def test_results_may_lie_otherwise_than_torch_foresees() -> None:
    torch.manual_seed(0)
    model, grads = Turned().double(), pergrad.Grads()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum((1, 2))

    step = pergrad.compiled(model, loss, grads, backend="eager")
    for _ in range(3):
        x = torch.randn(5, 7, 6, dtype=torch.float64)
        step(x)
        for name, wanted in loop_grads(model, loss, x).items():
            assert_near(grads.result[name], wanted, name)
    assert step.graphs == 1


def _windows(x: Tensor) -> list[Tensor]:
    seen = F.softplus(x).clone()
    return [seen.as_strided((2, 2), (1, seen.stride(0))) + 1]


def test_strides_that_were_traced_are_those_that_are_met() -> None:
    x = torch.randn(2, 3)
    call = as_python(make_fx(_windows, tracing_mode="fake")(x))
    (expected,) = _windows(x)
    for given in (x, x.T.contiguous().T):  # of other strides than it was traced with
        torch.testing.assert_close(call(given)[0], expected)


def test_what_is_written_to_is_not_copied_for_its_strides() -> None:
    def step(x: Tensor) -> list[Tensor]:
        x.as_strided((2,), (x.stride(0),)).zero_()
        return [x * 1]

    call = as_python(make_fx(step, tracing_mode="fake")(torch.randn(2, 3)))
    with pytest.raises(pergrad.PergradError, match=r"strides .3, 1. got strides .1, 2."):
        call(torch.randn(3, 2).T)


class Counting(TorchFunctionMode):
    """Counts the functions that it sees."""

    calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_no_mode_sees_the_functions_of_a_step() -> None:
    graph = make_fx(lambda x: [(x @ x.T).sum(1)], tracing_mode="fake")(X)
    call = as_python(graph)
    with Counting() as mode:
        (found,) = call(X)
    assert mode.calls == 0
    torch.testing.assert_close(found, (X @ X.T).sum(1))


Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # an overload and its arguments

X, Y, ROW = torch.rand(4, 3) + 0.5, torch.rand(4, 3) + 0.5, torch.rand(3) + 0.5
IMAGE, KERNEL = torch.rand(2, 4, 5, 5), torch.rand(6, 4, 3, 3)
MANY = torch.rand(2, 3, 4)
INDEX = torch.tensor([[0, 2, 1]])
ALIKE: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu"), "pin_memory": False}
ALONE: list[Call] = [("default", (X,), {})]
PAIRS: list[Call] = [("Tensor", (X, Y), {}), ("Scalar", (X, 1.5), {})]
LIKE: list[Call] = [*ALONE, ("default", (X,), ALIKE)]
NEW: list[Call] = [("default", (X, [2, 5]), {}), ("default", (X, [2, 5]), ALIKE)]

# Of every function that is called by torch's binding: calls as a trace has them.
CALLS: dict[str, list[Call]] = {
    **dict.fromkeys("abs cos exp log neg reciprocal relu rsqrt".split(), ALONE),
    **dict.fromkeys("sigmoid sin sqrt t tanh".split(), ALONE),
    **dict.fromkeys("div eq ge gt le lt mul ne".split(), PAIRS),
    **{key: [*PAIRS, ("Tensor", (X, Y), {"alpha": 2})] for key in "add sub".split()},
    **dict.fromkeys("ones_like zeros_like".split(), LIKE),
    **dict.fromkeys("new_ones new_zeros".split(), NEW),
    "addmm": [("default", (ROW, X, X[:3]), {}), ("default", (ROW, X, X[:3]), {"beta": 2})],
    "bmm": [("default", (MANY, MANY.mT), {})],
    "cat": [("default", ([X, Y], 1), {}), ("default", ([X, Y],), {})],
    "clone": [*ALONE, ("default", (X.T,), {"memory_format": torch.contiguous_format})],
    "convolution": [
        ("default", (IMAGE, KERNEL, None, [2, 1], [1, 1], [1, 1], False, [0, 0], 1), {}),
        ("default", (IMAGE, KERNEL.mT[:4], None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1), {}),
    ],
    "copy_": [("default", (X.clone(), Y), {}), ("default", (X.clone(), Y, False), {})],
    "embedding": [("default", (X, INDEX), {}), ("default", (X, INDEX, 1, False, False), {})],
    "expand": [("default", (ROW, [4, 3]), {}), ("default", (ROW, [2, -1]), {"implicit": False})],
    "gelu": [*ALONE, ("default", (X,), {"approximate": "tanh"})],
    "linalg_vector_norm": [
        ("default", (X, 2, [1]), {}),
        ("default", (X, 2, [0, 1], True), {"dtype": torch.float64}),
    ],
    "mean": [
        ("default", (X,), {"dtype": torch.float64}),
        ("dim", (X, [1], True), {}),
        ("dim", (X, [-1]), {"dtype": torch.float64}),
    ],
    "mm": [("default", (X, X.T), {})],
    "native_dropout": [("default", (X, 0.0, True), {})],
    "native_group_norm": [("default", (IMAGE, None, None, 2, 4, 25, 2, 1e-5), {})],
    "native_layer_norm": [("default", (X, [3], ROW, ROW, 1e-5), {})],
    "new_empty": [],  # has no values
    "new_full": [("default", (X, [2, 5], 3), {}), ("default", (X, [2, 5], 3), ALIKE)],
    "permute": [("default", (MANY, [2, 0, 1]), {})],
    "pow": [
        ("Tensor_Scalar", (X, 2), {}),
        ("Tensor_Tensor", (X, Y), {}),
        ("Scalar", (2, X), {}),
    ],
    "reshape": [("default", (X, [2, -1]), {}), ("default", (X.T, [12]), {})],
    "scatter_": [
        ("src", (X.clone(), 0, INDEX, Y), {}),
        ("value", (X.clone(), 0, INDEX, 2.0), {}),
    ],
    "scatter_add_": [("default", (X.clone(), 0, INDEX, Y), {})],
    "select": [("int", (X, 0, 2), {})],
    "squeeze": [
        ("default", (X[:1],), {}),
        ("dim", (X[:1], 0), {}),
        ("dims", (X[:1, None], [0, 1]), {}),
    ],
    "stack": [("default", ([X, Y], 1), {}), ("default", ([X, Y],), {})],
    "sum": [
        ("default", (X,), {}),
        ("default", (X,), {"dtype": torch.float64}),
        ("dim_IntList", (X, [0], True), {}),
        ("dim_IntList", (X, [0, 1]), {"dtype": torch.float64}),
    ],
    "transpose": [("int", (MANY, 0, -1), {})],
    "unsqueeze": [("default", (X, -1), {})],
    "view": [("default", (X, [2, -1]), {}), ("dtype", (X, torch.int32), {})],
    "where": [("self", (X > 1, X, Y), {}), ("ScalarOther", (X > 1, X, 0), {})],
}


def test_every_function_has_calls_to_compare() -> None:
    assert CALLS.keys() == _BOUND.keys()


@pytest.mark.parametrize("name", CALLS)
def test_torchs_binding_takes_what_a_trace_has_and_gives_the_same(name: str) -> None:
    for overload, arguments, options in CALLS[name]:
        function = getattr(getattr(torch.ops.aten, name), overload)
        wanted = function(*copy.deepcopy(arguments), **options)
        found = _BOUND[name](*copy.deepcopy(arguments), **options)
        torch.testing.assert_close(
            tuple(pytree.tree_leaves(found)), tuple(pytree.tree_leaves(wanted))
        )


def test_bindings_take_the_place_of_functions_in_a_trace() -> None:
    def step(x: Tensor) -> list[Tensor]:
        return [(x.double() @ x.T.double()).sum(1), x.to(x.dtype, copy=True)]

    graph = make_fx(step, tracing_mode="fake")(X)
    for found, wanted in zip(as_python(graph)(X), step(X), strict=True):
        torch.testing.assert_close(found, wanted)
    assert not [name for name in _targets(graph.graph) if name.startswith("aten.")]
