"""`verify`: compares per-sample gradients with single samples and with the ordinary gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.distributed.gathering import gathered
from pergrad.engine.checking.comparison import compare, reason_of, spread_out
from pergrad.engine.checking.mixing import mixing
from pergrad.engine.checking.reports import Verification, VerifyReport
from pergrad.engine.checking.trial import Trial
from pergrad.engine.collecting.journal import Journal
from pergrad.engine.looping.fallback import Fallback, Runner
from pergrad.engine.looping.snapshots import undisturbed
from pergrad.engine.recording.options import LossReduction, Owners
from pergrad.engine.recording.running import check_loss_fn
from pergrad.runtime.eagerness import uncompiled

__all__ = ["Verification", "VerifyReport", "verify"]


@uncompiled
def verify(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *batch: Any,
    samples: int = 4,
    batch_size: int | None = None,
    loss_reduction: LossReduction = "auto",
    batch_first: bool = True,
    quiet: bool = False,
    fallback: Fallback | None = None,
    owners: Owners | None = None,
) -> VerifyReport:
    """Checks the per-sample gradients of one batch, prints a table and returns it; see `report.ok`.

    This is the slow, obvious check; `pergrad.certify` proves all samples. A few samples are run alone, one
    forward and backward each, and compared. The sum over all samples is compared with the ordinary gradient
    of the batch. One sample is made NaN, which must not change the gradients of any other. A model that draws
    random numbers (dropout) is checked in eval mode, since a sample alone would draw different ones. The
    model is left as it was.

    Args:
        model: the model.
        loss_fn: as for `pergrad.grads`.
        batch: the arguments of loss_fn after the model; tensors in it are cut to one sample.
        samples: how many samples to run alone.
        batch_size: as for `pergrad.grads`.
        loss_reduction: as for `pergrad.grads`.
        batch_first: as for `pergrad.grads`.
        quiet: do not print.
        fallback: as for `pergrad.grads`.
        owners: as for `pergrad.record`.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(2, 1).double()
    >>> x = torch.ones(3, 2, dtype=torch.float64)
    >>> pergrad.verify(model, lambda model, x: model(x).sum(1), x, quiet=True).ok
    True
    """
    check_loss_fn(loss_fn)
    runner = Runner(fallback)
    with torch.enable_grad(), gathered(model):
        run = Trial(model, loss_fn, batch, batch_size, loss_reduction, batch_first, runner, owners)
        with undisturbed(model), run.repeatable() as notes:
            report = _report(run, samples, notes)
    if not quiet:
        print(report)
    return report


def _report(run: Trial, samples: int, notes: list[str]) -> VerifyReport:
    if not run.parameters:
        problem = "the model has no parameter that requires grad"
        return VerifyReport((), (), (problem,), tuple(notes))
    journal = Journal()
    ordinary = run.ordinary(run.batch)
    try:
        found = run.per_sample(run.batch, journal)
    except Exception as error:  # not of the model itself, whose plain run has just worked
        return VerifyReport((), (), (reason_of(error),), tuple(notes))
    if run.reduction == "mean":
        notes.append("the loss is a mean over the samples, which is undone")
    size = len(next(iter(found.result.values())))
    report = compare(
        found,
        {n: run.alone(n, size) for n in spread_out(samples, size)},
        ordinary=ordinary,
        loss_reduction=run.reduction,
        how=journal.rung_of,
        rounding=run.rounding(),
        instead=lambda n: run.alone_twice(n, size),
    )
    problems = (*report.problems, *mixing(run, found.result, size, notes))
    return replace(report, problems=problems, notes=tuple(notes))
