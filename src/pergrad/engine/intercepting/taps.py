"""Taps the outputs of functions: passes their gradients to the rule for the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from pergrad.distributed.placing import Cutter, is_sharded
from pergrad.engine.intercepting.plans import Plan
from pergrad.engine.intercepting.weights import Root, Weight
from pergrad.engine.samples.layouts import ROWS, Layout, Owners, Samples, samples_first
from pergrad.engine.samples.proving import note, note_on
from pergrad.errors import PergradError, ScopeError, UnsupportedFunctionError
from pergrad.factors import Dense, Factor, owned
from pergrad.runtime import internals, is_traced, without_autocast

__all__ = ["Use", "tap"]

_NOTHING: Mapping[str, Tensor] = {}
_anchor = attrgetter("anchor")


@dataclass(slots=True)
class Use:
    """Holds what the rule of one call needs in the backward, except the kept tensors."""

    plan: Plan
    output_layouts: tuple[Layout, ...]
    weights: list[Weight]
    flows_on: bool  # gradients flow on from its weights, so the rule cannot be deferred
    call: int = 0  # of the module, that it is in

    def receive(
        self,
        grads: tuple[Tensor | None, ...],
        kept: tuple[Tensor, ...],
        versions: list[int],
        results: Mapping[str, Tensor] = _NOTHING,
        shape: torch.Size | None = None,
    ) -> None:
        """Runs or enqueues the rule on the output gradients; the kept tensors must not change before."""
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
                "call, but the gradients need its old value; change it out of place instead"
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
        """Runs the rule and gives each weight its factor; returns the gradients of the weights' anchors."""
        if internals.is_any_autocast_enabled():
            with without_autocast(self.weights[0].value.device):
                return self.give_factors(grads, kept, results)
        plan, scope = self.plan, self.weights[0].scope
        if scope.call > 1:
            scope.reached.add(self.call)
        value = self.weights[0].value
        if type(value) is not Tensor and is_sharded(value):
            return [
                self._local_factor(argument, weight, grads, kept)
                for argument, weight in zip(plan.weights, self.weights, strict=True)
            ]
        arguments = {**plan.arguments, **results} if results else {**plan.arguments}
        by_owner: Owners | _Sorted | None = None
        outputs: Sequence[Tensor | None] = grads
        # `zip(strict=True)` takes as long as the loops here; plans have one name for each tensor.
        if plan.is_all_in_front or (
            plan.has_rows_in_front and self._outputs_have_rows_in_front(grads)
        ):
            arguments.update(zip(plan.kept, kept))  # noqa: B905
        else:
            own = plan.layouts
            if plan.output is None or plan.by_owner is not None:
                by_owner, own = self._owners()
            for name, t in zip(plan.kept, kept):  # noqa: B905
                arguments[name] = _rows(t, own.get(name), by_owner)
            outputs = []
            for g, layout in zip(grads, self.output_layouts):  # noqa: B905
                outputs.append(None if g is None else _rows(g, layout, by_owner))
        gradients = plan.rule.gradients(outputs[0] if len(outputs) == 1 else outputs, **arguments)
        flow: list[Tensor | None] = []
        for argument, weight in zip(plan.weights, self.weights):  # noqa: B905
            found = gradients.get(argument)
            if found is None:
                raise self._missing_gradient(argument, weight.name, gradients)
            factor = found() if callable(found) else found
            if by_owner is not None or isinstance(factor, Tensor):
                factor = _factor_of(factor, by_owner)
            if type(weight) is Root:  # as `Root.take` does, for most weights
                weight.sink.add(weight.name, factor)
                flow.append(None)
            else:
                flow.append(weight.take(factor))
        return flow

    def _local_factor(
        self,
        argument: str,
        weight: Weight,
        grads: tuple[Tensor | None, ...],
        kept: tuple[Tensor, ...],
    ) -> Tensor | None:
        """Runs the rule for one weight that is spread over ranks, on this rank's part of the tensors."""
        plan, layouts = self.plan, self.output_layouts
        needed = None if plan.rule.weights is None else plan.rule.weights[argument]
        given = dict(zip(plan.kept, kept, strict=True))
        if needed is not None:
            given = {name: t for name, t in given.items() if name in needed}
        cutter = Cutter(plan.function, argument, weight.value)
        local, arguments = cutter.cut(grads, given, getattr(layouts[0], "dim", None))
        by_owner, own = self._owners()
        for name, t in arguments.items():
            arguments[name] = _rows(t, own.get(name), by_owner)
        outputs = [
            None if g is None else _rows(g, layout, by_owner)
            for g, layout in zip(local, layouts, strict=True)
        ]
        output = outputs[0] if len(outputs) == 1 else outputs
        gradients = plan.rule.gradients(output, **{**plan.arguments, **arguments})
        if argument not in gradients:
            raise self._missing_gradient(argument, weight.name, gradients)
        return weight.take(cutter.finish(_factor_of(gradients[argument], by_owner)))

    def _owners(self) -> tuple[Owners | _Sorted | None, Mapping[str, Samples | Owners]]:
        """Returns the owners of the rows, if an argument or output has them, and the arguments' layouts.

        The outputs say whose gradients these are: data that was moved beside them is the context of a sample.
        """
        own = self.plan.layouts
        given, outputs = self.plan.by_owner, self.output_layouts
        layout = next((la for la in outputs if isinstance(la, Owners)), None)
        if layout is None and given is not None:
            rows = next((la for la in outputs if isinstance(la, Samples)), None)
            if rows is not None and rows.scope.count > 1:
                return None, {name: rows.at(la.dim) for name, la in own.items()}
            layout = given
        if layout is None or layout.scope.count == 1:
            return None, own
        known = None if not is_traced(layout.owner) else _Sorted.of(layout)
        return layout if known is None else known, own

    def _outputs_have_rows_in_front(self, grads: tuple[Tensor | None, ...]) -> bool:
        """Whether the outputs have their rows in front too, as (n, ..., features)."""
        for layout, grad in zip(self.output_layouts, grads, strict=True):
            if layout.key != ROWS or grad is None or grad.dim() <= 2:
                return False
        return True

    def _missing_gradient(
        self, argument: str, parameter: str, gradients: Mapping[str, Any]
    ) -> PergradError:
        return PergradError(
            f"the rule of `{self.plan.function.__name__}` returns no gradient for argument "
            f"{argument!r}, which is parameter {parameter!r}; it returns gradients for "
            f"{sorted(gradients)}: add {argument!r} to them"
        )


@dataclass(frozen=True)
class _Sorted:
    """Owners of rows that a trace does not know: the order that brings those of a sample together.

    Each sample is taken to have as many rows; the graph computes whether that is so.
    """

    order: Tensor
    each: int  # rows of a sample

    @classmethod
    def of(cls, owners: Owners) -> _Sorted | None:
        scope, rows = owners.scope, owners.owner.shape[0]
        if type(rows) is not int or rows % scope.count:
            return None
        order = owners.owner.argsort(stable=True)
        numbers = torch.arange(scope.count, device=order.device)
        wanted = numbers.repeat_interleave(rows // scope.count)
        scope.misplaced.append((owners.owner[order] != wanted).any())
        return cls(order, rows // scope.count)


def _factor_of(found: Any, by_owner: Owners | _Sorted | None) -> Factor:
    """Returns what a rule gives for one weight as a factor by sample."""
    if callable(found):
        found = found()
    factor: Factor = Dense(found) if isinstance(found, Tensor) else found
    if not isinstance(by_owner, Owners):
        return factor
    return owned(factor, by_owner.owner, by_owner.scope.count)


def _rows(t: Tensor, layout: Layout | None, by_owner: Owners | _Sorted | None) -> Tensor:
    """Moves the sample axis to the front; with owners, each row counts as a sample."""
    if layout is None or not layout.has_samples:
        return t
    if isinstance(by_owner, _Sorted):
        assert isinstance(layout, Samples | Owners)
        together = layout.scope.samples(layout.dim, 1, by_owner.each)
        return samples_first(t.index_select(layout.dim, by_owner.order), together)
    if layout.scope.count == 1:  # all rows of all dimensions belong to the one sample
        return t.unsqueeze(0)
    if layout.key == ROWS and by_owner is None:  # the common case of `samples_first`, inlined
        return t.unsqueeze(1)
    return samples_first(t, layout if by_owner is None else by_owner.at(layout.dim))  # type: ignore[arg-type,union-attr]


def _second_derivatives() -> UnsupportedFunctionError:
    return UnsupportedFunctionError(
        "a backward with create_graph=True ran inside a recording, as for a gradient penalty, but "
        "second derivatives of recorded weights are not supported; compute this term outside of the "
        "recording"
    )


class _Tap(torch.autograd.Function):
    """Adds an autograd node after the outputs; the weights' anchors make it require grad in any case."""

    @staticmethod
    def forward(
        ctx: Any, use: Use, kept: tuple[Tensor, ...], *anchors_and_outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.use = use
        outputs = anchors_and_outputs[len(use.weights) :]
        ctx.save_for_backward(*kept)  # not as attributes: the hooks of a checkpoint must see them
        ctx.set_materialize_grads(False)
        return tuple(map(Tensor.detach, outputs))  # no view: in-place operations may follow

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors  # a checkpoint recomputes here, and the recorder must see that
        use: Use = ctx.use
        flow: list[Tensor | None] = [None] * len(use.weights)
        if use.weights[0].scope.is_pulling_back:
            return None, None, *flow, *grads
        if torch.is_grad_enabled():
            raise _second_derivatives()
        for g in grads:
            if g is not None:
                break
        else:
            return None, None, *flow, *grads
        with internals.DisableTorchFunction():
            if use.flows_on:
                flow = use.give_factors(grads, kept)
            else:
                use.receive(grads, kept, list(map(internals.version_of, kept)))
        return None, None, *flow, *grads


class _Hook:
    """Runs the rule as a hook on the function's own node, in a third of the time of `_Tap`.

    Like autograd, it frees the saved tensors after use and raises an error if they were changed.
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
        self._results = results  # without versions: only autograd has these tensors
        self._versions = list(map(internals.version_of, kept))
        self._place = place  # of the function's output among the outputs of the node
        self._shape = shape  # of the function's output if it is a view of the node's

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        grad = grads[self._place]
        if self._use.weights[0].scope.is_pulling_back:
            return
        if torch.is_grad_enabled():
            raise _second_derivatives()
        if grad is None:
            return
        kept, results = self._kept, self._results
        if kept is None:
            raise ScopeError(
                "backward ran through a recorded graph a second time, but its saved tensors are freed; "
                "pass retain_graph=True to the first backward"
            )
        if not internals.keeps_graph():
            self._kept, self._results = None, _NOTHING
        with internals.DisableTorchFunction():
            self._use.receive((grad,), kept, self._versions, results, self._shape)


def _hookable(use: Use, inputs: Sequence[Tensor], output: Tensor) -> Tensor | None:
    """Returns the tensor whose node can take the hook: it belongs to this use alone and stays in the graph.

    None where a node of our own is needed: saved tensors are packed, as in a checkpoint, so ours must be too;
    or gradients flow on to a derived weight. A view loses its node when it is written to in place, so the
    hook is on the node of its base.
    """
    if not use.plan.makes_its_output or not output.requires_grad or use.flows_on:
        return None
    if internals.top_saved_tensors_hooks(False) is not None:
        return None
    made = internals.base_of(output)
    if made is None:
        made = output
    else:  # a view, such as the output of F.linear with a 3-d input
        is_all = made.numel() == output.numel()
        if not is_all or not made.is_contiguous() or not output.is_contiguous():
            return None
    for t in inputs:
        if t is made or internals.base_of(t) is made:
            return None
    return made


def _results(node: Any, attributes: Mapping[str, str]) -> Mapping[str, Tensor]:
    """Returns the tensors that the function's own node has saved, detached; leaves out missing ones."""
    return {
        name: getattr(node, attribute).detach()
        for name, attribute in attributes.items()
        if hasattr(node, attribute)
    }


def tap(
    use: Use, kept: tuple[Tensor, ...], inputs: Sequence[Tensor], outputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Returns the outputs, whose backward runs the rule of the use."""
    first = use.weights[0]
    first.uses.expect(use.weights)
    use.call = first.scope.call
    if len(outputs) == 1:
        (output,) = outputs
        made = _hookable(use, inputs, output)
        if made is not None:
            node: Any = made.grad_fn
            layout = use.output_layouts[0]
            place = made.output_nr
            if made is output:
                shape = None
                note_on(node, place, layout)
            else:
                shape = output.shape
                note_on(node, place, layout, shape, made.shape)
                if layout.key is None:  # it may not survive the reshape
                    note(output, layout)
            results = _results(node, use.plan.results) if use.plan.results else _NOTHING
            node.register_prehook(_Hook(use, kept, results, place, shape))
            return outputs
    # Skips the functorch handling of Function.apply, which takes half of a tap's time.
    apply = internals.bind_apply(None, _Tap)
    tapped: tuple[Tensor, ...] = apply(use, kept, *map(_anchor, use.weights), *outputs)
    is_packed = (
        internals.top_saved_tensors_hooks(False) is not None
        and internals.current_graph_task_id() == -1
    )
    for t, layout in zip(tapped, use.output_layouts, strict=True):
        note(t, layout, is_packed=is_packed)
    return tapped
