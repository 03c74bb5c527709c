"""The readers of a traced graph find its calls, casts, storages and writes."""

import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from pergrad.engine.compiling.passes.graph import (
    calls,
    cast_calls,
    put_behind,
    storage,
    undetached,
    written_in,
)

aten = torch.ops.aten


def graph_of(function, *inputs: Tensor) -> Graph:
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def test_calls_are_those_of_one_function_in_order() -> None:
    graph = graph_of(lambda x: (x.sin().cos().sin(), x.tanh()), torch.ones(2))
    found = calls(graph, aten.sin.default)
    assert [node.target for node in found] == [aten.sin.default] * 2
    order = list(graph.nodes)
    assert order.index(found[0]) < order.index(found[1])


def test_casts_change_the_type_and_nothing_else() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x.to(torch.bfloat16), x.to(torch.float64, memory_format=torch.channels_last)

    (node,) = cast_calls(graph_of(function, torch.ones(1, 2, 3, 4)))
    assert node.meta["val"].dtype is torch.bfloat16


def test_views_have_the_storage_of_what_they_are_views_of() -> None:
    graph = graph_of(lambda x: (x.view(6), x + 1), torch.ones(2, 3))
    (x,) = graph.find_nodes(op="placeholder")
    (view,), (total,) = calls(graph, aten.view.default), calls(graph, aten.add.Tensor)
    assert storage(view) == storage(x) != storage(total)
    assert storage(3.0) == 0


def test_storages_that_are_written_to_are_found_through_views_and_lists() -> None:
    def function(x: Tensor, y: Tensor, z: Tensor, out: Tensor) -> Tensor:
        x.view(4).add_(1)
        torch._foreach_mul_([y], 2)
        torch.add(z, 1, out=out)
        return x + y + z

    tensors = [torch.ones(2, 2) for _ in range(4)]
    graph = graph_of(function, *tensors)
    x, y, z, out = graph.find_nodes(op="placeholder")
    written = written_in(graph)
    assert {storage(x), storage(y), storage(out)} <= written
    assert storage(z) not in written


def test_detaching_is_looked_through() -> None:
    graph = graph_of(lambda x: x.sin().detach().detach() + 1, torch.ones(2, requires_grad=True))
    (sine,) = calls(graph, aten.sin.default)
    (total,) = calls(graph, aten.add.Tensor)
    assert undetached(total.all_input_nodes[0]) is sine
    assert undetached(sine) is sine


def test_what_is_put_behind_a_node_is_read_by_all_its_readers_and_reads_it() -> None:
    graph = graph_of(lambda x: (x.sin() + 1, x.sin().cos()), torch.ones(2))
    node = calls(graph, aten.sin.default)[0]
    readers = set(node.users)
    with graph.inserting_after(node):
        behind = graph.call_function(aten.neg.default, (node,))
    put_behind(node, behind)
    assert set(node.users) == {behind}
    assert set(behind.users) == readers
