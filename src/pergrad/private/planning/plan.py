"""Defines `Plan`: one description from which sampler, noise and account of a private run are made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias

import torch

from pergrad.errors import PrivacyError
from pergrad.private.drawing.loading import PlanLoader
from pergrad.private.drawing.sampling import PlanSampler, Run
from pergrad.private.drawing.scheme import Sampling, Scheme
from pergrad.private.planning.accounting import (
    Accountant,
    Mechanism,
    Neighbours,
    epsilon_of,
    noise_for,
)
from pergrad.private.planning.adaptive import Adaptive
from pergrad.private.planning.capping import cap_for, check_cap
from pergrad.private.planning.plain import is_integer, plain_number
from pergrad.private.planning.plan_checks import (
    NoiseKind,
    check_adaptive,
    check_choices,
    check_delta,
    check_numbers,
    check_sampling,
)

__all__ = ["Adaptive", "Clipping", "Plan"]


Clipping: TypeAlias = Literal["flat", "per-layer", "automatic"] | Adaptive


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Describes a private run; makes its sampler and its loader, and counts its epsilon.

    A plan is public: it holds nothing that depends on the data. Every record is in a batch with probability
    `sample_rate`, independently of the others, and the noise of a step has the standard deviation
    `noise_multiplier` · `max_norm`.

    Args:
        noise_multiplier: standard deviation of the noise, as a multiple of max_norm. 0 is allowed for tests:
            its epsilon is infinite.
        sample_rate: the probability of each record to be in a batch, in (0, 1].
        steps: the number of steps; a step beyond it is refused.
        max_norm: the bound on the norm of each record's gradient; or bounds by patterns of names, as
            `ClippedSum` takes them, whose sensitivity is the root of the sum of their squares.
        delta: the delta at which `epsilon()` is stated; must be below 1 / population.
        expected_batch_size: the public number by which the noisy sum is divided; by default
            sample_rate · population.
        population: a public number of records; for truncated and shuffled batches the exact one.
        neighbours: what two neighbouring data sets are: "add-remove" (one record is added or removed),
            "replace-one" (one record is replaced by any other), or "replace-special" (one record is
            replaced by an empty one); by default "add-remove" where the account allows it.
        sampling: "poisson"; "truncated" for Poisson batches of at most `batch_cap` records, which a compiled
            step pads to one shape; "shuffled" for passes over fixed batches of `expected_batch_size`, whose
            account has no amplification.
        batch_cap: the largest batch of "truncated"; by default chosen so that a batch exceeds it with a
            probability of less than 1e-9.
        clipping: "flat" clips the whole gradient; "per-layer" each module's, by max_norm / √layers;
            "automatic" scales every gradient to just below max_norm; `Adaptive()` moves the bound.
        stability: the constant of "automatic": gradients are scaled by max_norm / (norm + stability); not
            below 1e-8, under which norms of float32 gradients vanish.
        noise: "gaussian", or "discrete" for integers on a grid of 2²⁴ steps per standard deviation, drawn by
            integer arithmetic alone; slow, for those who fear floating point.
        bands: for correlated noise: the number of bands of the matrix (BandMF). Records are then drawn from
            one of `bands` groups in turn, with probability bands · sample_rate.
        accountant: "pld", or "rdp" for the looser one.
        discretization: the interval of the PLD accountant; smaller is tighter and slower.

    >>> from pergrad.private import Plan
    >>> plan = Plan(noise_multiplier=1.3, sample_rate=0.004, steps=3750, max_norm=1.0)
    >>> print(f"{plan.epsilon(1e-5):.4f}, after 100 steps {plan.epsilon(1e-5, steps=100):.4f}")
    0.8336, after 100 steps 0.1381
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    max_norm: float | Mapping[str, float]
    delta: float | None = None
    expected_batch_size: float | None = None
    population: int | None = None
    neighbours: Neighbours | None = None
    sampling: Sampling = "poisson"
    batch_cap: int | None = None
    clipping: Clipping = "flat"
    stability: float = 0.01
    noise: NoiseKind = "gaussian"
    bands: int = 1
    accountant: Accountant = "pld"
    discretization: float = 1e-4
    run: Run = field(default_factory=Run, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for numeric in dataclasses.fields(self):
            if numeric.init:
                self._set(numeric.name, plain_number(getattr(self, numeric.name)))
        if isinstance(self.max_norm, Mapping):  # the caller's may change later
            bounds = {pattern: plain_number(bound) for pattern, bound in self.max_norm.items()}
            self._set("max_norm", bounds)
        check_numbers(self)
        check_choices(self)
        if self.expected_batch_size is None and self.population is not None:
            self._set("expected_batch_size", self.sample_rate * self.population)
        if self.neighbours is None:
            fixed = self.sampling in ("truncated", "shuffled")
            self._set("neighbours", "replace-special" if fixed else "add-remove")
        check_sampling(self)
        if self.sampling == "truncated":
            assert self.population is not None
            if self.batch_cap is None:
                self._set("batch_cap", cap_for(self.population, self.sample_rate))
            else:
                check_cap(self.batch_cap, self.population, self.sample_rate)
        if isinstance(self.clipping, Adaptive):
            check_adaptive(self, self.clipping)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # it is frozen

    # -- the account

    @classmethod
    def calibrate(cls, *, epsilon: float, delta: float, **options: Any) -> Self:
        """Returns the plan whose noise gives `epsilon` at `delta`: never more, and at most 1e-4 less.

        Args:
            epsilon: the target.
            delta: of the target; also the plan's.
            options: of `Plan`, except noise_multiplier.

        >>> from pergrad.private import Plan
        >>> plan = Plan.calibrate(epsilon=3, delta=1e-5, sample_rate=0.01, steps=1000, max_norm=1.0)
        >>> print(f"noise {plan.noise_multiplier:.3f}, epsilon {plan.epsilon():.4f}")
        noise 0.814, epsilon 3.0000
        """
        if "noise_multiplier" in options:
            raise PrivacyError("calibrate finds the noise_multiplier: leave it out")
        epsilon, delta = plain_number(epsilon), plain_number(delta)
        check_delta(delta, None)
        try:
            tried = cls(noise_multiplier=0.0, delta=delta, **options)  # its noise is looked for
        except TypeError as error:
            raise PrivacyError(f"calibrate takes the arguments of Plan: {error}") from None
        noise = noise_for(tried.mechanism(), epsilon, delta)
        return cls(noise_multiplier=noise, delta=delta, **options)

    def epsilon(self, delta: float | None = None, *, steps: int | None = None) -> float:
        """Returns epsilon of the run at `delta`, or of its first `steps` steps."""
        delta = self.delta if delta is None else delta
        if delta is None:
            raise PrivacyError("epsilon needs a delta: pass one here or to the plan")
        check_delta(delta, self.population_estimate)
        return epsilon_of(self.mechanism(steps), float(delta))

    def mechanism(self, steps: int | None = None) -> Mechanism:
        """Returns what the account counts, for the whole run or for its first `steps` steps."""
        steps = self.steps if steps is None else steps
        if not is_integer(steps) or not 0 <= steps <= self.steps:
            raise PrivacyError(
                f"steps must be between 0 and the plan's {self.steps}, got {steps!r}"
            )
        assert self.neighbours is not None
        rate, count = float(self.sample_rate), int(steps)
        sampling: Sampling | Literal["cyclic"] = self.sampling
        if sampling == "shuffled":
            rate, count = 1.0, math.ceil(steps / self.steps_of_a_pass)
        elif self.bands > 1:
            sampling, rate, count = "cyclic", rate * self.bands, math.ceil(steps / self.bands)
        return Mechanism(
            sampling,
            float(self.noise_multiplier),
            rate,
            count,
            self.neighbours,
            self.population if sampling == "truncated" else None,
            self.batch_cap,
            self.accountant,
            self.discretization,
        )

    # -- what follows from the plan

    @property
    def population_estimate(self) -> float | None:
        """The public number of records: `population`, or what the batch size and the rate tell of it."""
        if self.population is not None or self.expected_batch_size is None:
            return self.population
        return self.expected_batch_size / self.sample_rate

    @property
    def steps_of_a_pass(self) -> int:
        """The number of shuffled batches in which every record is once at most."""
        return self.scheme.steps_of_a_pass

    @property
    def sensitivity(self) -> float:
        """The largest norm of what one record adds to a sum."""
        if isinstance(self.max_norm, Mapping):
            return math.sqrt(sum(bound**2 for bound in self.max_norm.values()))
        return float(self.max_norm)

    @property
    def count_noise(self) -> float | None:
        """The noise on the number of samples below an adaptive bound."""
        if not isinstance(self.clipping, Adaptive):
            return None
        if self.clipping.noise is not None:
            return self.clipping.noise
        assert self.expected_batch_size is not None
        return self.expected_batch_size / 20

    @property
    def gradient_noise_multiplier(self) -> float:
        """The noise on gradients, such that all that a step releases together has `noise_multiplier`.

        A record adds ±½ to the centred count of an adaptive bound.
        """
        if self.count_noise is None or self.noise_multiplier == 0:
            return float(self.noise_multiplier)
        return (self.noise_multiplier**-2 - (2 * self.count_noise) ** -2) ** -0.5

    @property
    def scheme(self) -> Scheme:
        """How batches are drawn."""
        assert self.expected_batch_size is None or self.expected_batch_size > 0
        return Scheme(
            self.sampling,
            float(self.sample_rate),
            self.steps,
            self.bands,
            self.batch_cap,
            self.population,
            int(self.expected_batch_size or 0) if self.sampling == "shuffled" else None,
            self.delta,
        )

    # -- what is made of it

    def sampler(
        self, dataset: Any, generator: torch.Generator | None = None, **options: Any
    ) -> PlanSampler:
        """Returns the batch sampler of the plan: `DataLoader(dataset, batch_sampler=...)`.

        A default collate function fails on empty batches: `loader` does not.

        Args:
            dataset: any data set with a length and indices.
            generator: for draws that must repeat; by default the system's entropy. Whoever knows it
                knows who was in which batch.
            options: `cryptographic=True` draws from ChaCha20; `steps_per_epoch` is the number of batches
                of one iteration, by default all that remain.
        """
        return self.run.sampler_of(self.scheme, dataset, generator, **options)

    def loader(
        self, dataset: Any, generator: torch.Generator | None = None, **options: Any
    ) -> PlanLoader:
        """Returns a loader over the plan's batches, empty ones included.

        An empty batch has the structure of the others, and tensors of no rows.

        Args:
            dataset: any data set with a length and indices.
            generator: as for `sampler`.
            options: `cryptographic` and `steps_per_epoch` of `sampler`; all others go to
                `torch.utils.data.DataLoader`, such as num_workers, collate_fn and pin_memory.
        """
        mine = {
            name: options.pop(name)
            for name in ("cryptographic", "steps_per_epoch")
            if name in options
        }
        return PlanLoader(self.sampler(dataset, generator, **mine), dataset, options)

    def state_dict(self) -> dict[str, Any]:
        """Returns the plan as numbers and strings; `Plan.from_state_dict` reads it."""
        state = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        if isinstance(self.max_norm, Mapping):
            state["max_norm"] = dict(self.max_norm)
        if isinstance(self.clipping, Adaptive):
            state["clipping"] = dataclasses.asdict(self.clipping)
        return state

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        known = {f.name for f in dataclasses.fields(cls) if f.init}
        if not isinstance(state, Mapping) or not {"noise_multiplier", "steps"} <= {*state} <= known:
            raise PrivacyError("this is not the state of a plan")
        state = dict(state)
        try:
            if isinstance(state.get("clipping"), Mapping):
                state["clipping"] = Adaptive(**state["clipping"])
            return cls(**state)
        except TypeError as error:
            raise PrivacyError(f"this state of a plan is not complete: {error}") from None
