"""Records each call of a module in a block as further samples: `calls="more"`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.distributed.pipelines import PIPELINES, Pipeline, RunningStage, running_stage
from pergrad.engine.collecting.journal import Journal
from pergrad.engine.intercepting.recorder import Recorder
from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.recording import Recording, holds_stages
from pergrad.engine.samples.layouts import Scope
from pergrad.engine.samples.propagation import tensors_in
from pergrad.engine.samples.tags import TAG
from pergrad.errors import MixedSamplesError, PergradError, ScopeError
from pergrad.quantities import Quantity

__all__ = ["MicroBatches"]


class _Dispatcher(Recorder):
    """Passes each function to the recorder of the call that its arguments come from."""

    def __init__(self) -> None:
        super().__init__({})
        self._recorders: dict[Scope, Recorder] = {}
        self.current: Recorder | None = None
        self.merges = False  # whether results of several calls may meet, as a pipeline returns them

    def add(self, recorder: Recorder) -> None:
        self._recorders[recorder.tracker.scope] = recorder
        self.current = recorder

    def _choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorder | None:
        """Chooses the recorder of the arguments that need a gradient, or else the last one."""
        found = None
        for t in tensors_in(args, kwargs):
            scope = getattr(getattr(t, TAG, None), "scope", None)
            if scope in self._recorders and t.requires_grad:
                recorder = self._recorders[scope]
                if found is not None and found is not recorder:
                    if self.merges:  # a gradient through them is an error
                        return None
                    raise MixedSamplesError(
                        'calls="more" makes each call of the module a batch of its own, but a function '
                        'combines the results of two of them: pass calls="same" if these are the same '
                        "samples, or call backward() for each loss"
                    )
                found = recorder
        self.current = found or self.current
        return self.current

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        recorder = self._choose(args, kwargs or {})
        if recorder is None:
            return func(*args, **(kwargs or {}))
        return recorder.__torch_function__(func, types, args, kwargs)

    # What calls of autograd.Functions and torch.vmap ask for.

    @property
    def tracker(self) -> Tracker:  # type: ignore[override]
        assert self.current is not None
        return self.current.tracker

    @property
    def uses(self) -> Any:  # type: ignore[override]
        return None if self.current is None else self.current.uses

    def wants_function(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        recorder = self._choose(args, kwargs)
        return recorder is not None and recorder.wants_function(args, kwargs)

    def mapped(self, func: Any, in_dims: Any, args: Any, kwargs: Any) -> Any:
        recorder = self._choose(args, kwargs)
        return None if recorder is None else recorder.mapped(func, in_dims, args, kwargs)


class MicroBatches(Recording):
    """Several batches through one module, each with a recording of its own; their rows are appended."""

    def __init__(
        self,
        module: nn.Module,
        quantities: Sequence[Quantity],
        options: Options,
        journal: Journal | None = None,
        *,
        is_block: bool = False,
        batch: Sequence[Any] | None = None,
    ) -> None:
        for name in ("sample_weights", "owners"):
            if getattr(options, name) is not None:
                raise PergradError(
                    f'calls="more" records several batches, but {name} is for one batch: use a `record` '
                    "block for each batch"
                )
        super().__init__(module, quantities, options, journal, is_block=is_block, batch=batch)
        self._journal = journal
        self._dispatcher = _Dispatcher()
        self._recorder = self._dispatcher
        self._parts: list[Recording] = []
        self._filled: list[list[Quantity]] = []  # of each call
        self._is_inside = False
        self._inner: Recording | None = None  # of the call that runs, or the last one
        self._pipeline: Pipeline | None = None  # whose stage the module is
        self._of_microbatch: dict[int | None, Recording] = {}
        self._calls: dict[Recording, int] = {}
        self._stages = 1  # of the pipeline on this rank

    def begin(self, size: int) -> None:
        """Does nothing: each call begins a recording."""

    def await_use(self) -> None:
        """Does nothing: each call begins a recording."""

    def enter_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stage = running_stage() if self._is_spread else None
        is_tried_out = stage is not None and stage.microbatch is None
        self._is_inside = torch.is_grad_enabled() and not is_tried_out
        if not self._is_inside:
            return
        if stage is not None:
            self._check_stages(stage)
            known = self._of_microbatch.get(stage.microbatch)
            if known is not None and self._calls[known] % self._stages:  # for its next stage here
                self._calls[known] += 1
                self._inner = known
                known.enter_forward(args, kwargs)
                self._dispatcher.current = known.recorder
                return
        fresh = [copy.copy(quantity) for quantity in self._quantities]
        options = replace(self._options, calls="same" if self._stages > 1 else None, params=None)
        part = Recording(
            self._module, fresh, options, self._journal, is_block=True, kept=self._kept
        )
        if stage is not None:
            self._enter_stage(part, stage.pipeline)
            self._of_microbatch[stage.microbatch] = part
        self._calls[part], self._inner = 1, part
        part.start_collecting()
        if self._options.batch_size is not None:
            part.begin(self._options.batch_size)
        self._parts.append(part)
        self._filled.append(fresh)
        part.enter_forward(args, kwargs)
        if part.is_empty:
            raise PergradError(
                'calls="more" got a call of the module without samples: leave out empty batches'
            )
        self._dispatcher.add(part.recorder)

    def _check_stages(self, stage: RunningStage) -> None:
        """Refuses to record some of a rank's stages alone: the norms of the others would be missing."""
        held = len(list(self._module.children())) if holds_stages(self._module) else 1
        self._stages = stage.stages
        if held != stage.stages:
            raise PergradError(
                f"{PIPELINES} runs {stage.stages} stages on this rank, and {held} of them are recorded: "
                "record an nn.ModuleList of the modules of all stages of the rank"
            )

    def _enter_stage(self, part: Recording, pipeline: Pipeline) -> None:
        for quantity in self._quantities:
            if not quantity.spans_stages:
                raise PergradError(
                    f"{type(quantity).__name__} needs the gradients of all parameters, but a stage of "
                    f"{PIPELINES} has only its own: set spans_stages = True in the class if its result is "
                    "right for the parameters of one stage, or is summed by batch.spread.over_stages"
                )
        self._pipeline = pipeline
        self._dispatcher.merges = True
        part.in_pipeline(pipeline)

    def leave_forward(self, output: Any = None) -> None:
        if self._is_inside and self._inner is not None:
            self._inner.leave_forward(output)
        self._is_inside = False

    def check_complete(self) -> None:
        if not self._parts:
            raise ScopeError("the recorded module was not called inside the `record` block")
        for number, part in enumerate(self._parts, start=1):
            if self._calls[part] % self._stages:
                raise ScopeError(
                    f"microbatch {number} of {PIPELINES} has run through {self._calls[part]} of the "
                    f"{self._stages} stages of this rank: record an nn.ModuleList of all of them"
                )
            if not part.has_arrived:
                raise ScopeError(
                    f"call {number} of the module was not backpropagated: call backward() on a loss of each "
                    "call inside the `record` block, or run it under torch.no_grad()"
                )

    def clean_up(self) -> None:
        super().clean_up()
        for part in self._parts:
            part.clean_up()

    def _may_reach_weights(self) -> bool:
        current = self._dispatcher.current if self._parts else None
        return current is not None and current.tracker.scope.may_reach_weights

    def finish(self) -> None:
        """Ends all recordings, and joins what they have recorded."""
        if self._pipeline is not None:
            self._pipeline.check_units([_number(part.scale) for part in self._parts])
        for part in self._parts:
            part.finish()
        for number, quantity in enumerate(self._quantities):
            quantity.reset()
            quantity.join([filled[number] for filled in self._filled])

    def abandon(self) -> None:
        for part in reversed(self._parts):
            part.abandon()
        super().abandon()


def _number(scale: Tensor | float) -> float:
    return float(scale.flatten()[0]) if isinstance(scale, Tensor) else float(scale)
