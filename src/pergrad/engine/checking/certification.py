"""`certify`, and the certificate of one step: `record`, `grads` and `norms` with certify=True."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pergrad.distributed.gathering import gathered
from pergrad.distributed.wrappers import seed_of_all
from pergrad.engine.checking.attribution import Attribution
from pergrad.engine.checking.certificate import Certificate, generator_of
from pergrad.engine.checking.replays import LossReplay, ModuleReplay
from pergrad.engine.checking.reports import CertifyReport
from pergrad.engine.checking.watched_calls import WatchedCalls
from pergrad.engine.collecting.journal import Journal
from pergrad.engine.looping.fallback import Fallback, Runner
from pergrad.engine.looping.snapshots import Snapshot
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.recording import check_module, recorded
from pergrad.errors import PergradError
from pergrad.quantities import Norms, Quantity

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pergrad.engine.recording.options import RecordOptions

__all__ = ["certified", "certified_run", "certify"]


def certify(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *batch: Any,
    quantities: Sequence[Quantity] | None = None,
    seed: int | None = None,
    quiet: bool = False,
    fallback: Fallback | None = None,
    **options: Unpack[RecordOptions],
) -> CertifyReport:
    """Proves the per-sample gradients of one batch, prints a table and returns it; see `report.ok`.

    For random weights r_n, the ordinary gradient of Σ_n r_n ℓ_n must be Σ_n r_n g_n: one ordinary step
    certifies every sample of every parameter. A step in half precision is repeated in float32, where one
    wrong sample cannot hide in rounding. Two random samples' reported numbers are compared with their own
    gradients. In a few forward passes samples are exchanged, which must not change the losses of the others.
    Dropout and checkpoints may stay on. The model is left as it was.

    Raises an error, with the reason, where this proves nothing: for example if loss_fn returns a scalar.

    Args:
        model: the model.
        loss_fn: called as loss_fn(model, *batch); returns the (B,) losses of the samples.
        batch: the arguments of loss_fn after the model; tensors with B samples in it are exchanged.
        quantities: what to compute and to check by single samples; by default a `Norms`.
        seed: of the random weights and samples; by default another one in each call.
        quiet: do not print.
        fallback: as for `pergrad.grads`.
        options: the options of `pergrad.record` except `verify` and `certify`.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(2, 1).double()
    >>> x = torch.randn(3, 2, dtype=torch.float64)
    >>> pergrad.certify(model, lambda model, x: model(x).sum(1), x, quiet=True).ok
    True
    """
    check_module(model)
    chosen = [Norms()] if quantities is None else list(quantities)
    runner = Runner(fallback)
    _, report = certified_run(
        model,
        loss_fn,
        batch,
        chosen,
        Options.from_call("certify", options),
        seed=seed,
        runner=runner,
    )
    if not quiet:
        print(report)
    return report


def certified_run(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: tuple[Any, ...],
    quantities: Sequence[Quantity],
    options: Options,
    *,
    seed: int | None = None,
    mixing: bool = True,
    runner: Runner | None = None,
    key: Hashable = None,
) -> tuple[Tensor, CertifyReport]:
    """Runs a loss function recorded, and certifies the step; returns the losses, detached, and the report.

    `runner` says what to do where recording is refused. `mixing=False` leaves out the exchanges of samples,
    for a model that has passed them.
    """
    options = options.of(batch)
    snapshot, journal = Snapshot(model), Journal()
    attribution = _attribution(quantities, generator_of(seed_of_all(model, seed)))
    runner = runner or Runner()
    losses = runner.run(
        model, loss_fn, batch, [*quantities, attribution], options, journal=journal, key=key
    )
    size = len(attribution.weights)
    known = losses if losses.shape == (size,) else None
    with gathered(model):
        replay = LossReplay(model, loss_fn, batch, options, snapshot, size, losses=known)
        replay.is_looped = runner.why is not None
        found = Certificate(replay, attribution, quantities, options, journal.rung_of)
        return losses, found.report(mixing=mixing)


@contextmanager
def certified(
    module: nn.Module, quantities: Sequence[Quantity], options: Options
) -> Iterator[None]:
    """Records the block within as `recorded` does; at its end certifies the step, or raises."""
    watched = WatchedCalls(module)
    attribution = _attribution(quantities, generator_of(seed_of_all(module, None)))
    with (
        watched.watched(),
        recorded(module, [*quantities, attribution], options, journal=watched),
    ):
        yield
    for name, function in watched.used_outside.items():
        raise PergradError(
            f"certify=True cannot repeat this step: parameter {name!r} is used outside of the module's "
            f"forward, by `{function}`. Use pergrad.certify with a loss function that computes all of it, "
            "or move that use into the module"
        )
    with gathered(module):
        replay = ModuleReplay(watched, options, len(attribution.weights))
        found = Certificate(replay, attribution, quantities, options, watched.rung_of)
        found.report(mixing=True).check()


def _attribution(quantities: Sequence[Quantity], generator: torch.Generator) -> Attribution:
    """Sums in directions, unless a quantity reports sums, whose code only sums of entries prove."""
    reports_sums = any(quantity.sums_samples for quantity in quantities)
    return Attribution(generator, in_directions=not reports_sums)
