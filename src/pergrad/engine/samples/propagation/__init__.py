"""Propagates layouts through torch functions, one family of functions per file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pergrad.engine.samples.known_indices import known_index
from pergrad.engine.samples.layouts import (
    Constant,
    Counted,
    Layout,
    Lost,
    Owners,
    Samples,
    Unfinished,
)
from pergrad.engine.samples.origins import SUM
from pergrad.engine.samples.propagation import (
    batchwise,
    contracting,
    declared,
    elementwise,
    indexing,
    joining,
    reducing,
    shaping,
    writing,
)
from pergrad.engine.samples.propagation.creating import layout_by_sizes, sizes_in
from pergrad.engine.samples.propagation.declared import declared_samples
from pergrad.engine.samples.propagation.elementwise import ELEMENTWISE
from pergrad.engine.samples.propagation.pairing import layout_of_pairs
from pergrad.engine.samples.propagation.probes.probing import layouts_by_probe, proved_apart
from pergrad.engine.samples.propagation.table import (
    Call,
    Handler,
    handler_of,
    is_by_value,
    is_own,
    is_trusted,
    mixed_samples,
    name_of,
    refuse_gradients,
    refuse_lost,
    refuse_mixed_samples,
    refuse_unknown_samples,
    tensors_in,
    unknown_samples,
)
from pergrad.engine.samples.propagation.totals import (
    after_counted,
    divides_by_total,
    origin_after,
    origin_of_mean,
)
from pergrad.engine.samples.propagation.writing import layout_after_unfinished, layout_after_write
from pergrad.rules.samples import DECLARED
from pergrad.runtime import internals, is_traced
from pergrad.runtime.containers import map_parts

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
    "layout_of_write",
    "layouts_of_outputs",
    "mixed_samples",
    "name_of",
    "reducing",
    "refuse_gradients",
    "refuse_lost",
    "refuse_mixed_samples",
    "refuse_unknown_samples",
    "shaping",
    "sizes_in",
    "tensors_in",
    "unknown_samples",
    "writing",
]


def layouts_of_outputs(call: Call) -> list[Layout]:
    """Returns the layout of every output of a call, from the layouts of its arguments.

    A handler may find that samples meet although the values keep them apart, as a block-diagonal matrix does:
    the graph of the call has the last word.
    """
    pairs = layout_of_pairs(call) if call.scope.known else None
    if pairs is not None:
        return [pairs] * len(call.outputs)
    found = _found(call)
    if call.scope.count > 1 and any(isinstance(la, Lost) and la.is_fatal for la in found):
        proved = proved_apart(call)
        call.is_overruled = call.is_overruled or proved is not None
        return proved or found
    return found


def _found(call: Call) -> list[Layout]:
    if call.has_scalars:
        is_lost = any(isinstance(layout, Lost) for layout in call.layouts)
        if is_lost or (call.of_one is None and call.name not in _JOINING):
            call = call.without_scalars()
    for t, layout in zip(call.tensors, call.layouts, strict=True):
        if isinstance(layout, Lost) and t.requires_grad:
            if isinstance(layout, Unfinished):
                finished = layout_after_unfinished(call)
                if finished is not None:
                    return [finished] * len(call.outputs)
            if layout.is_fatal:
                return [layout] * len(call.outputs)
            if not _may_mix_samples(call, layout):
                return [_after_linear(call, layout)] * len(call.outputs)
            reason = f"uses a result without separate samples ({layout.reason})"
            return [call.mixed(reason)] * len(call.outputs)
    if not call.has_samples:
        if any(isinstance(layout, Counted) for layout in call.layouts):
            return [after_counted(call) or call.scope.constant()] * len(call.outputs)
        return [declared_samples(call) or layout_by_sizes(call)] * len(call.outputs)
    one = call.of_one
    if one is not None:
        is_data = not call.flows
        return [
            call.scope.constant() if is_data and not t.dim() else one.of_one(t)
            for t in call.outputs
        ]
    handler = handler_of(call.func)
    found = None
    if handler is not None:
        moves_rows = handler.__module__ in _MOVING and is_traced(call.output)
        found = _handled_in_trace(handler, call) if moves_rows else handler(call)
    if found is None:
        return layouts_by_probe(call)
    is_fatal = isinstance(found, Lost) and found.is_fatal
    if call.flows and not is_fatal and call.func not in DECLARED:
        is_open = isinstance(found, Constant) or not call.is_accounted_for
        if is_open:
            proved = layouts_by_probe(call)
            call.is_overruled = isinstance(found, Samples | Owners) and found not in proved
            return proved
    layouts: Sequence[Layout] = (
        found if isinstance(found, list | tuple) else [found] * len(call.outputs)  # type: ignore[list-item]
    )
    return [
        layout if _matches_shape(layout, t) else call.unknown("moves samples in an unknown way")
        for t, layout in zip(call.outputs, layouts, strict=True)
    ]


# Modules whose handlers look at owners of rows and at indices, and compute nothing that belongs to the step.
_MOVING = frozenset(module.__name__ for module in (indexing, joining, shaping))


def _handled_in_trace(handler: Handler, call: Call) -> Any:
    """Runs a handler outside of the trace: owners of rows have values there, and known indices, too."""
    known = {id(t): values for t in call.tensors if (values := known_index(t)) is not None}
    if any(map(_is_traced_layout, call.layouts)):
        return handler(call)
    copy = call
    with internals.outside_of_trace():
        if known:

            def valued(value: Any) -> Any:
                return known.get(id(value), value) if isinstance(value, Tensor) else value

            args, kwargs, tensors = map_parts(valued, (call.args, call.kwargs, call.tensors))
            copy = Call(
                call.scope,
                call.func,
                args,
                kwargs,
                call.outputs,
                tensors,
                call.layouts,
                flows=call.flows,
                hints=call.hints,
            )
        found = handler(copy)
    if any(map(_is_traced_layout, found if isinstance(found, list | tuple) else [found])):
        return handler(call)  # whose rows they are depends on the inputs, and is part of the graph
    if copy is not call:
        call.take_answer_of(copy)
    return found


def layout_of_write(call: Call) -> Layout:
    """Returns the layout of a tensor after a write to a part of it."""
    if not is_traced(call.output):
        return layout_after_write(call)
    found: Layout = _handled_in_trace(layout_after_write, call)
    return found


def _is_traced_layout(layout: Any) -> bool:
    return isinstance(layout, Owners) and is_traced(layout.owner)


def _after_linear(call: Call, lost: Lost) -> Layout:
    """Returns the layout after a function of lost samples that combines them in no other way than by sums."""
    if lost.why == "total":
        return call.scope.total(lost.reason, origin_after(call)) if call.flows else lost
    if call.name not in _SUMS:
        # Its rows have moved, and their owners are not those of these rows any more.
        return call.scope.lost(lost.reason) if isinstance(lost, Unfinished) else lost
    return call.total(SUM if call.name == "sum" else origin_of_mean(call, call.output, lost))


_JOINING = frozenset(["stack"])  # of scalars of several samples
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
    return call.name not in _LINEAR or is_product or divides_by_total(call)


def _matches_shape(layout: Layout, t: Tensor) -> bool:
    """Whether the tensor's shape allows that layout: a wrong layout would give wrong gradients."""
    if not isinstance(layout, Samples | Owners):
        return True
    if not t.dim():
        return isinstance(layout, Owners) and layout.is_one
    return layout.dim < t.dim() and t.shape[layout.dim] == layout.size
