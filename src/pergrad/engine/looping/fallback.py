"""Runs a loss function recorded, or, where that is refused, sample by sample: `fallback="loop"`."""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor, nn

from pergrad.distributed.gathering import gathered
from pergrad.engine.collecting.journal import Journal
from pergrad.engine.looping.loop import Looped, looped
from pergrad.engine.looping.plain_run import CannotLoopError
from pergrad.engine.looping.snapshots import Snapshot
from pergrad.engine.recording.arguments import leaves
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.recording import is_recording
from pergrad.engine.recording.running import run_recorded
from pergrad.errors import (
    FallbackWarning,
    MixedSamplesError,
    PergradError,
    UnseenUseError,
    UnsupportedFunctionError,
    UntoldLossError,
)
from pergrad.quantities import Quantity
from pergrad.runtime import internals
from pergrad.runtime.bounds import is_out_of_memory

__all__ = ["Fallback", "Runner"]

Fallback: TypeAlias = Literal["loop"]
_REFUSALS = (MixedSamplesError, UnseenUseError, UnsupportedFunctionError)
_NEXT_STEP = (
    'if the samples do not meet in the model, pass fallback="loop" to compute them one by one'
)


class Runner:
    """Runs loss functions recorded; with `fallback`, those that are refused run sample by sample.

    It warns once, if at all. A kind of batch that was refused, by its `key`, is not recorded again.
    """

    def __init__(self, fallback: Fallback | None = None, *, warns: bool = True) -> None:
        if fallback is not None and fallback not in get_args(Fallback):
            allowed = " or ".join(map(repr, (None, *get_args(Fallback))))
            raise PergradError(f"fallback must be {allowed}, got {fallback!r}")
        self._fallback = fallback
        self._warns = warns
        self._refused: dict[Hashable, str] = {}
        self.why: str | None = (
            None  # why the last run was computed sample by sample; None: it was not
        )

    def loops(self, key: Hashable) -> bool:
        """Whether batches of this kind are known to be refused."""
        return key in self._refused

    def run(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        batch: Sequence[Any],
        quantities: Sequence[Quantity],
        options: Options,
        *,
        journal: Journal | None = None,
        key: Hashable = None,
    ) -> Tensor:
        """Returns loss_fn(model, *batch), detached, and fills the quantities."""
        self.why = None
        options = options.of(batch)
        if self._fallback is None or is_recording():
            try:
                return run_recorded(model, loss_fn, batch, quantities, options, journal=journal)
            except _REFUSALS as error:
                if not is_recording():
                    error.add_note(_NEXT_STEP)
                raise
        with gathered(model):
            return self._run_or_loop(model, loss_fn, batch, quantities, options, journal, key)

    def _run_or_loop(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        batch: Sequence[Any],
        quantities: Sequence[Quantity],
        options: Options,
        journal: Journal | None,
        key: Hashable,
    ) -> Tensor:
        before = Snapshot(model)
        if key is not None and key in self._refused:
            try:
                return self._looped(
                    self._refused[key], model, loss_fn, batch, quantities, options, before, journal
                ).losses
            except (CannotLoopError, PergradError):
                before.restore()  # and see whether this batch is refused, too
        given = [t for t in leaves(tuple(batch)) if isinstance(t, Tensor)]
        versions = [internals.version_of(t) for t in given]
        try:
            return run_recorded(model, loss_fn, batch, quantities, options, journal=journal)
        except UntoldLossError:
            raise  # the losses of single samples would not say more
        except Exception as error:
            if is_out_of_memory(error):
                raise
            refusal = error
        traceback.clear_frames(refusal.__traceback__)  # they hold the tensors of the batch
        why = f"{type(refusal).__name__}: {refusal}"
        try:
            if versions != [internals.version_of(t) for t in given]:
                raise CannotLoopError(
                    "the model writes to its inputs in place, so it cannot run again"
                )
            found = self._looped(why, model, loss_fn, batch, quantities, options, before, journal)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            refusal.add_note(f'fallback="loop" does not help: {error}')
            raise refusal from None
        if self._warns and not self._refused:
            warnings.warn(
                f'this batch was computed sample by sample (fallback="loop"): {found.cost}. The reason: '
                f"{why}",
                FallbackWarning,
                stacklevel=_depth_of_caller(),
            )
        self._refused[key] = why
        return found.losses

    def _looped(
        self,
        why: str,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        batch: Sequence[Any],
        quantities: Sequence[Quantity],
        options: Options,
        before: Snapshot,
        journal: Journal | None,
    ) -> Looped:
        found = looped(
            model,
            loss_fn,
            batch,
            quantities,
            options,
            before,
            timed=self._warns and not self._refused,
        )
        self.why = why
        if journal is not None:
            journal.uses = {
                name: Counter({("loss_fn", "loop"): 1}) for name, _ in model.named_parameters()
            }
        return found


def _depth_of_caller() -> int:
    """Returns the `stacklevel` of a warning by which it points at the code that called pergrad."""
    depth, frame = 0, inspect.currentframe()
    while frame is not None and _is_ours(frame.f_globals.get("__name__", "")):
        depth, frame = depth + 1, frame.f_back
    return depth


def _is_ours(name: str) -> bool:
    return name.split(".")[0] in ("pergrad", "torch", "contextlib")
