"""Handles functions of weights and samples without a rule; each rung is exact and slower than the previous.

broadcast   the weight expanded to (n, *shape), for elementwise functions
vmap        the function mapped over the samples, its output compared with the plain one
masked VJP  one backward of the function per sample; needs only the layout of the output
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pergrad.engine.intercepting.weights import (
    Weight,
    graph_of_its_own,
    quiet_vmap,
    vjp_of_each,
)
from pergrad.engine.samples.layouts import Layout, Owners, Samples, samples_back, samples_first
from pergrad.engine.samples.proving import note
from pergrad.factors import Dense
from pergrad.runtime import internals
from pergrad.runtime.containers import parts_of, refilled
from pergrad.runtime.tolerances import largest, tolerance_of_rerun

__all__ = [
    "GraphRun",
    "MixedCall",
    "agrees_elsewhere",
    "by_broadcast",
    "by_masked_vjp",
    "by_vmap",
    "expanded",
    "refused",
    "run_under_autograd",
    "same_values",
    "valued",
    "with_strides_of",
]


class _Expand(torch.autograd.Function):
    """Expands a weight to (n, *shape), a tensor with samples, without storage of its own."""

    @staticmethod
    def forward(ctx: Any, weight: Weight, anchor: Tensor, operand: Tensor) -> Tensor:
        ctx.weight = weight
        return weight.value.unsqueeze(0).expand(weight.scope.count, *weight.value.shape)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        weight: Weight = ctx.weight
        ordinary = gradients.sum(0) if weight.keeps_gradient else None
        with internals.DisableTorchFunction():
            return None, weight.take(Dense(gradients)), ordinary


def expanded(weight: Weight) -> Tensor:
    """Returns the weight's value for each sample, (n, *shape); its gradient goes to the weight."""
    weight.uses.expect([weight])
    t: Tensor = _Expand.apply(weight, weight.anchor, weight.operand)
    note(t, weight.scope.samples(0))
    return t


class MixedCall:
    """Holds a call of a function on weights and samples, with flattened arguments."""

    def __init__(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        weight_of: Callable[[Tensor], Weight | None],
        layout_of: Callable[[Tensor], Layout],
    ) -> None:
        self.func = func
        self._given = args, kwargs
        self.leaves = parts_of(self._given)
        self.weights: dict[int, Weight] = {}  # by position among the leaves
        self.inputs: dict[int, Layout] = {}  # the other tensors
        for k, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                weight = weight_of(leaf)
                if weight is None:
                    self.inputs[k] = layout_of(leaf)
                else:
                    self.weights[k] = weight

    def arguments(self, tensors: dict[int, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with some tensors replaced."""
        filled = [tensors.get(k, leaf) for k, leaf in enumerate(self.leaves)]
        args, kwargs = refilled(self._given, filled)
        return args, kwargs

    def run(self, tensors: dict[int, Tensor]) -> Any:
        """Runs the function with some tensors replaced."""
        args, kwargs = self.arguments(tensors)
        return self.func(*args, **kwargs)


def by_broadcast(call: MixedCall) -> Tensor | None:
    """Runs an elementwise function of a weight and a tensor; None if the weight varies along the samples.

    None too for a weight without dimensions and of another type: expanded, it would promote the result.
    """
    if len(call.weights) != 1 or len(call.inputs) != 1:
        return None
    ((k, weight),) = call.weights.items()
    ((i, layout),) = call.inputs.items()
    x = call.leaves[i]
    if not isinstance(layout, Samples) or layout.pre != 1 or layout.post != 1:
        return None
    is_alike = weight.value.dtype == x.dtype and weight.value.device == x.device
    if not weight.value.dim() and not is_alike:
        return None
    shape = [1] * (x.dim() - weight.value.dim()) + list(weight.value.shape)
    if len(shape) > x.dim() or shape[layout.dim] != 1:
        return None
    shape[layout.dim] = layout.scope.count
    w = expanded(weight).view(shape) if layout.dim == 0 else _moved(expanded(weight), layout, shape)
    return call.run({k: w})


def _moved(w: Tensor, layout: Samples, shape: Sequence[int]) -> Tensor:
    """Reshapes (n, *weight) to `shape`, whose sample dimension is not the first."""
    rest = [size for d, size in enumerate(shape) if d != layout.dim]
    return w.reshape(shape[layout.dim], *rest).movedim(0, layout.dim)


def by_vmap(
    call: MixedCall, layouts: Sequence[Layout], places: Sequence[int]
) -> list[Tensor] | None:
    """Maps the function over the samples and returns results with `layouts`; None if vmap cannot.

    `places` are the numbers of these among all results.
    """
    return _by_vmap(call, layouts, places, {k: expanded(w) for k, w in call.weights.items()})


def _by_vmap(
    call: MixedCall,
    layouts: Sequence[Layout],
    places: Sequence[int],
    weights: Mapping[int, Tensor],  # (n, *shape), by position
) -> list[Tensor] | None:
    if not all(isinstance(la, Samples) for la in layouts):
        return None
    if any(isinstance(la, Owners) for la in call.inputs.values()):
        return None
    tensors: list[Tensor] = []
    dims: list[int | None] = []
    slots = [*call.weights, *call.inputs]
    for k in slots:
        layout = call.inputs.get(k)
        if k in weights:
            tensors.append(weights[k])
        elif isinstance(layout, Samples):
            tensors.append(samples_first(call.leaves[k], layout))
        else:
            tensors.append(call.leaves[k])
        dims.append(0 if k in weights or isinstance(layout, Samples) else None)

    def one(*given: Tensor) -> list[Any]:
        return parts_of(call.run(dict(zip(slots, given, strict=True))))

    try:
        with quiet_vmap():
            count = layouts[0].scope.count
            mapped: list[Tensor] = internals.vmapped(one, tensors, dims, count)
        return [
            samples_back(mapped[place], la)
            for place, la in zip(places, layouts, strict=True)
            if isinstance(la, Samples)
        ]
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None


def agrees_elsewhere(call: MixedCall, layouts: Sequence[Layout], places: Sequence[int]) -> bool:
    """Whether vmap gives the function's values for other weights, whose elements all differ.

    Mapped over the samples, a function may read another row of a weight than the plain call does, as `gather`
    does: no value shows it while all rows are equal, as those of a new parameter often are.
    """
    count = layouts[0].scope.count
    with torch.no_grad():
        try:
            other = {k: w.value + _ramp(w.value) for k, w in call.weights.items()}
            each = {k: w.unsqueeze(0).expand(count, *w.shape) for k, w in other.items()}
            flat = parts_of(call.run(other))
        except (RuntimeError, ValueError, IndexError):  # the function refuses these values
            return False
        found = _by_vmap(call, layouts, places, each)
        return found is not None and same_values(found, [flat[place] for place in places])


def _ramp(t: Tensor) -> Tensor:
    """Returns small numbers that all differ, without a draw from the random state."""
    steps = torch.arange(1, t.numel() + 1, device=t.device, dtype=torch.float32)
    return (0.1 * steps / (t.numel() + 1)).to(t.dtype).view(t.shape)


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, error: Exception, anchor: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.error = error
        return tuple(t.detach() for t in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        raise copy.copy(ctx.error)  # a traceback would hold this node, and the node the error


def refused(error: Exception, anchor: Tensor, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns outputs that raise `error` in a backward: the call has no per-sample gradients."""
    return list(_Refuse.apply(error, anchor, *outputs))


class _Valued(torch.autograd.Function):
    """Gives results of another way the values of the plain function, bit for bit."""

    @staticmethod
    def forward(ctx: Any, count: int, *plain_and_found: Tensor) -> tuple[Tensor, ...]:
        ctx.count = count
        ctx.set_materialize_grads(False)
        return tuple(t.detach() for t in plain_and_found[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *[None] * ctx.count, *gradients


def valued(
    found: Sequence[Tensor], plain: Sequence[Tensor], layouts: Sequence[Layout]
) -> list[Tensor]:
    """Returns the results of the plain function, with the graph of those that were found otherwise."""
    results = list(_Valued.apply(len(plain), *[t.detach() for t in plain], *found))
    for t, layout in zip(results, layouts, strict=True):
        note(t, layout)
    return results


def same_values(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether two lists of results are equal up to rounding."""
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not (a.is_floating_point() or a.is_complex()):
            if not torch.equal(a, b):
                return False
            continue
        tolerance = tolerance_of_rerun(a.dtype)
        size = largest(b.where(b.isfinite(), 0))
        if not torch.allclose(a, b, rtol=tolerance, atol=tolerance * size, equal_nan=True):
            return False
    return True


@dataclass
class GraphRun:
    """Holds one run of a function under autograd, whose graph is apart from that of the model."""

    weights: list[Weight]
    leaves: list[Tensor]  # the weights, as the function got them
    given: list[Tensor]  # the other tensors of the model
    inputs: list[Tensor]  # these, as the function got them
    input_layouts: list[Layout]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]  # all of them
    result: Any  # as the function returned it
    is_opaque: bool  # a function of the user, whose backward may not be batched


def run_under_autograd(call: MixedCall, *, keeps_weights: bool = False) -> GraphRun:
    """Runs the function once, in a graph of its own.

    With `keeps_weights` it gets the weights themselves and not copies: the backward of an autograd.Function
    may differentiate by them.
    """
    weights = {
        k: call.leaves[k] if keeps_weights else w.value.detach().requires_grad_()
        for k, w in call.weights.items()
    }
    inputs = {k: call.leaves[k].detach() for k in call.inputs}
    for k, t in inputs.items():
        t.requires_grad_(call.leaves[k].requires_grad)
    with torch.enable_grad(), graph_of_its_own([*weights.values(), *inputs.values()]):
        args, kwargs = call.arguments({**weights, **inputs})
        result = call.func(*args, **kwargs)
    return GraphRun(
        list(call.weights.values()),
        list(weights.values()),
        [call.leaves[k] for k in call.inputs],
        list(inputs.values()),
        list(call.inputs.values()),
        (args, kwargs),
        result,
        keeps_weights,
    )


class _MaskedVjp(torch.autograd.Function):
    """G_n is the VJP of y = f(x, W) at the output gradient with all rows but sample n's set to zero."""

    @staticmethod
    def forward(
        ctx: Any,
        run: GraphRun,
        outputs: Sequence[Tensor],
        layouts: Sequence[Layout],
        *operands_anchors_and_given: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.run, ctx.outputs, ctx.layouts = run, outputs, layouts
        ctx.set_materialize_grads(False)
        return tuple(t.detach() for t in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        run: GraphRun = ctx.run
        reached = [
            (t, g, layout)
            for t, g, layout in zip(ctx.outputs, gradients, ctx.layouts, strict=True)
            if g is not None and t.requires_grad
        ]
        ordinary: list[Tensor | None] = [None] * len(run.weights)
        of_weights: list[Tensor | None] = [None] * len(run.weights)
        of_inputs: list[Tensor | None] = [None] * len(run.inputs)
        if reached:
            ys, gs = [t for t, _, _ in reached], [g for _, g, _ in reached]
            wanted = [t for t in run.inputs if t.requires_grad]
            scope = run.weights[0].scope
            is_proof = scope.is_pulling_back
            with internals.DisableTorchFunction(), scope.pulling_back(may_reach_weights=True):
                flow = iter(_gradients(ys, wanted, gs))
                of_inputs = [next(flow) if t.requires_grad else None for t in run.inputs]
                if is_proof:
                    return None, None, None, *ordinary, *of_weights, *of_inputs
                if run.weights[0].keeps_gradient:
                    ordinary = list(_gradients(ys, run.leaves, gs))
                each = [_of_each_sample(g, layout) for _, g, layout in reached]
                found = vjp_of_each(ys, each, run.leaves, scope.count, may_batch=not run.is_opaque)
                of_weights = [
                    None if g is None else w.take(Dense(g))
                    for w, g in zip(run.weights, found, strict=True)
                ]
        return None, None, None, *ordinary, *of_weights, *of_inputs


def _gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    if not inputs:
        return ()
    return torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)


def _of_each_sample(gradient: Tensor, layout: Layout) -> Tensor:
    """Returns the gradient with the rows of all other samples set to zero, (n, *gradient.shape)."""
    assert isinstance(layout, Samples | Owners)
    owner = layout.owner_of_each(gradient.device)
    sample = torch.arange(layout.scope.count, device=gradient.device)
    shape = [-1 if d == layout.dim else 1 for d in range(gradient.dim())]
    mask = (sample.unsqueeze(1) == owner).view(len(sample), *shape)
    return gradient.unsqueeze(0) * mask


def by_masked_vjp(
    run: GraphRun, outputs: Sequence[Tensor], layouts: Sequence[Layout]
) -> list[Tensor]:
    """Returns the outputs of a run, whose backward computes one VJP per sample."""
    run.weights[0].uses.expect(run.weights)
    behind = [*(w.operand for w in run.weights), *(w.anchor for w in run.weights), *run.given]
    made = list(_MaskedVjp.apply(run, tuple(outputs), tuple(layouts), *behind))
    for t, layout in zip(made, layouts, strict=True):
        note(t, layout)
    return made


def with_strides_of(t: Tensor, strides: Sequence[int]) -> Tensor:
    """Returns `t` in the order of memory that these strides give.

    A later `view` needs the strides of the plain result, and random functions draw in the order of memory.
    """
    if t.stride() == tuple(strides) or not t.numel():
        return t
    order = sorted(range(t.dim()), key=strides.__getitem__, reverse=True)
    back = [order.index(d) for d in range(t.dim())]
    return t.permute(order).contiguous().permute(back)
