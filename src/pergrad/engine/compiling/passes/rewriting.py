"""Rewrites the graph of a traced step so that the compiler generates faster code for the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from pergrad.engine.compiling.passes.activation_memory import keep_less
from pergrad.engine.compiling.passes.casts import cast_at_once
from pergrad.engine.compiling.passes.channels_last import give_sums_channels_last
from pergrad.engine.compiling.passes.graph import calls, put_behind, storage, written_in
from pergrad.engine.compiling.passes.short_attention import spell_out_short_attention
from pergrad.runtime import internals, is_large

__all__ = ["rewrite"]

_aten = torch.ops.aten
_pad = _aten.constant_pad_nd.default


def rewrite(graph: Graph) -> None:
    """Runs all passes, in place."""
    graph.eliminate_dead_code()
    written = written_in(graph)
    cast_at_once(graph, written)
    keep_less(graph, written)
    _make_input_gradients_convolutions(graph, written)
    _give_kernel_gradients_channels_last(graph)
    give_sums_channels_last(graph, written)
    _share_padding(graph, written)
    _add_biases_afterwards(graph, written)
    _write_to_kept_memory(graph)
    spell_out_short_attention(graph)
    graph.eliminate_dead_code()


def _make_input_gradients_convolutions(graph: Graph, written: set[int]) -> None:
    """Writes the input gradients of convolutions as convolutions, whose layout the compiler chooses.

    The compiler gives convolutions, and everything between them, channels last. It leaves their backward in
    the layout of the trace, with a conversion before and after. The new calls come right after their
    arguments, since the first reader of a tensor decides on its layout.
    """
    for node in calls(graph, _aten.convolution_backward.default):
        g, _, weight, *_ = node.args
        moves = written.isdisjoint(map(storage, (g, weight)))
        if node.args[-1] == [True, False, False] and moves:
            (gradient,) = node.users
            order = _order_of(gradient.meta["val"])
            if order is None:
                continue  # of strides that a convolution does not give
            with graph.inserting_after(_last(graph, g, weight)):
                found = _as_convolution(graph, node)
            if _order_of(found.meta["val"]) is not order:  # a later view may need it
                with graph.inserting_after(found):
                    found = _in_order(graph, found, order)
            gradient.replace_all_uses_with(found)


def _give_kernel_gradients_channels_last(graph: Graph) -> None:
    """Gives the arguments of kernel gradients channels last on a GPU, as its kernels want them.

    Otherwise each call converts its arguments; their producers can write channels last at once.
    """
    for node in calls(graph, _aten.convolution_backward.default):
        arguments: Any = node.args
        g, x, *_, groups, asked = arguments
        value = g.meta["val"]
        is_for_them = value.is_cuda and value.dim() == 4 and value.dtype.itemsize == 2
        if asked != [False, True, False] or groups != 1 or not is_for_them:
            continue
        with graph.inserting_before(node):
            last = [_in_order(graph, t, torch.channels_last) for t in (g, x)]
        node.args = (*last, *arguments[2:])
        for gradient in [user for user in node.users if user.args[1] == 1]:
            with graph.inserting_after(gradient):
                put_behind(gradient, _in_order(graph, gradient, torch.contiguous_format))


def _order_of(value: Tensor) -> torch.memory_format | None:
    """Returns the memory format of a tensor; None if it has none of those that convolutions know."""
    orders = [torch.contiguous_format]
    if value.dim() in (4, 5):
        orders.append(torch.channels_last if value.dim() == 4 else torch.channels_last_3d)
    return next((order for order in orders if value.is_contiguous(memory_format=order)), None)


def _in_order(graph: Graph, node: Node, order: torch.memory_format) -> Node:
    found = graph.call_function(_aten.clone.default, (node,), {"memory_format": order})
    found.meta["val"] = node.meta["val"].clone(memory_format=order)
    return found


def _as_convolution(graph: Graph, node: Node) -> Node:
    arguments: Any = node.args
    g, x, weight, _, stride, padding, dilation, transposed, _, groups, _ = arguments
    sizes = _sizes(x), _sizes(g), _sizes(weight)
    missing = [0] * len(sizes[0])
    if not transposed:  # inputs beyond the last window have no gradient
        geometry = (_for_each(of, len(missing)) for of in (stride, padding, dilation))
        missing = [
            size - ((out - 1) * step - 2 * pad + reach * (taps - 1) + 1)
            for size, out, taps, step, pad, reach in zip(*sizes, *geometry, strict=True)
        ]
    return _inserted(
        graph,
        _aten.convolution.default,
        g,
        weight,
        None,
        stride,
        padding,
        dilation,
        not transposed,
        missing,
        groups,
    )


def _for_each(values: Sequence[int], dims: int) -> Sequence[int]:
    """Repeats a single value, which stands for all dimensions."""
    return list(values) * dims if len(values) == 1 else values


def _share_padding(graph: Graph, written: set[int]) -> None:
    """Pads a tensor once for all products that read it: the compiler would write a copy for each.

    The gradient of logits needs it: its rows are as long as the vocabulary, often an odd number.
    """
    padded: dict[tuple[Node, int], Node] = {}
    for node in calls(graph, _pad):
        arguments: Any = node.args
        x, sides, *value = arguments
        whole = _with_all_rows(x)
        if len(sides) != 2 or sides[0] or sides[1] <= 0 or any(value):
            continue  # a negative number cuts off
        if whole.op == "placeholder" or storage(whole) in written:
            continue
        if (whole, sides[1]) not in padded:
            padded[whole, sides[1]] = _with_zeros(graph, whole, sides[1])
        with graph.inserting_before(node):
            shape = list(node.meta["val"].shape)
            view = _inserted(graph, _aten.view.default, padded[whole, sides[1]], shape)
            node.replace_all_uses_with(view)
    for node in calls(graph, _aten.mm.default):
        arguments = node.args
        rows, matrix = arguments
        for (whole, missing), longer in padded.items():
            if _with_all_rows(rows) is whole:
                count, length = rows.meta["val"].shape
                with graph.inserting_before(node):
                    left = _inserted(graph, _aten.view.default, longer, [count, length + missing])
                    right = _inserted(graph, _pad, matrix, [0, 0, 0, missing], 0.0)
                node.args = (left, right)
                break


def _with_zeros(graph: Graph, node: Node, missing: int) -> Node:
    """Appends columns of zeros by `cat`, not by padding: the tensor is then written in place.

    The compiler computes padding element by element, in twice the time for the gradient of logits.
    """
    value = node.meta["val"]
    with graph.inserting_after(node):
        zeros = graph.call_function(
            _aten.full.default,
            ([*value.shape[:-1], missing], 0.0),
            {"dtype": value.dtype, "device": value.device},
        )
    zeros.meta["val"] = value.new_zeros(*value.shape[:-1], missing)
    with graph.inserting_after(zeros):
        return _inserted(graph, _aten.cat.default, [node, zeros], -1)


def _add_biases_afterwards(graph: Graph, written: set[int]) -> None:
    """Adds biases on the CPU after the product, fused into the next pass over it.

    As a part of the product, a bias is first copied to every row of its result. It is added after the view:
    right after the product, the compiler would make it a part of the product again.
    """
    for node in calls(graph, _aten.addmm.default):
        arguments: Any = node.args
        bias, rows, matrix = arguments
        view = next(iter(node.users), None)
        is_all = len(node.users) == 1 and not node.kwargs
        if not is_all or view is None or view.target is not _aten.view.default:
            continue
        value, of_bias = node.meta["val"], bias.meta["val"]
        if value.device.type != "cpu" or of_bias.dim() != 1 or of_bias.dtype != value.dtype:
            continue
        if view.meta["val"].shape[-1] != value.shape[-1] or storage(bias) in written:
            continue
        with graph.inserting_before(node):
            product = _inserted(graph, _aten.mm.default, rows, matrix)
        node.replace_all_uses_with(product)
        with graph.inserting_after(view):
            put_behind(view, _inserted(graph, _aten.add.Tensor, view, bias))


def _write_to_kept_memory(graph: Graph) -> None:
    """Writes large products on the CPU to kept memory, where the compiler would map fresh pages.

    The compiler calls a library for products of matrices in any case. It fuses elementwise products into
    their readers, unless they are results themselves.
    """
    results = set(graph.output_node().all_input_nodes)
    for node in calls(graph, _aten.bmm.default):
        if is_large(node.meta["val"].shape, node.meta["val"]):
            node.target = torch.ops.pergrad.products.default
    for node in calls(graph, _aten.mul.Tensor):
        value, factors = node.meta["val"], node.all_input_nodes
        is_of_one_type = [f.meta["val"].dtype for f in factors] == [value.dtype] * 2
        if node in results and is_of_one_type and is_large(value.shape, value):
            node.target = torch.ops.pergrad.product.default


def _with_all_rows(node: Node) -> Node:
    """Follows a node back through views that keep the length of the rows."""
    views = (_aten.view.default, internals.unsafe_view)
    while node.target in views:
        (source, _) = node.args
        assert isinstance(source, Node)
        if source.meta["val"].shape[-1] != node.meta["val"].shape[-1]:
            break
        node = source
    return node


def _inserted(graph: Graph, target: Any, *arguments: Any) -> Node:
    """Inserts a call at the graph's current place, with the value that it gives."""
    node = graph.call_function(target, arguments)
    node.meta["val"] = target(*map_arg(arguments, lambda given: given.meta["val"]))
    return node


def _last(graph: Graph, *nodes: Any) -> Node:
    """Finds the node that comes last in the graph."""
    return next(node for node in reversed(graph.nodes) if node in nodes)


def _sizes(node: Node) -> Sequence[int]:
    """Returns the sizes of the spatial dimensions."""
    return node.meta["val"].shape[2:]
