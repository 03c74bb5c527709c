"""Compiled steps: the engine runs while a step is traced, and what it has found runs from then on."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pergrad.engine.compiling.cuda_graphs import Replayed, check_devices
from pergrad.engine.compiling.eager_backend import straight
from pergrad.engine.compiling.graph_passes import rewrite
from pergrad.engine.recording.modules import names_of_tensors, submodules, tensors_of
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.recording import check_module, check_quantities
from pergrad.engine.recording.running import run_recorded
from pergrad.engine.samples.signatures import Signature, describe_hashable
from pergrad.errors import PergradError
from pergrad.quantities import Quantity
from pergrad.runtime import autocast_state, without_compiler

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pergrad.engine.recording.options import RecordOptions

__all__ = ["CompiledStep", "compiled"]

Backend: TypeAlias = Literal["inductor", "eager"]


def compiled(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *quantities: Quantity,
    backend: Backend = "inductor",
    max_graphs: int = 8,
    cuda_graphs: bool = False,
    **options: Unpack[RecordOptions],
) -> CompiledStep:
    """A step, called as step(*batch), that computes the quantities and returns the loss, compiled.

    The step is traced once for each signature (shapes, types, strides, autocast, training modes, which
    parameters are frozen) and compiled by inductor: from then on nothing of Python runs in it. Weights and
    buffers are inputs of the compiled graph: optimizer steps and `load_state_dict` between calls are seen.
    Random functions draw fresh numbers in each call.

    The first call with a signature runs as `pergrad.record` does, the second one is compiled, which
    takes seconds for a small model and minutes for a large one; with backend="eager" it is traced alone,
    which takes seconds for a large one. A model whose control flow depends on values
    (`.item()`, experts in eager mode) cannot be traced: it goes on as it is, with one warning that says why.
    Where the compiler fails, as it does for want of a C++ compiler, steps are traced alone, with a warning.
    Whatever else the loss function reads, Python numbers included, is what it was when traced.

    Args:
        model: any module.
        loss_fn: called as loss_fn(model, *batch); gives the (B,) losses of the samples, or their sum or
            mean, as `loss_reduction` says.
        quantities: what to compute; the results are in them after each call.
        backend: what runs the traced step, named as for `torch.compile`: "inductor" compiles it, "eager"
            calls its functions of torch one after the other.
        max_graphs: how many signatures to compile; further ones run uncompiled, with one warning.
        cuda_graphs: launch a compiled step at once, as a CUDA graph, from its third call on: for models whose
            kernels are over before the host has launched the next. It holds the memory of one run for as long
            as the step lives, and results are copied.
        options: those of `pergrad.record` but `verify`.

    >>> import torch, pergrad
    >>> model, norms = torch.nn.Linear(2, 1, bias=False), pergrad.Norms()
    >>> step = pergrad.compiled(model, lambda model, x: model(x).sum(1), norms)
    >>> _ = step(torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
    >>> norms.result
    tensor([5., 1.])
    """
    check_module(model)
    check_quantities(quantities)
    if backend not in get_args(Backend):
        raise PergradError(f"backend must be one of {get_args(Backend)}, got {backend!r}")
    return CompiledStep(
        model, loss_fn, quantities, Options(**options), backend, max_graphs, cuda_graphs
    )


class CompiledStep:
    """What `pergrad.compiled` returns; `graphs` is the number of signatures compiled so far."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        quantities: Sequence[Quantity],
        options: Options,
        backend: Backend,
        max_graphs: int,
        cuda_graphs: bool,
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._quantities = quantities
        self._options = options
        self._backend = backend
        self._max_graphs = max_graphs
        self._cuda_graphs = cuda_graphs
        self._pool: Any = None  # the memory of CUDA graphs
        self._kinds = _Kinds()
        self._graphs: dict[Any, _Graph | None] = {}  # None: seen once
        self._why_not: str | None = None  # the reason to stay uncompiled
        self._is_warned = False  # of too many graphs

    @property
    def graphs(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def __call__(self, *batch: Any) -> Tensor:
        flat, spec = pytree.tree_flatten(batch)
        modules = submodules(self._model)
        state, training = tensors_of(modules), tuple([m.training for m in modules])
        kind = self._kinds.number(state)
        autocast = tuple([(device, *autocast_state(device)) for device in self._kinds.devices])
        key = (spec, _signature(flat), kind, autocast, training)
        if self._cuda_graphs and key not in self._graphs:  # it names the devices
            check_devices(_inputs(state, flat))
        if self._why_not is not None or not self._wants_graph(key):
            return self._run(self._model, self._quantities, batch)
        graph = self._graphs[key]
        if graph is None:
            graph = self._graphs[key] = self._made(state, flat, spec)
        if graph is None:
            return self._run(self._model, self._quantities, batch)
        return graph.run(state, flat, self._quantities)

    def _wants_graph(self, key: Any) -> bool:
        """Whether a graph is there or is to be made: for what is seen a second time."""
        if key in self._graphs:
            if self._graphs[key] is not None or self.graphs < self._max_graphs:
                return True
            if not self._is_warned:
                self._is_warned = True
                warnings.warn(
                    f"pergrad.compiled: {self._max_graphs} different signatures are compiled already, "
                    "further ones run uncompiled: pad batches to fewer shapes, or raise max_graphs",
                    stacklevel=3,
                )
            return False
        self._graphs[key] = None
        return False

    def _run(
        self, model: nn.Module, quantities: Sequence[Quantity], batch: Sequence[Any]
    ) -> Tensor:
        return run_recorded(model, self._loss_fn, batch, quantities, self._options)

    def _made(self, state: list[Tensor], flat: list[Any], spec: Any) -> _Graph | None:
        """The step, traced and compiled; without what fails, from now on and with a warning that says why."""
        try:
            graph, place = self._traced(state, flat, spec)
        except Exception as error:
            self._why_not = _reason(error)
            warnings.warn(
                f"pergrad.compiled: the step cannot be traced and goes on uncompiled ({self._why_not})",
                stacklevel=3,
            )
            return None
        call: Callable[..., Any]
        if self._backend == "inductor":
            try:
                call = _by_inductor(graph, _inputs(state, flat))
            except Exception as error:
                self._backend = "eager"
                warnings.warn(
                    "pergrad.compiled: the compiler failed, so that steps run as with "
                    f'backend="eager" ({_reason(error)})',
                    stacklevel=3,
                )
                return self._made(state, flat, spec)
        else:
            call = straight(graph)
        if self._cuda_graphs:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            call = Replayed(call, len(state), self._pool)
        return _Graph(call, place)

    def _traced(
        self, state: list[Tensor], flat: list[Any], spec: Any
    ) -> tuple[GraphModule, _Place]:
        """Run the step on tensors without values, and note every function of torch."""
        names, moves = (
            names_of_tensors(self._model),
            [k for k, v in enumerate(flat) if isinstance(v, Tensor)],
        )
        trained = {name for name, t in zip(names, state, strict=True) if t.requires_grad}
        place: _Place = []

        def step(*inputs: Tensor) -> list[Tensor]:
            nonlocal place
            own = dict(zip(names, inputs, strict=False))
            for name in trained:
                own[name] = own[name].detach().requires_grad_()
            values = list(flat)
            for k, t in zip(moves, inputs[len(names) :], strict=True):
                values[k] = t
            quantities = [copy.copy(q) for q in self._quantities]
            with (
                internals.reparametrize(self._model, own, tie_weights=True),
                _unflattened(self._model),
            ):
                losses = self._run(
                    self._model, quantities, internals.pytree.tree_unflatten(values, spec)
                )
            place, results = _taken_apart(self._quantities, quantities, own)
            return [losses, *results]

        is_compiled = self._backend == "inductor"
        with _quiet(), _no_autocast_cache(), nullcontext() if is_compiled else without_compiler():
            graph: GraphModule = internals.trace(step)(*_inputs(state, flat))
        return graph, place


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the compiler's advice, and the warnings of what it still uses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _by_inductor(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    rewrite(graph.graph)
    graph.recompile()
    with _quiet(), torch.no_grad(), internals.DisableAutocast():
        # In the order in which it was traced: whoever reads a tensor first decides on its layout.
        call: Any = internals.compile_fx(
            graph, inputs, config_patches={"reorder_for_locality": False}
        )
    return call


@dataclass(frozen=True)
class _Reference:
    """Stands for a tensor of the model in what a quantity holds: its place in the state."""

    index: int


@dataclass(frozen=True)
class _Position:
    """The place of a tensor among the results of a graph."""

    index: int


# What each quantity holds, by attribute: as it was when traced, but for positions and references.
_Place = list[dict[str, Any]]


@dataclass(frozen=True)
class _Graph:
    """A compiled step."""

    call: Callable[..., Any]
    place: _Place

    def run(self, state: list[Tensor], flat: list[Any], quantities: Sequence[Quantity]) -> Tensor:
        for quantity, attributes in zip(quantities, self.place, strict=True):
            for name in attributes:  # the last results: what they lie in can be written to again
                setattr(quantity, name, None)
        with torch.no_grad(), internals.DisableAutocast():  # the graph has its casts
            loss, *results = self.call(*_inputs(state, flat))
        for quantity, attributes in zip(quantities, self.place, strict=True):
            for name, value in attributes.items():
                setattr(quantity, name, _filled(value, results, state))
            quantity.settle()
        return loss


def _filled(value: Any, results: list[Tensor], state: list[Tensor]) -> Any:
    """What was held when traced, with the tensors of this call."""
    kind = type(value)
    if kind is _Position:
        return results[value.index]
    if kind is _Reference:
        return state[value.index]
    if kind is str:  # names, most of all
        return value
    if kind is dict:  # by hand: pytrees take longer for it than kernels to run
        return {key: _filled(part, results, state) for key, part in value.items()}
    if kind is tuple or kind is list:
        return kind([_filled(part, results, state) for part in value])
    if internals.pytree.tree_is_leaf(value):
        return value
    return internals.pytree.tree_map(lambda part: _filled(part, results, state), value)


def _taken_apart(
    before: Sequence[Quantity], after: Sequence[Quantity], own: dict[str, Tensor]
) -> tuple[_Place, list[Tensor]]:
    """What the quantities have come to hold: the tensors, and how to put others in their place."""
    references = {id(t): _Reference(index) for index, t in enumerate(own.values())}
    results: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in references:
            return references[id(value)]
        results.append(value)
        return _Position(len(results) - 1)

    place: _Place = []
    for old, new in zip(before, after, strict=True):
        place.append(
            {
                name: internals.pytree.tree_map(leaf, value)
                for name, value in vars(new).items()
                if name not in vars(old) or vars(old)[name] is not value
            }
        )
    return place, results


class _Kinds:
    """Numbers the states of a model that differ in more than their values.

    Mostly a state is like that of the last call, which is sooner told than looked up.
    """

    devices: Sequence[str] = ()  # of the last one, by type

    def __init__(self) -> None:
        self._last: tuple[list[Any], ...] = ()
        self._number = 0
        self._known: dict[Any, int] = {}

    def number(self, state: list[Tensor]) -> int:
        described: tuple[list[Any], ...] = (
            [t.shape for t in state],
            [t.stride() for t in state],
            [t.dtype for t in state],
            [t.device for t in state],
            [t.requires_grad for t in state],
        )
        if described != self._last:
            self._last = described
            key = tuple([tuple(of_each) for of_each in described])
            self._number = self._known.setdefault(key, len(self._known))
            self.devices = sorted({device.type for device in described[3]}) or ["cpu"]
        return self._number


def _inputs(state: list[Tensor], flat: Sequence[Any]) -> list[Tensor]:
    """What a graph is called with."""
    return [t.detach() for t in (*state, *(v for v in flat if isinstance(v, Tensor)))]


def _signature(flat: Sequence[Any]) -> Signature:
    """All that a graph may depend on but the values of tensors."""
    parts: list[Any] = []
    for value in flat:
        if isinstance(value, Tensor):
            parts += value.shape, value.stride(), value.dtype, value.device, value.requires_grad
        elif not describe_hashable(value, parts):
            parts += type(value), repr(value)
    return tuple(parts)


@contextmanager
def _unflattened(model: nn.Module) -> Iterator[None]:
    """Within, recurrent layers do not lay weights side by side for cuDNN: those of a trace lie nowhere."""
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
    """Within, autocast keeps no casts of weights: those of a trace have no values."""
    was = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)
