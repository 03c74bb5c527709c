"""How samples move through torch functions, one family a file."""

from __future__ import annotations

from torch import Tensor

from pergrad.engine.layouts import Layout, Lost, Owners, Samples
from pergrad.engine.propagation import (
    batchwise,
    contracting,
    elementwise,
    indexing,
    joining,
    reducing,
    shaping,
)
from pergrad.engine.propagation.creating import layout_by_sizes, sizes_in
from pergrad.engine.propagation.elementwise import ELEMENTWISE
from pergrad.engine.propagation.probing import layouts_by_probe
from pergrad.engine.propagation.table import HANDLERS, Call, name_of, tensors_in

__all__ = [
    "ELEMENTWISE",
    "Call",
    "batchwise",
    "contracting",
    "elementwise",
    "indexing",
    "joining",
    "layouts_of_outputs",
    "name_of",
    "reducing",
    "shaping",
    "sizes_in",
    "tensors_in",
]


def layouts_of_outputs(call: Call) -> list[Layout]:
    """The layout of every output of a call, from the layouts of its arguments."""
    lost = next(
        (la for t in call.tensors() if t.requires_grad and isinstance(la := call.layout(t), Lost)),
        None,
    )
    if lost is not None:
        if _interferes(call, lost):
            return [call.mixed()] * len(call.outputs)
        return [lost] * len(call.outputs)
    if not call.carriers():
        return [layout_by_sizes(call)] * len(call.outputs)
    handler = HANDLERS.get(call.name)
    found = handler(call) if handler is not None else None
    if found is None:
        return layouts_by_probe(call)
    layouts: list[Layout] = (
        [found] * len(call.outputs) if isinstance(found, Layout) else list(found)
    )
    return [
        layout if _fits(layout, t) else call.lost("moves samples in a way that is not known")
        for t, layout in zip(call.outputs, layouts, strict=True)
    ]


_LINEAR = frozenset(
    """
    add sub mul div truediv true_divide neg to float double half bfloat16 type type_as sum mean clone
    detach view reshape squeeze unsqueeze flatten stack cat getitem expand contiguous item tolist
    requires_grad data cpu cuda dot
    """.split()
)


def _interferes(call: Call, lost: Lost) -> bool:
    """Whether what has lost its samples comes back to them, or is a total put into something not linear."""
    if call.carriers():
        return True
    if not lost.is_total:
        return False
    totals = sum(t.requires_grad and isinstance(call.layout(t), Lost) for t in call.tensors())
    is_product = call.name in ("mul", "div", "truediv", "true_divide", "dot") and totals > 1
    return call.name not in _LINEAR or is_product


def _fits(layout: Layout, t: Tensor) -> bool:
    """Whether the tensor can have that layout at all: a safeguard, since a wrong one is a wrong number."""
    if not isinstance(layout, Samples | Owners):
        return True
    return layout.dim < t.dim() and t.shape[layout.dim] == layout.size
