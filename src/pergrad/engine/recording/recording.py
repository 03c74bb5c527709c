"""Records one batch through one module: opens and closes what that needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from pergrad.engine.collecting.hooks import guarding_modules
from pergrad.engine.collecting.ledger import Ledger
from pergrad.engine.intercepting.autograd_functions import intercepting_functions
from pergrad.engine.intercepting.journal import Journal
from pergrad.engine.intercepting.recorder import Recorder
from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.intercepting.weights import refusing_ordinary_gradients
from pergrad.engine.recording.inputs import batch_size_of, inputs_of, mark_inputs
from pergrad.engine.recording.modules import (
    hooks_of_parameters,
    refuse_new_parameters,
    survey,
)
from pergrad.engine.recording.options import Options
from pergrad.engine.samples.layouts import ROWS, Lost, Scope
from pergrad.engine.samples.proving import APART, keeps_apart, sources_of
from pergrad.errors import BatchSizeError, MixedSamplesError, PergradError, ScopeError
from pergrad.quantities import Quantity
from pergrad.runtime import internals, is_traced
from pergrad.runtime.eagerness import running_eagerly

__all__ = ["Recording", "check_module", "check_quantities", "recorded"]


def check_module(module: Any) -> None:
    """Refuses anything but a module, in the words of PyTorch's own check."""
    if not isinstance(module, nn.Module):
        raise PergradError(f"Module passed must be nn.Module, got {type(module).__name__}")


def check_quantities(quantities: Sequence[Any]) -> None:
    """Refuses an empty list, anything but quantities, and one quantity passed twice."""
    if not quantities:
        raise PergradError(
            "nothing to compute: pass at least one quantity, such as pergrad.Grads()"
        )
    for quantity in quantities:
        if isinstance(quantity, type) and issubclass(quantity, Quantity):
            raise PergradError(
                f"{quantity.__name__} is a class: pass an object, such as {quantity.__name__}(...)"
            )
        if not isinstance(quantity, Quantity):
            raise PergradError(f"expected quantities, got {type(quantity).__name__}")
    if len({id(quantity) for quantity in quantities}) < len(quantities):
        raise PergradError("the same quantity is passed twice: each needs an object of its own")


class Recording:
    """One batch through one module: the recorder that sees its calls, and the ledger of its gradients."""

    def __init__(
        self,
        module: nn.Module,
        quantities: Sequence[Quantity],
        options: Options,
        journal: Journal | None = None,
    ) -> None:
        self._module = module
        self._left_out: list[Tensor] = []  # trainable parameters that were not asked for
        self._weights, self._own, self._hooked = survey(module)
        self._parameter_hooks = hooks_of_parameters(self._weights)
        if options.params is not None:
            trainable = self._weights
            self._weights = options.chosen(module, trainable)
            self._left_out = [p for name, p in trainable.items() if name not in self._weights]
        self._quantities = quantities
        self._options = options
        self._recorder = Recorder(self._weights, journal)
        self._ledger: Ledger | None = None
        self._tracker: Tracker | None = None
        self._is_collecting = False
        self._marked: list[Tensor] = []

    def begin(self, size: int) -> None:
        """Records everything from here on, as a batch of `size` samples."""
        options = self._options
        self._ledger = Ledger(
            self._quantities,
            size,
            self._weights,
            scale=options.scale(size) if options.is_scaled else 1.0,
            max_bytes=options.max_bytes,
            offload=options.offload,
            hooks=self._parameter_hooks,
        )
        self._tracker = Tracker(Scope(size), options.batch_dim, self._own)
        if self._is_collecting:
            self._ledger.open()
        self._recorder.begin(self._tracker, self._ledger.uses, self._ledger)

    def enter_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Enters the module's own forward: its arguments carry the samples, other tensors do not."""
        with internals.DisableTorchFunction():  # reading the arguments is no part of the model
            inputs = inputs_of(self._module, self._options.batch_dim, args, kwargs)
            if self._tracker is None:
                self.begin(batch_size_of(inputs, args, kwargs))
            assert self._tracker is not None
            self._marked += mark_inputs(self._tracker, inputs)
        self._tracker.untagged_are_constant = True

    def leave_forward(self) -> None:
        if self._tracker is not None:
            self._tracker.untagged_are_constant = False

    def check_losses(self, losses: Tensor) -> None:
        """Raises an error unless row n of the losses, (B,), is the loss of sample n."""
        tracker = self._tracker
        if tracker is None or not losses.dim() or not losses.requires_grad:
            return
        with internals.DisableTorchFunction():
            scope, layout = tracker.scope, tracker.layout(losses)
            if len(losses) != scope.count:
                raise BatchSizeError(
                    f"loss_fn returned {len(losses)} losses for a batch of {scope.count} samples: return "
                    "one loss for each sample, or tell the number of samples by batch_size= and their "
                    "dimension by batch_first="
                )
            if layout.key == ROWS or scope.count == 1 or tracker.weight_of(losses) is not None:
                return
            if isinstance(layout, Lost) and layout.why in ("mixed", "unknown"):
                return  # the backward raises with the reason
            sources, is_packed = sources_of(losses, scope)
            is_judged = sources is not None and not is_packed and not is_traced(losses)
            if is_judged and keeps_apart(losses, scope.samples(0), sources or ()) in APART:
                return
        raise MixedSamplesError(
            "row n of the losses does not depend on sample n alone: the samples were reordered, or losses of "
            "several were added up; return the losses in the order of the batch, one for each sample"
        )

    def check_complete(self) -> None:
        """Raises an error if nothing was recorded."""
        if self._ledger is None:
            raise ScopeError("the recorded module was not called inside the `record` block")
        if not self._ledger.uses.arrived and not self._ledger.queue.work:
            raise ScopeError(
                "no gradient reached a recorded parameter: call backward() on a loss of the "
                "module's output inside the `record` block"
            )

    def clean_up(self) -> None:
        """Takes the tags off the caller's tensors and the module's own."""
        Tracker.unmark(*self._marked, *self._own)
        self._marked.clear()

    def _may_reach_weights(self) -> bool:
        return self._tracker is not None and self._tracker.scope.may_reach_weights

    @contextmanager
    def intercepting(self) -> Iterator[None]:
        """Within, the recorder sees every function; parameters that were not asked for are frozen."""
        for mode in internals.function_modes():
            if isinstance(mode, Recorder):
                raise ScopeError(
                    "recordings cannot be nested: end the outer one first, or record one module that "
                    "holds both (for example an nn.ModuleList)"
                )
        for p in self._left_out:
            p.requires_grad_(False)
        try:
            hooked = guarding_modules(self._hooked) if self._hooked else nullcontext()
            with running_eagerly(), hooked, intercepting_functions(), self._recorder:
                yield
        except PergradError:
            self._recorder.restore_buffers()
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
            with refusing_ordinary_gradients(self._weights, self._may_reach_weights):
                yield
        except BaseException:
            if self._ledger is not None:
                self._ledger.abandon()
            raise
        finally:
            self._is_collecting = False
        if self._tracker is not None:
            try:
                if self._tracker.promises:
                    self._tracker.check_promises()
                if self._tracker.strangers:
                    refuse_new_parameters(self._module, self._tracker.strangers)
            except PergradError:
                if self._ledger is not None:
                    self._ledger.abandon()
                raise
        if self._ledger is not None:
            self._ledger.close()


@contextmanager
def recorded(
    module: nn.Module,
    quantities: Sequence[Quantity],
    options: Options,
    *,
    journal: Journal | None = None,
) -> Iterator[Recording]:
    """Within, functions are recorded; at the end the quantities have their results.

    `journal` notes which rung computes the gradients of each parameter.
    """
    check_module(module)
    recording = Recording(module, quantities, options, journal)

    def before_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recording.enter_forward(args, kwargs)

    def after_forward(*_: Any) -> None:
        recording.leave_forward()

    before = module.register_forward_pre_hook(before_forward, with_kwargs=True, prepend=True)
    after = module.register_forward_hook(after_forward, always_call=True)
    try:
        with recording.collecting(), recording.intercepting():
            if options.batch_size is not None:
                recording.begin(options.batch_size)
            yield recording
            recording.check_complete()
    finally:
        before.remove()
        after.remove()
        recording.clean_up()
