"""Records one batch through one module: opens and closes what that needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.distributed.data_parallel import without_gradient_reduction
from pergrad.distributed.groups import is_of_lost_rank, is_running, lost_rank
from pergrad.distributed.pipelines import PIPELINES, Pipeline, refuse_pipelines
from pergrad.distributed.sharding import reshard
from pergrad.distributed.spread import Spread
from pergrad.distributed.wrappers import spread_of
from pergrad.engine.collecting.blocks import refuse_second_block
from pergrad.engine.collecting.hooks import guarding_modules
from pergrad.engine.collecting.journal import Journal
from pergrad.engine.collecting.kept_gradients import KeptGradients
from pergrad.engine.collecting.ledger import Ledger
from pergrad.engine.intercepting.autograd_functions import intercepting_functions
from pergrad.engine.intercepting.ladder import expanded
from pergrad.engine.intercepting.recorder import Recorder
from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.intercepting.weights import refusing_ordinary_gradients
from pergrad.engine.recording.adopting import Adopter
from pergrad.engine.recording.arguments import is_graph_batch
from pergrad.engine.recording.inputs import (
    ONLY_TENSORS,
    batch_size_of,
    inputs_of,
    mark_inputs,
    mark_owned,
)
from pergrad.engine.recording.loss_units import LossReader
from pergrad.engine.recording.modes import entered_beneath_modes, foreign_modes
from pergrad.engine.recording.modules import (
    hooks_of_parameters,
    refuse_new_parameters,
    submodules,
    survey,
)
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.owning import named_leaves, ownership_in
from pergrad.engine.recording.starting import batch_of_part, batch_of_step
from pergrad.engine.samples.layouts import ROWS, Lost, Owners, Samples, Scope
from pergrad.engine.samples.proving import APART, keeps_apart, sources_of
from pergrad.engine.samples.shares import note_output
from pergrad.errors import BatchSizeError, MixedSamplesError, PergradError, ScopeError
from pergrad.quantities import Quantity
from pergrad.runtime import internals, is_traced
from pergrad.runtime.containers import parts_of
from pergrad.runtime.eagerness import running_eagerly

_NOTHING = nullcontext()  # made once: every step enters it

__all__ = ["Recording", "check_module", "check_quantities", "is_recording", "recorded"]


def check_module(module: Any) -> None:
    """Refuses anything but a module, in the words of PyTorch's own check."""
    if not isinstance(module, nn.Module):
        raise PergradError(f"Module passed must be nn.Module, got {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule):
        raise PergradError(
            f"the module is scripted or traced ({type(module).__name__}), and its functions run out of sight "
            "of Python: record the module that it was made from"
        )


def check_quantities(quantities: Sequence[Any], *, may_have_results: bool = False) -> bool:
    """Refuses an empty list, anything but quantities, and a quantity that is passed or used twice.

    Returns whether any has a result to add to.
    """
    is_again = False
    if not quantities:
        raise PergradError(
            "nothing to compute: pass at least one quantity, such as pergrad.Grads()"
        )
    for quantity in quantities:
        if Quantity not in type(quantity).__mro__:  # `isinstance` asks an ABC, which takes a while
            if isinstance(quantity, type) and issubclass(quantity, Quantity):
                raise PergradError(
                    f"{quantity.__name__} is a class: pass an object, such as {quantity.__name__}(...)"
                )
            if not isinstance(quantity, Quantity):
                raise PergradError(f"expected quantities, got {type(quantity).__name__}")
        if quantity.is_full:
            if not may_have_results:
                refuse_second_block(quantity)
            is_again = True
    if len(quantities) > 1 and len(set(map(id, quantities))) < len(quantities):
        raise PergradError("the same quantity is passed twice: each needs an object of its own")
    return is_again


def is_recording() -> bool:
    """Whether a recording is open in this thread."""
    modes = internals.function_modes()
    return bool(modes) and any(isinstance(mode, Recorder) for mode in modes)


class Recording:
    """One batch through one module: the recorder that sees its calls, and the ledger of its gradients."""

    def __init__(
        self,
        module: nn.Module,
        quantities: Sequence[Quantity],
        options: Options,
        journal: Journal | None = None,
        *,
        is_block: bool = False,
        batch: Sequence[Any] | None = None,
        kept: KeptGradients | None = None,
    ) -> None:
        """Prepares a recording; `is_block`: of `record`, and not of PyTorch's contract.

        `kept` are the ordinary gradients of the block that it is a part of.
        """
        self._module = module
        self._is_spread = is_running()
        units = reshard(module) if self._is_spread else []
        self._batch = batch  # the arguments of the loss function, if there is one
        self._is_block = is_block
        self._is_empty = False
        self._unwanted: KeptGradients | None = None  # ordinary gradients of an empty batch
        self._left_out: list[Tensor] = []  # trainable parameters that were not asked for
        self._weights, self.own, self._hooked = survey(module)
        keeps = options.keep_grad
        self._kept = kept or (KeptGradients(self._weights.values()) if keeps else None)
        self._parameter_hooks = hooks_of_parameters(self._weights, may_accumulate=keeps)
        if options.params is not None:
            trainable = self._weights
            self._weights = options.chosen(module, trainable)
            if not keeps:
                self._left_out = [p for name, p in trainable.items() if name not in self._weights]
        self._quantities = quantities
        self._options = options
        self._recorder = Recorder(self._weights, journal, self._kept)
        self._spread = Spread()
        if self._is_spread:
            self._spread = spread_of(module, units, self._weights, self._parameter_hooks)
        shards, self._adopter = self._spread.shards, None
        if shards is not None:
            self._adopter = Adopter(shards, self._recorder, self._may_reach_weights, self._kept)
        self._ledger: Ledger | None = None
        self._tracker: Tracker | None = None
        self._reader: LossReader | None = None
        self._is_collecting = False
        self._marked: list[Tensor] = []
        self.ownership = options.ownership

    def begin(self, size: int) -> None:
        """Records everything from here on, as a batch of `size` samples.

        Without samples there is nothing to record: the block runs as it is.
        """
        options = self._options
        self._ledger = Ledger(
            self._quantities,
            size,
            self._weights,
            scale=options.scale(size) if options.is_scaled else 1.0,
            max_bytes=options.max_bytes,
            offload=options.offload,
            hooks=self._parameter_hooks,
            spread=self._spread,
        )
        if self._is_collecting:
            self._ledger.open()
        if size == 0:
            self._is_empty = True
            if self._kept is None:
                self._unwanted = KeptGradients(self._weights.values())
            if self._spread.shards is not None:
                self._recorder.begin_without_samples(self._ledger)
            return
        scope = Scope(size, tells_reduction=options.loss_reduction == "auto")
        self._tracker = Tracker(scope, options.batch_dim, self.own)
        if self._is_block:
            self._recorder.read_loss = self._read_loss
            self._ledger.skips_sums = options.loss_scale is None
            self._ledger.calls = options.calls
        self._recorder.begin(self._tracker, self._ledger.uses, self._ledger)
        if self._adopter is not None:
            self._tracker.adopt = self._adopter.adopt

    def await_use(self) -> None:
        """Lets the first use of a weight begin the recording, if the module is not called before."""
        self._recorder.start = self._begin_at_use

    def _begin_at_use(self) -> None:
        """Begins where a weight is used before the module is called; not if nothing tells the batch."""
        if self._ledger is not None:  # an empty batch
            return
        with internals.DisableTorchFunction():
            dim = self._options.batch_dim
            found = batch_of_step(self._batch, dim) or batch_of_part(submodules(self._module), dim)
            if found is None:
                return
            inputs, size = found
            earlier = self._recorder.earlier
            self.begin(size)
            if self._tracker is None:
                return
            self._marked += mark_inputs(self._tracker, inputs)
        self._recorder.follow(earlier, self._marked)

    def enter_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Enters the module's own forward: its arguments carry the samples, other tensors do not."""
        if self._is_spread and self._spread.pipeline is None:
            refuse_pipelines()
        with internals.DisableTorchFunction():  # reading the arguments is no part of the model
            if self._mark_owned(self._module.forward, args, kwargs):
                self._set_inside()
                return
            inputs = inputs_of(self._module, self._options.batch_dim, args, kwargs)
            if self._tracker is None:
                size = batch_size_of(inputs, args, kwargs, may_be_empty=self._is_block)
                if self._ledger is None:
                    self.begin(size)
                elif size:
                    raise BatchSizeError(
                        f"the module was called with a batch of {size} samples after an empty one: record "
                        "each in a block of its own"
                    )
            if self._tracker is None:
                return
            marked = mark_inputs(self._tracker, inputs)
            self._marked += marked
        if marked:  # else it was called with tensors of the same samples
            self._tracker.scope.call += 1
        self._set_inside()

    def _set_inside(self) -> None:
        assert self._tracker is not None
        self._tracker.untagged_are_constant = True

    def mark_batch(self, loss_fn: Callable[..., Any], batch: Sequence[Any]) -> None:
        """Tells the samples of a loss function's arguments, if their rows have owners."""
        with internals.DisableTorchFunction():
            self._mark_owned(loss_fn, batch, {}, skipped=1)

    def _mark_owned(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        skipped: int = 0,
    ) -> bool:
        """Marks arguments by the owners of their rows; returns False if there are none."""
        if self.ownership is None:
            given = (*args, *kwargs.values())
            if ONLY_TENSORS.issuperset(map(type, given)) or not any(map(is_graph_batch, given)):
                return False
        named = named_leaves(function, args, kwargs, skipped=skipped)
        own = ownership_in(self.ownership, named)
        assert own is not None
        if self.ownership is None or not self._marked:
            own.check_used(named)
        self.ownership = own
        if self._tracker is None:
            self.begin(own.count)
        assert self._tracker is not None
        if skipped == 0 and self._marked:  # positions are those of the loss function's arguments
            named = [
                (tuple(name for name in names if isinstance(name, str)), t, entry)
                for names, t, entry in named
            ]
        self._tracker.scope.known = [ids for ids in own.vectors.values() if ids is not None]
        self._marked += mark_owned(self._tracker, own, named)
        return True

    def by_sample(self, losses: Any) -> Any:
        """Sums losses that are given for each row, if the rows have owners; checks whose they are."""
        own = self.ownership
        if own is None or self._tracker is None or not isinstance(losses, Tensor):
            return losses
        ids = own.ids_of_losses(losses)
        if ids is None:
            return losses
        with internals.DisableTorchFunction():
            self._check_rows(losses, self._tracker.scope.owners(0, ids))
            found = own.summed(losses)
            self._tracker.mark(found, self._tracker.scope.samples(0))
        return found

    def judge_output(self, output: Any) -> None:
        """Judges results that were made out of sight where no later function does: mixed ones are refused."""
        if self._tracker is not None:
            with internals.DisableTorchFunction():
                for t in parts_of(output):
                    if isinstance(t, Tensor) and t.requires_grad:
                        self._tracker.tag(t)

    def leave_forward(self, output: Any = None) -> None:
        if self._tracker is None:
            return
        self._tracker.untagged_are_constant = False
        if self._tracker.scope.tells_reduction:
            with internals.DisableTorchFunction():  # reading the output is no part of the model
                for t in (output,) if isinstance(output, Tensor) else parts_of(output):
                    if isinstance(t, Tensor):
                        note_output(t)

    @contextmanager
    def taking_losses(self) -> Iterator[None]:
        """Takes the numbers on losses, (B,), as they are while they are added up."""
        if self._tracker is None:
            yield
            return
        scope = self._tracker.scope
        scope.takes_losses = True
        try:
            yield
        finally:
            scope.takes_losses = False

    def separated(self, losses: Any) -> Any:
        """Returns losses, (B,), that depend on weights and constants alone as losses of the samples."""
        tracker = self._tracker
        if tracker is None or not isinstance(losses, Tensor) or losses.dim() != 1:
            return losses
        weight = tracker.weight_of(losses)
        if weight is None or len(losses) != tracker.scope.count:
            return losses
        with internals.DisableTorchFunction():
            own = expanded(weight).diagonal()  # of (B, B): row n is the loss of sample n
            tracker.mark(own, tracker.scope.samples(0))
        return own

    def check_losses(self, losses: Tensor) -> None:
        """Raises an error unless row n of the losses, (B,), is the loss of sample n.

        A scalar says nothing about the samples: the module must have got as many rows as loss_fn did.
        """
        tracker = self._tracker
        if tracker is None or not losses.requires_grad:
            return
        if not losses.dim():
            self._check_size(tracker.scope.count)
            return
        with internals.DisableTorchFunction():
            scope = tracker.scope
            if len(losses) != scope.count:
                raise BatchSizeError(
                    f"loss_fn returned {len(losses)} losses for a batch of {scope.count} samples: return "
                    "one loss for each sample, or tell the number of samples by batch_size= and their "
                    "dimension by batch_first="
                )
            self._check_rows(losses, scope.samples(0))
            scope.has_losses = True

    def _check_size(self, count: int) -> None:
        if self._options.batch_size is not None or self.ownership is not None:
            return
        given = batch_of_step(self._batch, self._options.batch_dim)
        if given is not None and given[1] != count:
            raise BatchSizeError(
                f"the module was called with {count} rows, but the arguments of loss_fn have {given[1]}: "
                f"pass batch_size={given[1]} to get the gradients of as many samples, or batch_size={count}"
            )

    def _check_rows(self, losses: Tensor, wanted: Samples | Owners) -> None:
        """Raises an error unless each row of the losses belongs to the sample that a layout says."""
        tracker = self._tracker
        assert tracker is not None
        scope, layout = tracker.scope, tracker.layout(losses)
        if (
            layout.key == ROWS == wanted.key
            or scope.count == 1
            or tracker.weight_of(losses) is not None
        ):
            return
        if isinstance(layout, Samples | Owners) and layout.dim == 0 and not is_traced(losses):
            device = losses.device
            if torch.equal(layout.owner_of_each(device), wanted.owner_of_each(device)):
                return
        if isinstance(layout, Owners) and layout.dim == 0 and is_traced(layout.owner):
            wrong = layout.owner != wanted.owner_of_each(losses.device)
            scope.misplaced.append(wrong.any())  # looked at when the graph has run
            return
        if isinstance(layout, Lost) and layout.why in ("mixed", "unknown"):
            return  # the backward raises with the reason
        sources, is_packed = sources_of(losses, scope)
        is_judged = sources is not None and not is_packed and not is_traced(losses)
        if layout.has_samples and not sources:
            is_judged = False  # uses of weights are out of sight, as in a reentrant checkpoint
        if is_judged and keeps_apart(losses, wanted, sources or ()) in APART:
            return
        raise MixedSamplesError(
            "row n of the losses does not depend on sample n alone: the samples were reordered, or losses of "
            "several were added up; return the losses in the order of the batch, one for each sample"
        )

    def _read_loss(self, tensors: Any, gradients: Any) -> None:
        """Reads the factor on every sample's loss off the tensors that a backward pass starts from."""
        assert self._tracker is not None
        assert self._ledger is not None
        if self._reader is None:
            self._reader = LossReader(self._options, self._tracker, self._ledger.units)
        self._reader.read(tensors, gradients)

    @property
    def uneven(self) -> list[Tensor]:
        """Returns whether samples have different numbers of valid positions, for every mean over these."""
        return [] if self._tracker is None else self._tracker.scope.uneven

    @property
    def misplaced(self) -> list[Tensor]:
        """Returns whether samples got rows of others, for every call of which a trace cannot tell."""
        return [] if self._tracker is None else self._tracker.scope.misplaced

    def check_complete(self) -> None:
        """Raises an error if nothing was recorded."""
        if self._ledger is None:
            raise ScopeError("the recorded module was not called inside the `record` block")
        if not self._is_empty and not self.has_arrived:
            raise ScopeError(
                "no gradient reached a recorded parameter: call backward() on a loss of the "
                "module's output inside the `record` block"
            )

    @property
    def has_arrived(self) -> bool:
        """Whether a gradient has reached a recorded parameter."""
        ledger = self._ledger
        return ledger is not None and bool(ledger.uses.arrived or ledger.queue.work)

    @property
    def recorder(self) -> Recorder:
        return self._recorder

    @property
    def is_empty(self) -> bool:
        return self._is_empty

    def start_collecting(self) -> None:
        """Collects gradients from here on; for a part of a block, which the block itself closes."""
        self._is_collecting = True

    @property
    def scale(self) -> Tensor | float:
        """Returns what each sample's gradient was multiplied by, to undo the reduction of the loss."""
        return 1.0 if self._ledger is None else self._ledger.units.scale

    def in_pipeline(self, pipeline: Pipeline) -> None:
        """Tells that the module is a stage of a pipeline, before its first call."""
        if self._spread.shards is not None:
            raise PergradError(
                f"a stage of {PIPELINES} is sharded by fully_shard, whose parameters come and go between "
                "microbatches: record stages without fully_shard, or fully_shard without a pipeline"
            )
        self._spread.pipeline = pipeline

    def clean_up(self) -> None:
        """Takes all tags off, also those of results that the caller keeps."""
        if self._tracker is not None:
            self._tracker.untag()
        self._marked.clear()
        self._recorder.read_loss = None  # it holds this object

    def pause(self) -> None:
        """Takes the tags off the arguments and the module's own tensors until the backward pass comes."""
        Tracker.unmark(*self._marked, *self.own)
        self._marked.clear()

    @contextmanager
    def _spreading(self) -> Iterator[None]:
        """Within, the module runs on many ranks: wrappers reduce no gradients, and shards are summed."""
        shards, keeps = self._spread.shards, self._kept is not None
        with (
            without_gradient_reduction(self._module, self._weights, self._spread, keeps=keeps),
            nullcontext() if shards is None else shards.watching(self._leave),
            nullcontext() if shards is None else shards.dropping_gradients(self._has_unwanted),
            nullcontext() if shards is None else shards.gathering_unseen(),
            nullcontext() if shards is None else shards.adopting(self._adopt),
        ):
            try:
                yield
            except RuntimeError as error:
                if isinstance(
                    error.__cause__, PergradError
                ):  # a pipeline wraps errors of its stages
                    raise error.__cause__ from None
                cause = error.__cause__ or error
                if is_of_lost_rank(cause):
                    raise lost_rank(cause, "a recorded step") from error
                raise

    def _adopt(self) -> None:
        if self._tracker is not None and self._adopter is not None:
            with internals.DisableTorchFunction():
                self._adopter.adopt()

    def _has_unwanted(self) -> bool:
        return self._unwanted is not None

    def _leave(self, names: list[str]) -> None:
        """Sums the quantities of parameters over ranks, once the backward pass has left their module."""
        if self._ledger is not None and self._is_collecting:
            with internals.DisableTorchFunction():
                self._ledger.sum_over_ranks(names)

    def _may_reach_weights(self) -> bool:
        if self._is_empty:
            return True
        return self._tracker is not None and self._tracker.scope.may_reach_weights

    @contextmanager
    def intercepting(self) -> Iterator[None]:
        """Within, the recorder sees every function; parameters that were not asked for are frozen."""
        is_within_modes = bool(internals.function_modes())
        if is_within_modes and is_recording():
            raise ScopeError(
                "recordings cannot be nested: end the outer one first, or record one module that "
                "holds both (for example an nn.ModuleList)"
            )
        for p in self._left_out:
            p.requires_grad_(False)
        try:
            hooked = guarding_modules(self._hooked) if self._hooked else _NOTHING
            spread = self._spreading() if self._is_spread else _NOTHING
            recorder: AbstractContextManager[Any] = self._recorder
            if is_within_modes and foreign_modes():
                recorder = entered_beneath_modes(self._recorder)
            with running_eagerly(), spread, hooked, intercepting_functions(), recorder:
                yield
        except PergradError:
            self._recorder.restore_buffers()
            if self._spread.shards is not None:
                self._spread.shards.reset()
            raise
        finally:
            for p in self._left_out:
                p.requires_grad_(True)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Within, gradients are collected; one that reaches a parameter past the recorder is an error."""
        self._is_collecting = True
        if self._ledger is not None:
            self._ledger.open()
        try:
            adopted = _NOTHING if self._adopter is None else self._adopter.refusing_gradients()
            refusing = refusing_ordinary_gradients(
                self._weights, self._may_reach_weights, self._kept
            )
            with refusing, adopted:
                yield
        except BaseException:
            self.abandon()
            raise
        finally:
            self._is_collecting = False
            if self._unwanted is not None:
                self._unwanted.restore()
        try:
            self.finish()
        except BaseException:
            self.abandon()
            raise

    def finish(self) -> None:
        """Makes the checks that need the whole block, and ends the quantities."""
        if self._tracker is not None:
            if self._tracker.promises:
                self._tracker.check_promises()
            if self._tracker.strangers:
                refuse_new_parameters(self._module, self._tracker.strangers)
        if self._ledger is not None:
            self._ledger.close()

    def abandon(self) -> None:
        """Drops what was recorded after an error, and the gradients that were kept."""
        if self._ledger is not None:
            self._ledger.abandon()
        if self._kept is not None:
            self._kept.restore()


def holds_stages(module: nn.Module) -> bool:
    """Whether a module is a list of others, such as the stages of a pipeline, and is never called itself."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


@contextmanager
def recorded(
    module: nn.Module,
    quantities: Sequence[Quantity],
    options: Options,
    *,
    journal: Journal | None = None,
    batch: Sequence[Any] | None = None,
    kind: type[Recording] | None = None,
) -> Iterator[Recording]:
    """Within, functions are recorded; at the end the quantities have their results.

    `journal` notes which rung computes the gradients of each parameter. `batch` has the arguments of the loss
    function, if there is one: they tell the batch size if the loss does not call the module itself. `kind` is
    `MicroBatches` where each call of the module has further samples.
    """
    check_module(module)
    kind = kind or Recording
    recording = kind(module, quantities, options, journal, is_block=True, batch=batch)

    thread = get_ident()  # another one may record the module, too

    # Torch adds a hook before the note that it takes keywords: a call in another thread may be in between.
    def before_forward(_: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> None:
        if get_ident() == thread:
            recording.enter_forward(args, kwargs)

    def after_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if get_ident() == thread:
            recording.leave_forward(output)

    called = module.children() if options.calls == "more" and holds_stages(module) else [module]
    unhook = [internals.hook_forward(m, before_forward, after_forward) for m in called]
    try:
        with recording.collecting(), recording.intercepting():
            if options.batch_size is not None:
                recording.begin(options.batch_size)
            else:
                recording.await_use()
            yield recording
            recording.check_complete()
    finally:
        for remove in unhook:
            remove()
        recording.clean_up()
