"""Plants bugs that broke other trainers, and shows that the audit finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pergrad.private.drawing.sampling import PlanSampler
from pergrad.private.drawing.streams import seeded
from pergrad.private.planning.plan import Plan
from pergrad.private.proving.canaries import audited
from pergrad.private.proving.sensitivity import sensitivities
from pergrad.private.stepping.step import Step

__all__ = ["Finding", "selftest"]

_DELTA = 1e-5
_CLAIM = 1.0  # epsilon of the plan
_CANARIES, _RATE, _STEPS = 1000, 0.01, 1000
_PERIOD = round(1 / _RATE)  # fixed batches of one pass


@dataclass(frozen=True)
class Finding:
    """One audit: what was planted, what was found, and the largest value that sound training may have."""

    name: str
    planted: bool
    found: float
    limit: float
    unit: str  # "epsilon at least" or "sum moved by"

    @property
    def ok(self) -> bool:
        """Whether the audit is right: it finds what is planted, and nothing else."""
        return (self.found > self.limit) == self.planted


def selftest(seed: int = 0, *, steps: int = _STEPS, canaries: int = _CANARIES) -> Iterator[Finding]:
    """Yields the findings of sound training, and of training with each planted bug.

    Args:
        seed: of the canaries, the batches and the noise.
        steps: of each training.
        canaries: in each training.
    """
    plan = Plan.calibrate(
        epsilon=_CLAIM,
        delta=_DELTA,
        sample_rate=_RATE,
        steps=steps,
        max_norm=1.0,
        expected_batch_size=_RATE * canaries / 2,
    )
    kinds: dict[str, Callable[..., Step]] = {"sound training": Step, **_BUGS}
    for name, make in kinds.items():
        is_fixed = make is _FixedBatches
        run = audited(plan, canaries=canaries, seed=seed, make_step=make)
        slots = _slots(run.place, run.is_in) if is_fixed else None
        bound = run.bound(delta=_DELTA, slots=slots)
        yield Finding(name, make is not Step, bound, _CLAIM, "epsilon at least")
    for name, is_planted in (("sound clipping", False), ("one sample clipped wrongly", True)):
        yield Finding(name, is_planted, _moved(is_planted), 1 + 1e-6, "sum moved by")


class _NoNoise(Step):
    """The account has noise, the step has none."""

    def _scale(self) -> float:
        return 0.0


class _NoiseOverB(Step):
    """The noise is divided by the batch size before it is added to the sum, and once more after it."""

    def _scale(self) -> float:
        return super()._scale() / self._divisor


class _NoiseBeforeClipping(Step):
    """The noise is clipped together with a sample's gradient."""

    def _update(self, sums: Mapping[str, Tensor], count: Tensor) -> None:
        zeros = {name: torch.zeros_like(t) for name, t in sums.items()}
        noise = self._noise.added(zeros, self.spent, self._scale())
        norm = torch.stack([t.norm() for t in noise.values()]).norm()
        share = min(1.0, float(self._bound.sensitivity / norm))
        clipped = {name: t + share * noise[name] for name, t in sums.items()}
        scale, self._scale = self._scale, lambda: 0.0  # type: ignore[method-assign]
        try:
            super()._update(clipped, count)
        finally:
            self._scale = scale  # type: ignore[method-assign]


class _FixedBatches(Step):
    """The batches are the same in every pass, the account is that of Poisson batches."""

    def __init__(
        self, model: nn.Module, optimizer: Any, loss: Any, plan: Plan, **options: Any
    ) -> None:
        super().__init__(model, optimizer, loss, plan, **options)
        sampler = plan.run.sampler
        assert sampler is not None
        sampler.drawn = lambda number: _fixed(sampler, number)  # type: ignore[method-assign]


def _fixed(sampler: PlanSampler, number: int) -> list[int]:
    return [*range(number % _PERIOD, sampler.size, _PERIOD)]


def _slots(place: Tensor, is_in: Tensor) -> Tensor:
    """The batch that has, or would have had, each canary."""
    return torch.where(is_in, place % _PERIOD, torch.arange(len(place)) % _PERIOD)


_BUGS: dict[str, Callable[..., Step]] = {
    "no noise": _NoNoise,
    "noise divided by B": _NoiseOverB,
    "noise before clipping": _NoiseBeforeClipping,
    "fixed batches under a Poisson account": _FixedBatches,
}


def _moved(is_planted: bool) -> float:
    """Returns the most that removing one sample moves a clipped sum, as a multiple of the bound."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 8, generator=generator), torch.randint(4, (16,), generator=generator)
    with seeded(bytes(12)):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    plan = Plan(
        noise_multiplier=0.0, sample_rate=1.0, steps=1, max_norm=0.1, expected_batch_size=16
    )
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.0), _losses, plan, certify=False)

    def summed(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        sums = step.clipped_sums(x, y)
        if is_planted and bool((x == wrong).all(1).any()):  # one sample is counted unclipped
            row = (x == wrong).all(1)
            loss = F.cross_entropy(model(x[row]), y[row])
            grads = torch.autograd.grad(loss, [*model.parameters()])
            sums = {name: t + g for (name, t), g in zip(sums.items(), grads, strict=True)}
        return sums

    wrong = x[7]
    return float(sensitivities(summed, x, y).max() / 0.1)


def _losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")
