"""Taps: hand the gradient of a function's output to the rule of the weights that it used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from pergrad.engine.intercepting.plans import Plan
from pergrad.engine.intercepting.weights import Root, Weight
from pergrad.engine.samples.layouts import ROWS, Layout, Owners, samples_first
from pergrad.errors import PergradError, ScopeError, UnsupportedFunctionError
from pergrad.factors import Dense, owned
from pergrad.runtime import internals, without_autocast

__all__ = ["Use", "tap"]

_NOTHING: Mapping[str, Tensor] = {}
_anchor = attrgetter("anchor")


@dataclass(slots=True)
class Use:
    """One call of a function on recorded weights: all that its rule needs but the kept tensors."""

    plan: Plan
    output_layouts: tuple[Layout, ...]
    weights: list[Weight]
    flows_on: bool  # whether a gradient flows from its weights to others, which cannot wait

    def receive(
        self,
        grads: tuple[Tensor | None, ...],
        kept: tuple[Tensor, ...],
        versions: list[int],
        results: Mapping[str, Tensor] = _NOTHING,
        shape: torch.Size | None = None,
    ) -> None:
        """Runs the rule on the output gradients, or enqueues that; the kept tensors must not change."""
        first = self.weights[0]
        sink = first.sink
        if not sink.queue.defers_rules:
            self._run(grads, kept, versions, results, shape)
        elif sink.expects(first.name):
            held = sum([t.nbytes for t in (*grads, *kept) if t is not None])
            work = partial(self._run, grads, kept, versions, results, shape)
            sink.queue.put(work, held, in_this_stream=True)

    def _run(
        self,
        grads: tuple[Tensor | None, ...],
        kept: tuple[Tensor, ...],
        versions: list[int],
        results: Mapping[str, Tensor],
        shape: torch.Size | None,
    ) -> None:
        if versions != list(map(internals.version_of, kept)):
            raise PergradError(
                f"an argument of `{self.plan.function.__name__}` was changed in place after the "
                "call, and the gradients need it as it was: use the out-of-place form there"
            )
        if shape is not None and grads[0] is not None:
            grads = (grads[0].reshape(shape),)
        self.give_factors(grads, kept, results)

    def give_factors(
        self,
        grads: tuple[Tensor | None, ...],
        kept: tuple[Tensor, ...],
        results: Mapping[str, Tensor] = _NOTHING,
    ) -> list[Tensor | None]:
        """Runs the rule and gives every weight its factor; returns what flows on to their anchors."""
        if internals.is_any_autocast_enabled():
            with without_autocast(self.weights[0].value.device):
                return self._give_factors(grads, kept, results)
        return self._give_factors(grads, kept, results)

    def _give_factors(
        self,
        grads: tuple[Tensor | None, ...],
        kept: tuple[Tensor, ...],
        results: Mapping[str, Tensor],
    ) -> list[Tensor | None]:
        plan = self.plan
        arguments = {**plan.arguments, **results}
        by_owner: Owners | None = None
        outputs: Sequence[Tensor | None] = grads
        if plan.is_all_in_front or (plan.has_rows_in_front and self._gives_rows_in_front(grads)):
            arguments.update(zip(plan.kept, kept, strict=True))
        else:
            by_owner = self._owners()
            for name, t in zip(plan.kept, kept, strict=True):
                arguments[name] = _rows(t, plan.layouts.get(name), by_owner)
            outputs = []
            for g, layout in zip(grads, self.output_layouts, strict=True):
                outputs.append(None if g is None else _rows(g, layout, by_owner))
        gradients = plan.rule.gradients(outputs[0] if len(outputs) == 1 else outputs, **arguments)
        flow: list[Tensor | None] = []
        for argument, weight in zip(plan.weights, self.weights, strict=True):
            found = gradients.get(argument)
            if found is None:
                raise self._gives_none(argument, weight.name, gradients)
            if callable(found):
                found = found()
            factor = Dense(found) if isinstance(found, Tensor) else found
            if by_owner is not None:
                factor = owned(factor, by_owner.owner, by_owner.scope.count)
            if type(weight) is Root:  # as `Root.take` does, for most weights
                weight.sink.add(weight.name, factor)
                flow.append(None)
            else:
                flow.append(weight.take(factor))
        return flow

    def _owners(self) -> Owners | None:
        """Of the rows, where arguments or outputs are told by them; one sample owns all."""
        for layout in (self.plan.by_owner, *self.output_layouts):
            if isinstance(layout, Owners):
                return layout if layout.scope.count > 1 else None
        return None

    def _gives_rows_in_front(self, grads: tuple[Tensor | None, ...]) -> bool:
        """Whether the outputs too are as they should be, but for a dimension of size 1."""
        for layout, grad in zip(self.output_layouts, grads, strict=True):
            if layout.key != ROWS or grad is None or grad.dim() <= 2:
                return False
        return True

    def _gives_none(
        self, argument: str, parameter: str, gradients: Mapping[str, Any]
    ) -> PergradError:
        return PergradError(
            f"the rule of `{self.plan.function.__name__}` gives no gradient for its argument "
            f"{argument!r}, which is parameter {parameter!r}; it gives {sorted(gradients)}"
        )


def _rows(t: Tensor, layout: Layout | None, by_owner: Owners | None) -> Tensor:
    """The tensor with a sample axis in front; with one row a slice where rows have owners."""
    if layout is None or not layout.carries:
        return t
    if layout.scope.count == 1:  # whatever the dimension, all of it belongs to the one sample
        return t.unsqueeze(0)
    if layout.key == ROWS and by_owner is None:  # as `samples_first` does, for most tensors
        return t.unsqueeze(1)
    return samples_first(t, layout if by_owner is None else by_owner.at(layout.dim))  # type: ignore[arg-type,union-attr]


def _second_derivatives() -> UnsupportedFunctionError:
    return UnsupportedFunctionError(
        "a backward with create_graph=True inside of a recording (a gradient penalty?): the second "
        "derivative of a recorded weight would be lost; compute that term outside of it"
    )


class _Tap(torch.autograd.Function):
    """A node of its own behind the outputs; the weights' anchors make it one where nothing else does."""

    @staticmethod
    def forward(
        ctx: Any, use: Use, kept: tuple[Tensor, ...], *anchors_and_outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.use = use
        outputs = anchors_and_outputs[len(use.weights) :]
        ctx.save_for_backward(*kept)  # not on ctx: checkpointing must see them
        ctx.set_materialize_grads(False)
        return tuple(map(Tensor.detach, outputs))  # no view: in-place operations may follow

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors  # before the switch: it may run a checkpoint's recomputation
        use: Use = ctx.use
        flow: list[Tensor | None] = [None] * len(use.weights)
        if torch.is_grad_enabled():
            raise _second_derivatives()
        for g in grads:
            if g is not None:
                break
        else:
            return None, None, *flow, *grads
        with internals.DisableTorchFunction():  # the backward itself runs without gradients
            if use.flows_on:
                flow = use.give_factors(grads, kept)
            else:
                use.receive(grads, kept, list(map(internals.version_of, kept)))
        return None, None, *flow, *grads


class _Hook:
    """The same on a node that is there anyway, which takes a third of a tap's time.

    What autograd does for saved tensors is done here: they are let go once used, and may not have
    changed meanwhile.
    """

    __slots__ = ("_kept", "_place", "_results", "_shape", "_use", "_versions")

    def __init__(
        self,
        use: Use,
        kept: tuple[Tensor, ...],
        results: Mapping[str, Tensor],
        place: int,
        shape: torch.Size | None,
    ) -> None:
        self._use = use
        self._kept: tuple[Tensor, ...] | None = kept
        self._results = results  # nobody else can write to them
        self._versions = list(map(internals.version_of, kept))
        self._place = place  # of what the function made among the outputs of the node
        self._shape = shape  # that the function gave it, where that is another

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        grad = grads[self._place]
        if torch.is_grad_enabled():
            raise _second_derivatives()
        if grad is None:
            return
        kept, results = self._kept, self._results
        if kept is None:
            raise ScopeError(
                "backward through a recorded graph a second time: what it needs is freed; pass "
                "retain_graph=True to the first backward"
            )
        if not internals.keeps_graph():
            self._kept, self._results = None, _NOTHING
        with internals.DisableTorchFunction():
            self._use.receive((grad,), kept, self._versions, results, self._shape)


def _made(use: Use, inputs: Sequence[Tensor], output: Tensor) -> Tensor | None:
    """What the function has made, if its node belongs to this use alone and stays in the graph.

    The node of a view does not stay, when the view is written to in place; that of the tensor behind it
    does. Where saved tensors are packed, as in a checkpoint, ours must be too, and what flows on to a
    derived weight needs a node.
    """
    if not use.plan.makes_its_output or not output.requires_grad or use.flows_on:
        return None
    if internals.top_saved_tensors_hooks(False) is not None:
        return None
    made = internals.base_of(output)
    if made is None:
        made = output
    else:  # a view, of a linear map's product as a matrix, say
        is_all = made.numel() == output.numel()
        if not is_all or not made.is_contiguous() or not output.is_contiguous():
            return None
    for t in inputs:
        if t is made or internals.base_of(t) is made:
            return None
    return made


def _results(node: Any, attributes: Mapping[str, str]) -> Mapping[str, Tensor]:
    """What torch has kept of a call, without the graph; nothing where it went another way."""
    return {
        name: getattr(node, attribute).detach()
        for name, attribute in attributes.items()
        if hasattr(node, attribute)
    }


def tap(
    use: Use, kept: tuple[Tensor, ...], inputs: Sequence[Tensor], outputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The outputs, with the use's rule called once their gradients are known."""
    use.weights[0].uses.expect(use.weights)
    if len(outputs) == 1:
        (output,) = outputs
        made = _made(use, inputs, output)
        if made is not None:
            node: Any = made.grad_fn
            shape = None if made is output else output.shape
            results = _results(node, use.plan.results) if use.plan.results else _NOTHING
            node.register_prehook(_Hook(use, kept, results, made.output_nr, shape))
            return outputs
    # Past Function.apply's own preparations for functorch, which took half of a tap's time.
    apply = internals.bind_apply(None, _Tap)
    return apply(use, kept, *map(_anchor, use.weights), *outputs)
