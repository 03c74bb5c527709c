"""A traced step without a compiler: its own functions, with nothing between and nothing left over."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import pergrad
from pergrad.engine.straight import straight


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
