"""Calls functions that have a rule: runs them on the weights' values and taps the outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from weakref import ref

from torch import Tensor
from torch.overrides import resolve_name

from pergrad.engine.intercepting.plans import Plan, plan_of
from pergrad.engine.intercepting.taps import Use, tap
from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.intercepting.weights import Weight
from pergrad.engine.samples.layouts import Layout, Lost
from pergrad.engine.samples.propagation import name_of, unknown_samples
from pergrad.engine.samples.signatures import Signature
from pergrad.engine.samples.tags import TAG, VERSION
from pergrad.errors import UnsupportedFunctionError
from pergrad.rules import DECOMPOSITIONS, RULES, Rule
from pergrad.runtime import cast_as_autocast, internals
from pergrad.runtime.caches import Cache, cached

__all__ = ["cached_plan", "call_by_plan", "call_with_rule", "qualified_name", "unsupported"]


_PLANS: Cache[Plan] = Cache(__name__, "plans of calls with a rule, without tensors, by signature")


def cached_plan(signature: Signature | None) -> Plan | None:
    """Returns the plan of an earlier call with that signature; None if the rule has changed since."""
    plan = _PLANS.get(signature)
    if plan is None or RULES.get(plan.function) is not plan.rule:
        return None
    return None if plan.function in DECOMPOSITIONS else plan


def call_with_rule(
    rule: Rule,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tracker: Tracker,
) -> Any:
    """Runs a call and taps its result; returns NotImplemented if the rule does not cover it."""
    tensors, tags, signature = tracker.read(func, args, kwargs)
    plan = plan_of(rule, func, args, kwargs, tensors, tags)
    if plan is None:
        return NotImplemented
    output = call_by_plan(plan, args, kwargs, tracker, tags, signature)
    if output is not NotImplemented and signature is not None:
        known = tracker.known(signature)
        if known is not None and isinstance(output, Tensor):
            plan = plan.with_output(known[0], output.dim())
        if rule.checks_shapes and not internals.is_any_autocast_enabled():
            plan = replace(plan, is_checked=True)  # autocast shows the check other dtypes
        _PLANS.put(signature, plan)
    return output


def call_by_plan(
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tracker: Tracker,
    tags: list[Any],
    signature: Signature | None,
) -> Any:
    """Runs a call by its cached plan; a `check` that may read values still runs."""
    rule, func = plan.rule, plan.function
    given = [*args, *kwargs.values()] if kwargs else [*args]
    weights: list[Weight] = []
    flows_on = False
    for k, place in plan.weights_at:
        weight: Weight = tags[k]
        weights.append(weight)
        flows_on = flows_on or not weight.may_hook
        given[place] = weight.operand
    has_autocast = internals.is_any_autocast_enabled()
    if has_autocast and rule.casts_under_autocast:
        for place in plan.kept.values():
            given[place] = cast_as_autocast(given[place])
    if rule.check is not None and (has_autocast or not plan.is_checked):
        arguments = dict(zip(plan.names, given, strict=True))
        if rule.check(arguments, plan.dims) is False:
            return NotImplemented

    if kwargs:
        kwargs = dict(zip(kwargs, given[len(args) :], strict=True))
        output = func(*given[: len(args)], **kwargs)
    else:
        output = func(*given)
    values = [*map(given.__getitem__, plan.tensors)]
    outputs: tuple[Tensor, ...]
    layouts: tuple[Layout, ...]
    if plan.output is not None:
        layout = tracker.layouts.get(plan.output) or tracker.layout_for(plan.output)
        outputs, layouts = (output,), (layout,)
        setattr(output, TAG, layout)  # as `Tracker.mark` does while gradients are on
        tracker.refer(ref(output))
        version = internals.version_of(output)
        if version:
            setattr(output, VERSION, version)
    else:
        # A gradient is going to flow to the weights, also where none flows to the other arguments.
        if not tracker.recall(signature, output, flows=True):
            args = tuple(given[: len(args)])
            tracker.propagate_from(func, args, kwargs, output, values, tags, signature, flows=True)
        outputs = (output,) if isinstance(output, Tensor) else tuple(output)
        layouts = tuple([getattr(t, TAG) for t in outputs])
        for layout in layouts:
            if isinstance(layout, Lost) and layout.why == "unknown":
                raise unknown_samples(layout.reason)
            if isinstance(layout, Lost):
                raise unsupported(func, weights, layout.reason)
    kept = tuple(map(Tensor.detach, map(given.__getitem__, plan.kept.values())))
    tapped = tap(Use(plan, layouts, weights, flows_on), kept, values, outputs)
    if tapped is outputs:
        return output
    for t, layout in zip(tapped, layouts, strict=True):
        setattr(t, TAG, layout)
        tracker.refer(ref(t))
        if internals.version_of(t):
            setattr(t, VERSION, internals.version_of(t))
    return tapped[0] if isinstance(output, Tensor) else type(output)(tapped)


@cached("names of functions as written in code, by function")
def qualified_name(func: Callable[..., Any]) -> str:
    """Returns the function's name as written in code; torch takes 10 µs to find it."""
    known: str | None = resolve_name(func)
    if known is not None:
        return known
    module = getattr(func, "__module__", None)  # "torch" for builtins that it calls itself
    return f"torch.{name_of(func)}" if module == "torch" else name_of(func)


def unsupported(
    func: Callable[..., Any], weights: Iterable[Weight], reason: str
) -> UnsupportedFunctionError:
    """Returns an error with the function, the parameters, the reason and the next step."""
    names = " and ".join(f"{w.name!r} (shape {tuple(w.value.shape)})" for w in weights)
    return UnsupportedFunctionError(
        f"Expanded Weights encountered but cannot handle function {func.__name__}: "
        f"`{qualified_name(func)}` on parameter {names}: {reason}. Register a rule with "
        f"@pergrad.implements_per_sample_grads({qualified_name(func)}), or freeze the parameter."
    )
