"""Fills quantities sample by sample, by plain autograd: exact wherever samples do not meet, and slow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.engine.collecting.ledger import Ledger
from pergrad.engine.looping.each_sample import Alone, EachSample, InTheBatch
from pergrad.engine.looping.plain_run import CannotLoopError, PlainRun
from pergrad.engine.looping.pulling_back import is_reached
from pergrad.engine.looping.slices import slices_of
from pergrad.engine.looping.snapshots import Snapshot
from pergrad.engine.recording.arguments import leaves, map_leaves
from pergrad.engine.recording.modules import hooks_of_parameters, survey
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.running import reduced
from pergrad.factors import Dense
from pergrad.quantities import Quantity
from pergrad.runtime import internals, without_autocast
from pergrad.runtime.bounds import share_of_free_memory
from pergrad.runtime.eagerness import running_eagerly

__all__ = ["Looped", "looped"]

_SHARE = 4  # without max_bytes, gradients of all samples may take this part of the free memory


@dataclass
class Looped:
    """The losses of a batch that was computed sample by sample, and what that cost."""

    losses: Tensor
    passes: int  # backward passes
    seconds: float
    plain_seconds: float | None = None  # of one plain step of the whole batch, if it was timed

    @property
    def cost(self) -> str:
        """Says what it cost."""
        passes = f"{self.passes} backward passes"
        if not self.plain_seconds:
            return passes
        times = self.seconds / self.plain_seconds
        return f"{passes}, {times:.1f} times as long as one plain step of the batch"


def looped(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Sequence[Any],
    quantities: Sequence[Quantity],
    options: Options,
    before: Snapshot,
    *,
    timed: bool = False,
) -> Looped:
    """Fills the quantities sample by sample; `before` is the state that the call began with.

    `timed` runs one more plain step to compare the time with. Buffers and random state are left as one plain
    call leaves them; after an error, as they were before.
    Raises `CannotLoopError` where the samples meet, or where that cannot be known.
    """
    weights, _, _ = survey(model)
    hooked = hooks_of_parameters(weights)  # refuses some; autograd itself runs the others
    chosen = options.chosen(model, weights)
    left_out = [p for name, p in weights.items() if name not in chosen]
    own = tuple(map_leaves(_detached, tuple(batch)))
    run = PlainRun(model, loss_fn, own, options, chosen, before)
    try:
        with _frozen(left_out), running_eagerly():
            return _filled(run, quantities, hooked, timed)
    except BaseException:
        before.restore()
        raise


def _filled(
    run: PlainRun, quantities: Sequence[Quantity], hooked: Collection[str], timed: bool
) -> Looped:
    versions = _versions(run.batch)
    losses = run.forward(run.batch)
    hooks_of_parameters(run.parameters)  # refuses those that the model has registered meanwhile
    reduced(losses, run.options.loss_reduction)  # refuses what is no loss
    if not is_reached([losses], run.parameters.values()):
        raise CannotLoopError("no gradient reaches a recorded parameter")
    ordinary = run.pulled_back(losses, torch.ones_like(losses), list(run.parameters))
    for name in hooked:
        ordinary.pop(name, None)  # a hook of a parameter gets the gradient of each sample
    losses = losses.detach()
    after = Snapshot(run.model)
    if _versions(run.batch) != versions:
        raise CannotLoopError("the model writes to its inputs in place, so it cannot run again")
    size = _size_of(losses, run)
    slices = slices_of(run.loss_fn, run.batch, size, run.options)
    if not slices.carries_samples:
        raise CannotLoopError(
            f"no tensor or list among the arguments of loss_fn has {size} samples to run alone"
        )
    began, run.passes = run.clock(), 0
    each: EachSample
    if run.before.draws_as(after):
        each = Alone(run, slices, losses, size)
    else:
        each = InTheBatch(run, slices, losses, size, after)
    _fill(run, quantities, size, each, ordinary)
    found = Looped(losses, run.passes, run.clock() - began)
    if timed:  # now that everything is loaded and allocated
        began = run.clock()
        again = run.forward(run.batch)
        run.pulled_back(again, torch.ones_like(again), list(run.parameters))
        found.plain_seconds = run.clock() - began
    after.restore()
    return found


def _size_of(losses: Tensor, run: PlainRun) -> int:
    size, dim = run.options.batch_size, run.options.batch_dim
    if losses.dim() == 1:
        if size is not None and size != len(losses):
            raise CannotLoopError(f"loss_fn returns {len(losses)} losses for {size} samples")
        return len(losses)
    if size is None:
        tensors = [t for t in leaves(run.batch) if isinstance(t, Tensor) and t.dim() > dim]
        sizes = {t.shape[dim] for t in tensors}
        if len(sizes) != 1:
            raise CannotLoopError(
                "the number of samples is not known: let loss_fn return (B,) losses, or pass batch_size="
            )
        (size,) = sizes
    return size


def _fill(
    run: PlainRun,
    quantities: Sequence[Quantity],
    size: int,
    each: EachSample,
    ordinary: Mapping[str, Tensor],
) -> None:
    """Feeds the gradients to the quantities, of as many parameters at once as memory allows."""
    options = run.options
    ledger = Ledger(
        quantities,
        size,
        run.parameters,
        scale=replace(options, loss_reduction="sum").scale(size),
        max_bytes=options.max_bytes,
        offload=options.offload,
    )
    try:
        ledger.open()
        for number in range(ledger.passes):
            if number:
                ledger.end_pass()
            for names in _rounds(run, size):
                rows = each.gradients(names)
                each.check_sums(rows, ordinary)
                with without_autocast(run.device):
                    for name in names:
                        ledger.add(name, Dense(rows.pop(name)))
    except BaseException:
        ledger.abandon()
        raise
    ledger.close()
    ledger.units.scale = options.scale(size)  # what makes up for the reduction of the whole batch


def _rounds(run: PlainRun, size: int) -> Iterator[list[str]]:
    """Splits the parameters, the last first, so that the gradients of all samples fit into memory."""
    bound = run.options.max_bytes
    if bound is None:
        bound = share_of_free_memory(run.device, _SHARE)
    names: list[str] = []
    held = 0
    for name in reversed(list(run.parameters)):
        needed = size * run.parameters[name].nbytes
        if names and held + needed > bound:
            yield names
            names, held = [], 0
        names.append(name)
        held += needed
    if names:
        yield names


@contextmanager
def _frozen(parameters: Sequence[Tensor]) -> Iterator[None]:
    for p in parameters:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in parameters:
            p.requires_grad_(True)


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return value


def _versions(batch: Any) -> list[int]:
    return [internals.version_of(t) for t in leaves(batch) if isinstance(t, Tensor)]
