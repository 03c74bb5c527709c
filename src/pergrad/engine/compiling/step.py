"""Compiles steps: the engine runs while a step is traced; afterwards its graph runs alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from pergrad.distributed.data_parallel import refuse_broadcasts
from pergrad.distributed.wrappers import refuse_sharded
from pergrad.engine.checking.certification import certified_run
from pergrad.engine.collecting.blocks import EarlierBlocks
from pergrad.engine.compiling.agreement import Summary
from pergrad.engine.compiling.certified_graphs import check_graph, copies_of
from pergrad.engine.compiling.cuda_graphs import Replayed, check_devices
from pergrad.engine.compiling.eager_backend import as_python
from pergrad.engine.compiling.guarding.guards import Guards
from pergrad.engine.compiling.guarding.memory import computes_in_half, inputs_written, share_memory
from pergrad.engine.compiling.inductor_backend import compile_graph
from pergrad.engine.compiling.results import Template, clear, fill
from pergrad.engine.compiling.state import (
    StateNumbers,
    graph_inputs,
    signature_of_leaves,
    state_of,
)
from pergrad.engine.compiling.trace import reason_of, trace_step
from pergrad.engine.looping.fallback import Fallback, Runner
from pergrad.engine.looping.snapshots import Snapshot, undisturbed
from pergrad.engine.recording.arguments import is_graph_batch
from pergrad.engine.recording.loss_units import EvenSamples
from pergrad.engine.recording.modes import signature_of_modes
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.recording import check_module, check_quantities
from pergrad.engine.recording.running import run_recorded
from pergrad.errors import PergradError
from pergrad.quantities import Quantity
from pergrad.quantities.base import counted, public_names
from pergrad.runtime import internals, without_compiler
from pergrad.runtime.containers import skeleton
from pergrad.runtime.eagerness import uncompiled
from pergrad.runtime.tolerances import largest, tolerance_of_model

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pergrad.engine.recording.options import RecordOptions

__all__ = ["CompiledStep", "compiled"]

_REFUSED: Any = object()
Backend: TypeAlias = Literal["inductor", "eager"]


def compiled(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *quantities: Quantity,
    backend: Backend = "inductor",
    max_graphs: int = 8,
    cuda_graphs: bool = False,
    certify: bool = False,
    fallback: Fallback | None = None,
    **options: Unpack[RecordOptions],
) -> CompiledStep:
    """Compiles a step: called as step(*batch), it computes the quantities and returns the loss.

    The step is traced once for each signature (shapes, types, strides, autocast, training modes, which
    parameters are frozen) and compiled by inductor. From then on no Python of the model runs. Weights and
    buffers are inputs of the compiled graph, so optimizer steps and `load_state_dict` between calls take
    effect. Random functions draw fresh numbers in each call.

    The first call with a signature runs as `pergrad.record` does. The second one compiles, which takes
    seconds for a small model and minutes for a large one; with backend="eager" it only traces, which takes
    seconds for a large one. A model whose control flow depends on values (`.item()`, experts in eager mode)
    cannot be traced: it runs uncompiled, with one warning that gives the reason. So does one that changes
    more than its results and tensors in attributes of modules: a counter, a list that grows. If the compiler
    fails, for example without a C++ compiler on the machine, steps are only traced, with a warning. Where
    Python values that the model or the loss function names have changed, such as attributes and global
    variables, the step runs uncompiled, and is traced again once they last for two calls.

    Args:
        model: any module.
        loss_fn: called as loss_fn(model, *batch); gives the (B,) losses of the samples, or their sum or
            mean, as `loss_reduction` says.
        quantities: what to compute; they hold the results after each call.
        backend: how the traced step runs, named as for `torch.compile`: "inductor" compiles it, "eager"
            calls its functions of torch one after the other.
        max_graphs: how many signatures to compile; further ones run uncompiled, with one warning.
        cuda_graphs: launch a compiled step as a CUDA graph, from its third call on: for models whose kernels
            are faster than the host launches them. The graph holds the memory of one run for as long as the
            step lives, and results are copied.
        certify: prove the results as `pergrad.certify` does, or raise an error: of the first call with a
            signature, and of the graph in its first call. Later calls are not checked. loss_fn must return
            (B,) losses. Compiled random functions then draw as uncompiled ones do, so that the two can be
            compared.
        fallback: "loop" computes batches that are refused sample by sample, as `pergrad.grads` does, with
            one warning; such batches are not compiled.
        options: those of `pergrad.record` but `verify`.

    >>> import torch, pergrad
    >>> model, norms = torch.nn.Linear(2, 1, bias=False), pergrad.Norms()
    >>> step = pergrad.compiled(model, lambda model, x: model(x).sum(1), norms)
    >>> _ = step(torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
    >>> norms.result
    tensor([5., 1.])
    """
    check_module(model)
    check_quantities(quantities, may_have_results=True)  # each call replaces them
    if backend not in get_args(Backend):
        raise PergradError(f"backend must be one of {get_args(Backend)}, got {backend!r}")
    return CompiledStep(
        model,
        loss_fn,
        quantities,
        Options.from_call("compiled", options),
        backend,
        max_graphs,
        cuda_graphs,
        certify,
        Runner(fallback),
    )


class CompiledStep:
    """The step that `pergrad.compiled` returns; `graphs` counts the signatures compiled so far."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        quantities: Sequence[Quantity],
        options: Options,
        backend: Backend,
        max_graphs: int,
        cuda_graphs: bool,
        certify: bool,
        runner: Runner,
    ) -> None:
        refuse_sharded(model, "pergrad.compiled", "use pergrad.record there")
        refuse_broadcasts(model, "pergrad.compiled")
        self._model = model
        self._loss_fn = loss_fn
        self._quantities = quantities
        self._even = (
            EvenSamples()
        )  # a mean over valid positions is looked at when the graph has run
        self._filled = [*quantities, self._even]
        self._options = options
        self._backend = backend
        self._max_graphs = max_graphs
        self._cuda_graphs = cuda_graphs
        self._certify = certify
        self._runner = runner
        self._certified: set[Any] = set()  # signatures whose uncompiled step is certified
        self._pool: Any = None  # the memory of CUDA graphs
        self._states = StateNumbers()
        self._graphs: dict[Any, _CompiledGraph | None] = {}  # by signature; None: seen once
        self._earlier: dict[Any, list[_CompiledGraph]] = {}  # for other Python values
        self._latest: dict[
            Any, Guards
        ] = {}  # of values that no graph of the signature was traced with
        self._skeletons: dict[
            Any, list[dict[str, Any]]
        ] = {}  # of the quantities after that first call
        self._why_not: str | None = None  # the reason to stay uncompiled
        self._has_owners = options.owners is not None
        self._is_warned = False  # that there are too many signatures
        self._is_warned_of_change = False

    @property
    def graphs(self) -> int:
        latest = sum(graph is not None for graph in self._graphs.values())
        return latest + sum(map(len, self._earlier.values()))

    @uncompiled
    def __call__(self, *batch: Any) -> Tensor:
        earlier = EarlierBlocks(self._quantities)
        for quantity in self._quantities:
            quantity.reset()
        try:
            losses = self._step(batch)
            if self._even.uneven:
                self._even.check()
        except BaseException:
            for quantity in self._quantities:
                quantity.reset()
            earlier.restore()
            raise
        earlier.join()
        return losses

    def __repr__(self) -> str:
        """Shows the model, the quantities and how the step runs."""
        how = f"{counted(self.graphs, 'graph')} by {self._backend}"
        if self._why_not is not None:
            how = f"uncompiled ({self._why_not})"
        names = ", ".join(type(quantity).__name__ for quantity in self._quantities)
        return f"<compiled step of {type(self._model).__name__} for {names}: {how}>"

    def __dir__(self) -> list[str]:
        return public_names(self)

    def _step(self, batch: tuple[Any, ...]) -> Tensor:
        if self._why_not is None and (self._has_owners or any(map(is_graph_batch, batch))):
            self._stay_uncompiled("which rows belong to a sample is known by their values alone")
        flat, spec = internals.pytree.tree_flatten(batch)
        if self._is_empty(flat) or any(isinstance(value, nn.Parameter) for value in flat):
            return self._run(self._filled, batch)
        state, training = state_of(self._model)
        if self._why_not is None and any(map(internals.hooks_of, state)):
            self._stay_uncompiled("a parameter has a hook, which gets the gradient of each sample")
        try:
            number = self._states.number(state)
        except RuntimeError:  # a lazy module has parameters without shapes: refused there, by name
            return self._run(self._filled, batch)
        surroundings = self._states.autocast(), training, signature_of_modes()
        key = (spec, signature_of_leaves(flat), number, *surroundings)
        if self._cuda_graphs and key not in self._graphs:  # a signature names the devices
            check_devices(graph_inputs(state, flat))
        if self._why_not is not None or self._runner.loops(key) or not self._wants_graph(key):
            return self._uncompiled(key, batch)
        graph = self._holding(key)
        is_first = graph is None
        if graph is None:
            if self._graphs[key] is not None and not self._wants_another(key):
                return self._uncompiled(key, batch)
            graph = self._made(state, flat, spec, self._skeletons.pop(key, None))
            if graph is None:
                return self._uncompiled(key, batch)
        if graph.writes and share_memory(graph_inputs(state, flat), graph.writes):
            return self._uncompiled(key, batch)
        expected = None
        if is_first and graph.is_comparable and not self._certify:
            expected = self._expected(flat, spec)
        before = Snapshot(self._model) if graph.assumes or expected is not None else None
        if is_first:
            found = self._first_run(graph, state, flat, batch)
            self._keep(key, graph)
        else:
            found = graph.run(state, flat, self._filled)
        if before is not None:
            why_not = "which rows belong to a sample is known by their values alone"
            is_right = not (graph.assumes and self._even.is_misplaced)
            if is_right and is_first and not self._certify:
                others = "losses"
                if expected is None:
                    is_right = self._repeats(found, before, batch)
                else:
                    summary = Summary.of(found, self._filled)
                    others = summary.differs_from(expected, is_rough=graph.is_rough)
                    is_right = not others
                why_not = f"the graph gives other {others} than an uncompiled run of this batch"
            if not is_right:
                before.restore()
                if is_first:
                    self._graphs[key] = None
                    self._stay_uncompiled(why_not)
                return self._uncompiled(key, batch)
        return found

    def _holding(self, key: Any) -> _CompiledGraph | None:
        """Returns the graph of a signature that was traced with the Python values of now, if any."""
        graph = self._graphs[key]
        if graph is None or graph.guards.changed() is None:
            return graph
        for other in self._earlier.get(key, ()):
            if other.guards.changed() is None:
                self._keep(key, other)
                return other
        return None

    def _keep(self, key: Any, graph: _CompiledGraph) -> None:
        """Makes a graph the first one of its signature to try."""
        earlier = self._earlier.setdefault(key, [])
        if graph in earlier:
            earlier.remove(graph)
        last = self._graphs[key]
        if last is not None and last is not graph:
            earlier.append(last)
        self._graphs[key] = graph
        self._latest.pop(key, None)

    def _wants_another(self, key: Any) -> bool:
        """Whether to trace a signature again since Python values have changed: if they last for two calls."""
        graph, latest = self._graphs[key], self._latest.get(key)
        assert graph is not None
        if not self._is_warned_of_change:
            self._is_warned_of_change = True
            warnings.warn(
                f"pergrad.compiled: {graph.guards.changed()} since the step was traced. A graph keeps such "
                "values, so the step runs uncompiled until two calls have the same ones, and is then traced "
                "again: pass what changes often as a tensor in the batch",
                stacklevel=5,
            )
        if latest is None or latest.changed() is not None:
            self._latest[key] = graph.guards_of_now()
            return False
        return self.graphs < self._max_graphs

    def _expected(self, flat: list[Any], spec: Any) -> Summary | None:
        """Summarises an uncompiled run on copies of the batch; None if it draws, or fails."""
        copies: dict[int, Tensor] = {}
        for t in flat:
            if isinstance(t, Tensor) and id(t) not in copies:
                copies[id(t)] = t.detach().clone().requires_grad_(t.requires_grad)
        values = [copies.get(id(value), value) for value in flat]
        quantities = copies_of(self._filled)
        with undisturbed(self._model) as before:
            try:
                losses = self._run(quantities, internals.pytree.tree_unflatten(values, spec))
            except Exception:
                return None
            if not before.draws_as(Snapshot(self._model)):
                return None
            return Summary.of(losses, quantities)

    def _repeats(self, losses: Tensor, before: Snapshot, batch: tuple[Any, ...]) -> bool:
        """Whether an uncompiled run gives the losses of the graph, as far as it draws no random numbers."""
        with undisturbed(self._model):
            before.restore()
            expected = self._run(copies_of(self._filled), batch)
            if not before.draws_as(Snapshot(self._model)):
                return True
        close = tolerance_of_model(expected.dtype, torch.float32) * max(largest(expected), 1e-30)
        return largest(losses - expected) <= close or not bool(expected.isfinite().all())

    def _is_empty(self, flat: Sequence[Any]) -> bool:
        """Whether the batch has no samples: there is nothing to compile."""
        dim = self._options.batch_dim
        return any(isinstance(t, Tensor) and t.shape[dim : dim + 1] == (0,) for t in flat)

    def _uncompiled(self, key: Any, batch: tuple[Any, ...]) -> Tensor:
        """Runs the step as it is; certifies it if this is the signature's first time."""
        try:
            losses = self._run_uncompiled(key, batch)
        except BaseException:
            if self._graphs.get(key, _REFUSED) is None:
                del self._graphs[key]  # a trace does not see all that is refused
            raise
        self._note_skeletons(key)
        return losses

    def _run_uncompiled(self, key: Any, batch: tuple[Any, ...]) -> Tensor:
        if not self._certify or key in self._certified:
            return self._runner.run(
                self._model, self._loss_fn, batch, self._filled, self._options, key=key
            )
        losses, report = certified_run(
            self._model,
            self._loss_fn,
            batch,
            self._filled,
            self._options,
            runner=self._runner,
            key=key,
        )
        report.check()
        self._certified.add(key)
        return losses

    def _note_skeletons(self, key: Any) -> None:
        """Notes what the quantities hold after the first step of a signature, for the trace of the second."""
        is_first = key in self._graphs and self._graphs[key] is None
        if self._why_not is None and is_first and key not in self._skeletons:
            self._skeletons[key] = [
                {name: skeleton(value) for name, value in vars(q).items()} for q in self._filled
            ]

    def _first_run(
        self, graph: _CompiledGraph, state: list[Tensor], flat: list[Any], batch: tuple[Any, ...]
    ) -> Tensor:
        """Runs a new graph; certifies its results by a certified, uncompiled run from the same state."""
        if not self._certify:
            return graph.run(state, flat, self._filled)
        snapshot, copies = Snapshot(self._model), copies_of(self._filled)
        losses = graph.run(state, flat, self._filled)
        if graph.assumes and self._even.is_misplaced:  # the step runs again, uncompiled
            return losses
        with undisturbed(self._model):
            snapshot.restore()
            expected, report = certified_run(
                self._model, self._loss_fn, batch, copies, self._options, mixing=False
            )
        report.check()
        check_graph(
            (losses, expected), self._filled, copies, graph.template.attributes, report.dtype
        )
        return losses

    def _stay_uncompiled(self, reason: str) -> None:
        self._why_not = reason
        warnings.warn(
            f"pergrad.compiled: the step cannot be traced and runs uncompiled ({reason})",
            stacklevel=5,
        )

    def _wants_graph(self, key: Any) -> bool:
        """Whether to run a graph: from the second call with a signature on, up to `max_graphs` of them."""
        if key in self._graphs:
            if self._graphs[key] is not None or self.graphs < self._max_graphs:
                return True
            if not self._is_warned:
                self._is_warned = True
                warnings.warn(
                    f"pergrad.compiled: {self._max_graphs} different signatures are compiled already, "
                    "further ones run uncompiled: pad batches to fewer shapes, or raise max_graphs",
                    stacklevel=4,
                )
            return False
        self._graphs[key] = None
        return False

    def _run(self, quantities: Sequence[Quantity], batch: Sequence[Any]) -> Tensor:
        return run_recorded(self._model, self._loss_fn, batch, quantities, self._options)

    def _made(
        self,
        state: list[Tensor],
        flat: list[Any],
        spec: Any,
        skeletons: list[dict[str, Any]] | None,
    ) -> _CompiledGraph | None:
        """Traces and compiles the step; warns with the reason if either fails, and then does without it."""
        try:
            with nullcontext() if self._backend == "inductor" else without_compiler():
                trace = trace_step(
                    self._run,
                    self._model,
                    self._filled,
                    state,
                    flat,
                    spec,
                    loss_fn=self._loss_fn,
                    skeletons=skeletons,
                )
        except Exception as error:
            self._stay_uncompiled(reason_of(error))
            return None
        call: Callable[..., Any]
        if self._backend == "inductor":
            try:
                inputs = graph_inputs(state, flat)
                call = compile_graph(trace.graph, inputs, draws_as_eager=self._certify)
            except Exception as error:
                self._backend = "eager"
                warnings.warn(
                    "pergrad.compiled: the compiler failed, so steps run as with "
                    f'backend="eager" ({reason_of(error)})',
                    stacklevel=4,
                )
                return self._made(state, flat, spec, skeletons)
        else:
            call = as_python(trace.graph)
        if self._cuda_graphs:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            call = Replayed(call, len(state), self._pool)
        assumes = bool(trace.template.attributes[-1].get("misplaced"))
        guards = trace.guards()
        return _CompiledGraph(
            call,
            trace.template,
            guards,
            trace.guards,
            assumes,
            inputs_written(trace.graph),
            not assumes and not guards.has_generators,
            computes_in_half(trace.graph),
        )


@dataclass(frozen=True)
class _CompiledGraph:
    """Holds a compiled step for one signature, the template of its results, and what it depends on."""

    call: Callable[..., Any]
    template: Template
    guards: Guards  # the Python values that it was traced with
    guards_of_now: Callable[[], Guards]
    assumes: bool  # whether to look afterwards if samples got rows of others
    writes: tuple[int, ...]  # the inputs that it writes to
    is_comparable: bool  # with a plain forward pass: it has no random numbers of its own
    is_rough: bool  # whether anything is computed in half precision

    def run(self, state: list[Tensor], flat: list[Any], quantities: Sequence[Quantity]) -> Tensor:
        clear(quantities, self.template)
        with torch.no_grad(), internals.DisableAutocast():  # the graph has its own casts
            loss, *results = self.call(*graph_inputs(state, flat))
        fill(quantities, self.template, results, state)
        return loss
