"""Has sums over the positions of images read channels last, as the compiler lays out convolutions."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from pergrad.engine.compiling.passes.graph import Operator, calls, is_on_gpu, storage
from pergrad.runtime import internals

__all__ = ["give_sums_channels_last"]

_aten = torch.ops.aten
_SUMS = {"pergrad::column_squared_norms", "pergrad::column_sums"}
_VIEWS = {
    _aten.view.default,
    _aten.permute.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.detach.default,
}


def give_sums_channels_last(graph: Graph, written: set[int]) -> None:
    """Gives the kernels of column sums images channels last on a GPU, in a graph with convolutions.

    The compiler gives channels last to convolutions alone. Viewed as positions and columns, an output
    gradient would be written a second time for the kernel, in the order of the trace, by scattered writes.
    Later views of such an image must hold for other strides (`guard_strides`).
    """
    if not calls(graph, _aten.convolution.default):
        return
    found: dict[Node, Node] = {}
    for node in [n for n in graph.nodes if _is_sum(n)]:
        gs, xs, *others = node.args
        moved = [[_by_position(graph, t, written, found) for t in some] for some in (gs, xs)]
        node.args = (*moved, *others)


def _is_sum(node: Node) -> bool:
    return isinstance(node.target, Operator) and node.target.name() in _SUMS


def _by_position(graph: Graph, node: Node, written: set[int], found: dict[Node, Node]) -> Node:
    """Returns a view, (n, t, c), of the image behind `node` channels last; `node` if that is no image."""
    image = node
    while _is_view(image):
        image = image.all_input_nodes[0]
    if not _is_image(image, node) or storage(image) in written:
        return node
    if image not in found:
        found[image] = _viewed_by_position(graph, image)
    return found[image]


def _is_image(image: Node, positions: Node) -> bool:
    """Whether `positions` views all of an image, channels first, with its channels as columns."""
    value, viewed = image.meta["val"], positions.meta["val"]
    if image.op != "call_function" or value.dim() != 4 or not is_on_gpu(image):
        return False
    n, c, h, w = value.shape
    strides = (c * h * w, 1, h * w)
    is_flat = viewed.shape == (n, h * w, c) and viewed.stride() == strides
    return bool(is_flat and value.is_contiguous() and c > 1 and h * w > 1)


def _viewed_by_position(graph: Graph, image: Node) -> Node:
    n, c, h, w = image.meta["val"].shape
    last = image
    if image.target is not _aten.convolution.default:  # whose layout the compiler chooses
        last = _cloned(graph, image)
    with graph.inserting_after(last):
        turned = graph.call_function(_aten.permute.default, (last, [0, 2, 3, 1]))
    turned.meta["val"] = last.meta["val"].permute(0, 2, 3, 1)
    with graph.inserting_after(turned):
        flat = graph.call_function(_aten.reshape.default, (turned, [n, h * w, c]))
    flat.meta["val"] = turned.meta["val"].reshape(n, h * w, c)
    return flat


def _cloned(graph: Graph, image: Node) -> Node:
    """Clones the image channels last for all readers but the results."""
    order = torch.channels_last
    with graph.inserting_after(image):
        last = graph.call_function(_aten.clone.default, (image,), {"memory_format": order})
    last.meta["val"] = image.meta["val"].clone(memory_format=order)
    image.replace_all_uses_with(last, lambda user: user is not last and not _is_result(user))
    return last


def _is_result(node: Node) -> bool:
    """Whether the strides must be those of the trace, as in a view that the step returns."""
    if node.op == "output" or node.target is internals.unsafe_view:
        return True
    return _is_view(node) and any(map(_is_result, node.users))


def _is_view(node: Node) -> bool:
    return node.target in _VIEWS or node.target is internals.unsafe_view
