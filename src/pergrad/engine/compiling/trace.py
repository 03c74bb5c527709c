"""Traces a step: runs it once on tensors without values, and notes every function of torch."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pergrad.engine.compiling.guarding.draws import refusing_draws
from pergrad.engine.compiling.guarding.guards import Guards
from pergrad.engine.compiling.guarding.reads import Reads, on_one_stack_chunk
from pergrad.engine.compiling.results import Template, take_apart
from pergrad.engine.compiling.state import graph_inputs
from pergrad.engine.compiling.surroundings import Surroundings, UnrepeatableError
from pergrad.engine.samples.known_indices import KnownIndices
from pergrad.quantities import Quantity
from pergrad.runtime import internals, is_traced
from pergrad.runtime.containers import owned_copy, tensors_in
from pergrad.runtime.eagerness import traceable_callables, unfused_scripts

__all__ = ["Trace", "quiet", "reason_of", "trace_step"]

Step = Callable[[Sequence[Quantity], Sequence[Any]], Tensor]  # of quantities and a batch


class Trace(NamedTuple):
    """The graph of a step, a template of its results, and how to guard it: by the values of now."""

    graph: GraphModule
    template: Template
    guards: Callable[[], Guards]


def trace_step(
    step: Step,
    model: nn.Module,
    quantities: Sequence[Quantity],
    state: list[Tensor],
    flat: list[Any],
    spec: Any,
    *,
    loss_fn: Any = None,
    skeletons: Sequence[Mapping[str, Any]] | None = None,
) -> Trace:
    """Traces `step`, which gives the losses and fills quantities.

    The graph takes the tensors of `graph_inputs(state, flat)`, and returns the losses and the results.
    Whatever the step changes in the model, in variables of `loss_fn` and in the quantities is undone. Tensors
    that it assigns to attributes of modules are results. Raises `UnrepeatableError` if it changes anything
    else, or if quantities are not as `skeletons`, those after another step, describe them.
    """
    tensors_at = [k for k, v in enumerate(flat) if isinstance(v, Tensor)]
    template = Template([], [])
    old: list[Tensor] = []  # what the step replaces by its results
    surroundings = Surroundings(model, [loss_fn, *map(vars, quantities)])
    reads = Reads()
    seeds = _refusing_seeds(surroundings.generators, reads)
    same = _first_of_same(flat)

    def traced(*inputs: Tensor) -> list[Tensor]:
        nonlocal template, old
        own = list(inputs[: len(state)])
        for k, t in enumerate(state):
            if t.requires_grad:
                own[k] = own[k].detach().requires_grad_()
        values = list(flat)
        for k, t in zip(tensors_at, inputs[len(state) :], strict=True):
            values[k] = values[same[k]] if k in same else t
        filled = list(map(_copied, quantities))
        surroundings.put({id(t): stand_in for t, stand_in in zip(state, own, strict=True)})
        try:
            with _unflattened(model), KnownIndices(), seeds, reads:
                losses = step(filled, internals.pytree.tree_unflatten(values, spec))
        except BaseException:
            with suppress(UnrepeatableError):
                surroundings.restore()
            raise
        rebindings = surroundings.restore()
        template, results = take_apart(quantities, filled, own, rebindings, skeletons)
        old = list(tensors_in([r.old for r in rebindings]))
        for quantity, attributes in zip(quantities, template.attributes, strict=True):
            old += tensors_in([vars(quantity).get(name) for name in attributes])
        return [losses, *results]

    draws = refusing_draws(surroundings.generators)
    with quiet(), _no_autocast_cache(), traceable_callables(), unfused_scripts(), draws:
        graph: GraphModule = on_one_stack_chunk(internals.trace(traced), *graph_inputs(state, flat))
    constants = _constants(graph)
    if any(map(is_traced, constants)):
        raise UnrepeatableError("the step computes in another thread, which a trace does not see")
    _refuse_reads(constants, state, "a parameter or buffer, past the module")
    _refuse_reads(constants, old, "state that it replaces")
    others = [loss_fn, *[value for value in flat if not isinstance(value, Tensor)]]
    assigned = [(of, key) for of, key, _ in template.rebound]

    def guards() -> Guards:
        found = Guards(reads, model, others, constants=constants, assigned=assigned)
        found.has_generators = bool(surroundings.generators)
        return found

    return Trace(graph, template, guards)


def _first_of_same(flat: Sequence[Any]) -> dict[int, int]:
    """Finds tensors that occur several times in a batch: the position of the first, by those of others."""
    first: dict[int, int] = {}
    found: dict[int, int] = {}
    for k, value in enumerate(flat):
        if isinstance(value, Tensor) and first.setdefault(id(value), k) != k:
            found[k] = first[id(value)]
    return found


def _refusing_seeds(generators: Iterable[Any], reads: Reads) -> Any:
    """Refuses a step that seeds what it draws from: a graph would draw other numbers in every call.

    So does a step that sets random numbers back, to draw them again: a checkpoint with dropout.

    A trace draws nothing, so that the states of generators change by seeds alone. Operators get another
    object for a generator, which is known by its state.
    """
    own = [g for g in generators if isinstance(g, torch.Generator)]
    states = [g.get_state() for g in (torch.default_generator, *own)]

    def check(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return
        if reads.rewinds:
            raise UnrepeatableError(
                "the step draws the same random numbers again, as a checkpoint with dropout does"
            )
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)]
        with internals.outside_of_trace():
            for generator in given or [torch.default_generator]:
                state = generator.get_state()
                if not any(torch.equal(state, known) for known in states):
                    raise UnrepeatableError("the step seeds the random numbers that it draws")

    return internals.watching_operators(check)


def _copied(quantity: Quantity) -> Quantity:
    """Copies a quantity and its containers, which the trace would fill with tensors without values."""
    own = copy.copy(quantity)
    for name, value in vars(own).items():
        vars(own)[name] = owned_copy(value)
    return own


def _constants(graph: GraphModule) -> list[Tensor]:
    """Lists the tensors with values that the graph reads beside its inputs."""
    found = [getattr(graph, node.target, None) for node in graph.graph.find_nodes(op="get_attr")]
    return [t for t in found if isinstance(t, Tensor)]


def _refuse_reads(constants: Sequence[Tensor], state: Sequence[Tensor], what: str) -> None:
    known = {id(t) for t in state}
    for t in constants:
        if id(t) in known:
            raise UnrepeatableError(
                f"the step reads {what}: a tensor of shape {tuple(t.shape)} would keep the value of the trace"
            )


def reason_of(error: Exception) -> str:
    """Names an error on one line; an error of a scripted function by the one that stopped its interpreter."""
    text = str(error)
    causes = re.findall(r"^\w*(?:Error|Exception): .+", text, re.MULTILINE)
    if "TorchScript interpreter" in text and causes:
        return f"in a scripted function: {causes[-1]}"
    return f"{type(error).__name__}: {text}".splitlines()[0]


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the compiler's advice, and warnings about what it uses itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _unflattened(model: nn.Module) -> Iterator[None]:
    """Keeps recurrent layers from flattening weights for cuDNN: weights of a trace have no memory."""
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for layer in layers:
        vars(layer)["flatten_parameters"] = lambda: None
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["flatten_parameters"]


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Turns off autocast's cache of weights, whose casts have no values in a trace."""
    was = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)
