"""A traced step without a compiler: its own functions, with nothing between and nothing left over."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import pergrad
from pergrad.engine.straight import straight
from pergrad.testing import assert_near, loop_grads


def _targets(graph: Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_what_was_for_autograd_or_a_compiler_is_left_out() -> None:
    def step(x: Tensor) -> list[Tensor]:
        once = torch.ops.pergrad.computed_once(x.detach() * 2)
        return [once.detach() + x.cos() * 0 + once, x.sin()]

    x = torch.randn(3)
    graph = make_fx(step, tracing_mode="fake")(x)
    call = straight(graph)
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
    (found,) = straight(graph)(x, count)
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

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            tensors = [t for t in gc.get_objects() if type(t) is Tensor and t.shape == x.shape]
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
    call = straight(make_fx(_windows, tracing_mode="fake")(x))
    (expected,) = _windows(x)
    for given in (x, x.T.contiguous().T):  # of other strides than it was traced with
        torch.testing.assert_close(call(given)[0], expected)


def test_what_is_written_to_is_not_copied_for_its_strides() -> None:
    def step(x: Tensor) -> list[Tensor]:
        x.as_strided((2,), (x.stride(0),)).zero_()
        return [x * 1]

    call = straight(make_fx(step, tracing_mode="fake")(torch.randn(2, 3)))
    with pytest.raises(pergrad.PergradError, match=r"strides of .3, 1. has met .1, 2."):
        call(torch.randn(3, 2).T)
