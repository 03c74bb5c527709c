"""Propagates layouts through torch functions, one family of functions per file."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pergrad.engine.samples.layouts import Constant, Layout, Lost, Owners, Samples
from pergrad.engine.samples.propagation import (
    batchwise,
    contracting,
    declared,
    elementwise,
    indexing,
    joining,
    reducing,
    shaping,
)
from pergrad.engine.samples.propagation.creating import layout_by_sizes, sizes_in
from pergrad.engine.samples.propagation.declared import declared_samples
from pergrad.engine.samples.propagation.elementwise import ELEMENTWISE
from pergrad.engine.samples.propagation.probing import layouts_by_probe
from pergrad.engine.samples.propagation.table import (
    Call,
    handler_of,
    is_by_value,
    is_own,
    is_trusted,
    mixed_samples,
    name_of,
    refuse_gradients,
    refuse_mixed_samples,
    refuse_unknown_samples,
    tensors_in,
    unknown_samples,
)
from pergrad.rules.samples import DECLARED

__all__ = [
    "ELEMENTWISE",
    "Call",
    "batchwise",
    "contracting",
    "declared",
    "elementwise",
    "handler_of",
    "indexing",
    "is_by_value",
    "is_own",
    "is_trusted",
    "joining",
    "layouts_of_outputs",
    "mixed_samples",
    "name_of",
    "reducing",
    "refuse_gradients",
    "refuse_mixed_samples",
    "refuse_unknown_samples",
    "shaping",
    "sizes_in",
    "tensors_in",
    "unknown_samples",
]


def layouts_of_outputs(call: Call) -> list[Layout]:
    """Returns the layout of every output of a call, from the layouts of its arguments."""
    for t, layout in zip(call.tensors, call.layouts, strict=True):
        if isinstance(layout, Lost) and t.requires_grad:
            if layout.why in ("mixed", "unknown"):
                return [layout] * len(call.outputs)
            if not _may_mix_samples(call, layout):
                is_summed = layout.why == "cut" and call.name in _SUMS
                return [call.total() if is_summed else layout] * len(call.outputs)
            reason = f"uses a result without separate samples ({layout.reason})"
            return [call.mixed(reason)] * len(call.outputs)
    if not call.has_samples:
        return [declared_samples(call) or layout_by_sizes(call)] * len(call.outputs)
    one = call.of_one
    if one is not None:
        return [one.of_one(t.shape[0]) if t.dim() else call.total() for t in call.outputs]
    handler = handler_of(call.func)
    found = handler(call) if handler is not None else None
    if found is None:
        return layouts_by_probe(call)
    is_fatal = isinstance(found, Lost) and found.why in ("mixed", "unknown")
    if call.flows and not is_fatal and call.func not in DECLARED:
        is_open = isinstance(found, Constant) or not call.is_accounted_for
        if is_open:
            return layouts_by_probe(call)
    layouts: Sequence[Layout] = (
        found if isinstance(found, list | tuple) else [found] * len(call.outputs)  # type: ignore[list-item]
    )
    return [
        layout if _matches_shape(layout, t) else call.unknown("moves samples in an unknown way")
        for t, layout in zip(call.outputs, layouts, strict=True)
    ]


_SUMS = frozenset(["sum", "mean"])
# Functions of a sum over the samples whose result is still a sum over the samples.
_LINEAR = frozenset(
    """
    add sub mul div truediv true_divide neg to float double half bfloat16 type type_as sum mean clone
    detach view view_as reshape squeeze unsqueeze flatten stack cat getitem expand contiguous item tolist
    requires_grad data cpu cuda dot
    """.split()
)
# Functions that move or sum elements and combine none of them in any other way.
_RESHAPES = frozenset(
    """
    view view_as reshape flatten unflatten squeeze unsqueeze ravel transpose permute t T mT movedim getitem
    select narrow chunk split unbind expand contiguous sum mean
    """.split()
)


def _may_mix_samples(call: Call, lost: Lost) -> bool:
    """Whether a call on a tensor that has lost its samples may make samples depend on each other."""
    if call.has_samples:
        return True
    if lost.why != "total":
        alone = len(call.tensors) == 1
        return not alone or call.name not in ELEMENTWISE | _RESHAPES
    totals = sum(t.requires_grad and isinstance(call.layout(t), Lost) for t in call.tensors)
    is_product = call.name in ("mul", "div", "truediv", "true_divide", "dot") and totals > 1
    return call.name not in _LINEAR or is_product


def _matches_shape(layout: Layout, t: Tensor) -> bool:
    """Whether the tensor's shape allows that layout: a wrong layout would give wrong gradients."""
    if not isinstance(layout, Samples | Owners):
        return True
    return layout.dim < t.dim() and t.shape[layout.dim] == layout.size
