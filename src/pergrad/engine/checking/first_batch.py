"""Proves the gradients of the first samples before a long pass over a data set begins."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.distributed.groups import Group
from pergrad.distributed.placing import whole_of
from pergrad.distributed.sharding import is_sharded, precision_of, reshard
from pergrad.engine.checking.attribution import Judge, random_weights
from pergrad.engine.checking.certification import certify
from pergrad.engine.checking.exchanging import meeting
from pergrad.engine.checking.replays import LossReplay
from pergrad.engine.looping.fallback import Fallback
from pergrad.engine.looping.snapshots import Snapshot, undisturbed
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.running import run_recorded
from pergrad.errors import FallbackWarning, PergradError
from pergrad.quantities import ClippedSum, Norms, Quantity
from pergrad.runtime.tolerances import largest

__all__ = ["certified_first"]


def certified_first(
    model: nn.Module,
    losses: Callable[..., Tensor],
    batch: tuple[Any, ...],
    count: int,
    *,
    max_bytes: int,
    error: type[PergradError],
    purpose: str,
    quantities: Sequence[Quantity] | None = None,
    fallback: Fallback | None = "loop",
    gathers: bool = True,
) -> dict[str, Any]:
    """Proves the gradients of a batch of `count` samples; returns the facts, or why nothing is proved.

    Raises `error` if they are wrong. Errors of the model itself come again in the pass over the data.

    Args:
        model: the model.
        losses: called as losses(model, *batch); returns (count,) losses.
        batch: the arguments of `losses` after the model, on its device.
        count: the number of samples.
        max_bytes: as for `pergrad.record`.
        error: raised if the gradients are wrong.
        purpose: what a user does without the proof, such as "audit".
        quantities: what to compute and to check by single samples; by default norms.
        fallback: as for `pergrad.grads`; None for a sharded model, which "loop" would gather to record it.
        gathers: whether a model that `fully_shard` shards may be gathered in each process. If not, all ranks
            call this with the same batch, and run the same passes over its shards.
    """
    options = Options(batch_size=count, max_bytes=max_bytes, loss_reduction="sum")
    chosen = [Norms()] if quantities is None else quantities
    try:
        if gathers:
            found = _by_certificate(model, losses, batch, options, chosen, fallback)
        else:
            found = _by_shards(model, losses, batch, options, chosen)
    except Exception as reason:
        return {"ok": False, "reason": str(reason) or type(reason).__name__}
    if found.problem:
        raise error(
            f"the gradients of the first {count} samples are wrong (pass certify=False, or --no-certify, to "
            f"{purpose} without a proof):{found.problem}"
        )
    return {
        "ok": True,
        "samples": count,
        "parameters": len(found.errors),
        "largest_error": max(found.errors),
        "proved_in": found.precision.removeprefix("torch."),
        "notes": found.notes,
    }


@dataclass(frozen=True)
class _Found:
    """What a proof has found."""

    problem: str  # empty if the gradients are right
    errors: list[float]  # of each parameter
    precision: str
    notes: list[str]


def _by_certificate(
    model: nn.Module,
    losses: Callable[..., Tensor],
    batch: tuple[Any, ...],
    options: Options,
    quantities: Sequence[Quantity],
    fallback: Fallback | None,
) -> _Found:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        report = certify(
            model,
            losses,
            *batch,
            quantities=quantities,
            seed=0,
            quiet=True,
            fallback=fallback,
            batch_size=options.batch_size,
            max_bytes=options.max_bytes,
            loss_reduction=options.loss_reduction,
        )
    return _Found(
        "" if report.ok else f"\n{report}",
        [row.error for row in report.rows],
        report.rows[0].precision,
        list(report.notes),
    )


def _by_shards(
    model: nn.Module,
    losses: Callable[..., Tensor],
    batch: tuple[Any, ...],
    options: Options,
    quantities: Sequence[Quantity],
) -> _Found:
    count, dtype = options.batch_size, precision_of(model)
    assert count is not None
    judge, notes = Judge(dtype), ["the model is sharded, and was proved in its own precision"]
    try:
        with undisturbed(model):
            proof = _ShardedProof(model, losses, batch, options, count)
            errors = proof.of_sums(quantities, judge)
            problems = [name for name, off in errors.items() if not off <= judge.tolerance]
            for number in sorted({0, count - 1}):
                problems += proof.of_sample(number, quantities, judge)
            replay = LossReplay(model, losses, batch, options, proof.before, count)
            problems += meeting(replay, notes)
    finally:
        reshard(model)
    problem = f" {'; '.join(problems)}" if problems else ""
    return _Found(problem, [*errors.values()], str(dtype), notes)


class _ShardedProof:
    """Repeats a step of a sharded model with weights of its samples; gradients stay sharded."""

    def __init__(
        self,
        model: nn.Module,
        losses: Callable[..., Tensor],
        batch: tuple[Any, ...],
        options: Options,
        count: int,
    ) -> None:
        self._model, self._losses, self._batch = model, losses, batch
        self._options, self._count = options, count
        self.before = Snapshot(model)

    def of_sums(self, quantities: Sequence[Quantity], judge: Judge) -> dict[str, float]:
        """Returns the errors of Σ_n r_n g_n by parameter, over all ranks; fills the quantities."""
        weights = random_weights(self._count, torch.Generator().manual_seed(0))
        sums = ClippedSum(weighting=lambda norms: weights.to(norms))
        run_recorded(self._model, self._losses, self._batch, [*quantities, sums], self._options)
        wanted = self._ordinary(weights)
        group, own = Group(), []
        for name, want in wanted.items():
            found, want = (_local(t) for t in (sums.result[name], want))
            # All ranks have the same samples: their sum has each as often as there are ranks.
            own.append([largest(found / group.size - want), largest(want)])
        apart, sizes = group.bounds(torch.tensor(own, dtype=torch.float64))[0].unbind(1)
        if not bool(sizes.isfinite().all()):
            raise PergradError(
                "the ordinary gradients are not finite, so nothing can be compared with them: look for "
                "losses or inputs that are NaN or infinite"
            )
        zeros = dict.fromkeys(wanted, torch.zeros(1, dtype=torch.float64))
        offs = {name: off.reshape(1) for name, off in zip(wanted, apart, strict=True)}
        scales = {name: float(size) for name, size in zip(wanted, sizes, strict=True)}
        return judge.errors(offs, zeros, scales)

    def of_sample(self, number: int, quantities: Sequence[Quantity], judge: Judge) -> list[str]:
        """Lists what quantities report of one sample that its own gradient does not give."""
        alone = torch.zeros(self._count, dtype=torch.float64)
        alone[number] = 1
        gradient = _Gathered(self._ordinary(alone))
        problems = []
        for quantity in quantities:
            told = quantity.sample_report(number, gradient)
            if told is None:
                continue
            off = judge.error(
                told.found.double(), told.expected.to(told.found.device).double(), told.scale
            )
            if not off <= judge.tolerance_of_reports:
                problems.append(f"{type(quantity).__name__} of sample {number} is off by {off:.1e}")
        return problems

    def _ordinary(self, weights: Tensor) -> dict[str, Tensor]:
        """Σ_n weights[n] g_n, as a plain backward pass gives it: sharded."""
        self.before.restore()
        reshard(self._model)
        own = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        kept = {name: p.grad for name, p in own.items()}
        try:
            for p in own.values():
                p.grad = None
            with torch.enable_grad():
                found = self._losses(self._model, *self._batch)
                (found * weights.to(found)).sum().backward()
            return {
                name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in own.items()
            }
        finally:
            for name, p in own.items():
                p.grad = kept[name]


class _Gathered(Mapping[str, Tensor]):
    """Gradients that are gathered one by one, when they are asked for."""

    def __init__(self, gradients: Mapping[str, Tensor]) -> None:
        self._gradients = gradients

    def __getitem__(self, name: str) -> Tensor:
        return whole_of(self._gradients[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._gradients)

    def __len__(self) -> int:
        return len(self._gradients)


def _local(t: Any) -> Tensor:
    found: Tensor = t.to_local() if is_sharded(t) else t
    return found.double()
