"""The certificate: proves the per-sample gradients of a step by one ordinary step with random weights."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite

import torch
from torch import Tensor

from pergrad.engine.checking.attribution import Attribution, Judge, coarsest
from pergrad.engine.checking.comparison import factor_off
from pergrad.engine.checking.exchanging import meeting
from pergrad.engine.checking.replays import Output, Replay
from pergrad.engine.checking.reports import Certified, CertifyReport
from pergrad.engine.checking.rounding import noise_of_sums
from pergrad.engine.looping.snapshots import undisturbed
from pergrad.engine.recording.modules import parameters_by_name
from pergrad.engine.recording.options import Options
from pergrad.errors import PergradError
from pergrad.quantities import Quantity
from pergrad.runtime.tolerances import extremes, largest, read_extremes

__all__ = ["Certificate", "generator_of"]

_PRECISE = (torch.float32, torch.float64)
# Errors up to so many times the noise that was seen are excused, if they are no larger than this share of the
# gradient itself, or of the model's largest one.
_NOISY, _MOST_NOISE, _MOST_OF_LARGEST = 30, 1e-3, 1e-6
# The same for a step in half precision, once its attribution is proved in float32.
_NOISY_HALVES, _MOST_NOISE_OF_HALVES = 3, 0.5
# A factor on the losses, and the error of the gradient's that shows that its backward is not linear.
_FACTOR, _LEAST_NONLINEAR = -1.75, 1e-3
_SAME_RUN = 0.1  # outputs in two precisions; those with other random numbers are further apart


def generator_of(seed: int | None) -> torch.Generator:
    """Returns the source of the random weights; it is not torch's own, which the model draws from."""
    return torch.Generator().manual_seed(secrets.randbits(32) if seed is None else seed)


@dataclass
class _Sums:
    """Σ_n r_n g_n of each parameter in one precision: recorded and ordinary."""

    found: Mapping[str, Tensor]
    wanted: Mapping[str, Tensor]
    dtype: torch.dtype  # the coarsest that the recorded sums came from
    outputs: Sequence[Output]

    known: Mapping[str, list[Tensor]] = field(default_factory=dict)  # extremes, if in directions

    @cached_property
    def sizes(self) -> dict[str, float]:
        """Returns the largest entry of each ordinary sum."""
        numbers = [self.known.get(name) or extremes(total) for name, total in self.wanted.items()]
        return dict(zip(self.wanted, read_extremes(numbers), strict=True))


class Certificate:
    """Certifies one recorded step, given a replay of it and its recorded, randomly weighted sums."""

    def __init__(
        self,
        replay: Replay,
        attribution: Attribution,
        quantities: Sequence[Quantity],
        options: Options,
        how: Callable[[str], str | None],
    ) -> None:
        self._replay = replay
        self._attribution = attribution
        self._quantities = quantities
        self._options = options
        self._how = how
        self._names = list(attribution.result)
        own = parameters_by_name(replay.module)  # a forward may have tied one to another
        recorded = attribution.parameters
        self._parameters = {name: own.get(name, recorded[name]) for name in self._names}
        self._problems: list[str] = []
        self._notes: list[str] = []
        if attribution.units.how == "mean":
            self._notes.append("the loss is a mean over the samples, which is undone")

    def report(self, *, mixing: bool) -> CertifyReport:
        """Compares all that can be compared; the model and the random state are left as they were."""
        began, size = time.perf_counter(), self._replay.size
        with undisturbed(self._replay.module), _repeating():
            samples = self._drawn_samples()
            sums = self._of_the_step(retain_graph=bool(samples))
            dtype = sums.dtype
            alone = {n: self._alone(sums.outputs, n) for n in samples}
            sums.outputs = [replace(o, tensor=o.tensor.detach()) for o in sums.outputs]
            rows = self._rows(sums)
            self._check_samples(sums, alone)
            del sums, alone
            if mixing:
                self._problems += self._meeting()
        return CertifyReport(
            tuple(rows),
            size,
            samples,
            tuple(self._problems),
            tuple(self._notes),
            self._replay.forwards,
            self._replay.backwards,
            time.perf_counter() - began,
            dtype,
        )

    # -- attribution

    @property
    def _weights(self) -> Tensor:
        """Returns r_n times the scale that the recording applied to sample n."""
        weights = self._attribution.weights
        scale = self._attribution.units.scale
        return weights * (scale.to(weights) if isinstance(scale, Tensor) else scale)

    def _of_the_step(self, *, retain_graph: bool) -> _Sums:
        outputs = self._replay.outputs()
        if not outputs:
            raise PergradError(
                "no gradient reached an output of the module, so there is nothing to certify: call "
                "backward() on a loss of its output inside the block"
            )
        if not self._replay.is_repeated_by(outputs):
            raise PergradError(
                "the step cannot be repeated: with the same random state, the losses differ from those that "
                "were recorded. The model draws random numbers in another order, or counts its calls: "
                "certify it in eval mode, or without dropout"
            )
        sizes: dict[str, list[Tensor]] = {}
        wanted = self._replay.ordinary(
            outputs,
            self._weights,
            self._parameters,
            retain_graph=retain_graph,
            reduced=self._attribution.views(sizes),
        )
        found = self._attribution.result
        dtypes = {*self._attribution.precision.values(), *(g.dtype for g in wanted.values())}
        sums = _Sums(found, wanted, coarsest(map(_real, dtypes)), outputs, sizes)
        for name, size in sums.sizes.items():
            if not isfinite(size):
                raise PergradError(
                    f"the ordinary gradient of parameter {name!r} is not finite, so nothing can be "
                    "compared with it: certify a batch whose losses and gradients are finite"
                )
        return sums

    def _rows(self, own: _Sums) -> list[Certified]:
        judge = Judge(own.dtype)
        errors = judge.errors(own.found, own.wanted, own.sizes)
        if not self._attribution.is_whole and (
            own.dtype not in _PRECISE or any(not e <= judge.tolerance for e in errors.values())
        ):
            own, errors = self._whole(judge, errors)
        proof, dtype, noise_of_proof = errors, own.dtype, dict.fromkeys(self._names, 0.0)
        is_off = [name for name in self._names if not errors[name] <= judge.tolerance]
        if own.dtype == torch.float64 and is_off:
            scales = _larger(own.sizes, self._rounding(own, judge))
            proof, is_off = judge.errors(own.found, own.wanted, scales), []
            noise_of_proof = self._noise_of_rounding(judge, scales)
        elif own.dtype not in _PRECISE or is_off:
            proof, dtype, precise, noise_of_proof = self._proved(own)
            limits = self._limits(own, precise) if is_off else {}
            is_off = [name for name in is_off if not errors[name] <= limits[name]]
        rows: list[Certified] = []
        tolerance, proved_in = Judge(dtype).tolerance, str(dtype)
        for name in self._names:
            limit = max(tolerance, noise_of_proof[name])
            is_ok = proof[name] <= limit and name not in is_off
            error = proof[name] if proof[name] > limit or name not in is_off else errors[name]
            is_reached = own.sizes[name] != 0 or largest(own.found[name]) != 0
            verdict = "wrong" if not is_ok else "ok" if is_reached else "untouched"
            shape = tuple(self._parameters[name].shape)
            rows.append(Certified(name, shape, self._how(name) or "-", error, proved_in, verdict))
            if not is_ok:
                why = factor_off(own.found[name], own.wanted[name], self._replay.size)
                self._problems += [f"{name}: the gradients are off by {why}"] if why else []
        wrong = [row.name for row in rows if row.verdict == "wrong"]
        if wrong:
            self._refuse_nonlinear_backward(wrong)
        return rows

    def _refuse_nonlinear_backward(self, names: Sequence[str]) -> None:
        """Raises an error if plain autograd is not linear in the losses' weights: it proves nothing then."""
        try:
            with self._replay.precisely(torch.float64):
                outputs = self._replay.outputs()
                once, other = (
                    self._replay.ordinary(outputs, weights, self._parameters, retain_graph=True)
                    for weights in (self._weights, _FACTOR * self._weights)
                )
        except Exception:  # the model does not run in float64, and the verdict stays
            return
        scaled = {name: _FACTOR * once[name] for name in names}
        errors = Judge(torch.float64).errors(other, scaled)
        off = [name for name in names if errors[name] > _LEAST_NONLINEAR]
        if off:
            raise PergradError(
                f"the gradient of parameter {' and '.join(map(repr, off))} is not linear in the losses, as "
                "where a hook or an autograd.Function clips or normalises gradients, so that the weighted "
                "sum of the samples' gradients is not the gradient of the weighted batch: certify the model "
                "without it, or compare with pergrad.testing.loop_grads"
            )

    def _whole(self, judge: Judge, errors: Mapping[str, float]) -> tuple[_Sums, dict[str, float]]:
        """Repeats both sides with all entries, where sums in directions leave a doubt."""
        again = Attribution(generator_of(0), self._attribution.weights)
        self._replay.fill([again], self._options)
        outputs = self._replay.outputs()
        wanted = self._replay.ordinary(outputs, self._weights, self._parameters)
        outputs = [replace(o, tensor=o.tensor.detach()) for o in outputs]
        own, least = (
            _Sums(again.result, wanted, judge.dtype, outputs),
            self._attribution.least_error,
        )
        found = judge.errors(own.found, own.wanted, own.sizes)
        for name, error in found.items():
            of_step = least(name, errors[name], wanted[name].shape)
            found[name] = of_step if of_step > error else error
        return own, found

    def _proved(self, own: _Sums) -> tuple[dict[str, float], torch.dtype, _Sums, dict[str, float]]:
        """Repeats both sides in float32 and, where that is not enough, in float64.

        Returns the errors, the dtype, the sums, and errors that rounding explains.
        """
        for dtype in _PRECISE if own.dtype not in _PRECISE else _PRECISE[1:]:
            precise = self._repeated_in(dtype)
            judge = Judge(precise.dtype)
            # What is zero but for rounding is far smaller now than it was in the step.
            scales = _larger(own.sizes, precise.sizes, self._rounding(own, judge))
            errors = judge.errors(precise.found, precise.wanted, scales)
            if all(error <= judge.tolerance for error in errors.values()):
                return errors, precise.dtype, precise, dict.fromkeys(self._names, 0.0)
        with self._precisely(torch.float64):
            noise = self._noise_of_rounding(judge, scales)
        return errors, precise.dtype, precise, noise

    def _limits(self, own: _Sums, precise: _Sums) -> dict[str, float]:
        """Returns the largest errors of the step's own sums that rounding explains, by parameter.

        In half precision, rounding moves values over the kink of a ReLU in one of two runs. The jump reaches
        any parameter, so the noise of the noisiest one counts for all.
        """
        judge, is_half = Judge(own.dtype), own.dtype not in _PRECISE
        seen = noise_of_sums(
            self._replay, self._weights, self._parameters, judge, own.sizes, forwards=is_half
        )
        known = _noise(own, precise)
        noise = {name: max(error, known.get(name, 0.0)) for name, error in seen.items()}
        if not is_half:
            least = judge.tolerance_of_reports
            return {name: max(least, 10 * noise[name]) for name in self._names}
        most = min(_NOISY_HALVES * max(noise.values()), _MOST_NOISE_OF_HALVES)
        lost = [name for name in self._names if noise[name] > _MOST_NOISE_OF_HALVES]
        if lost:
            self._notes.append(
                f"in {own.dtype}, the ordinary gradient of {', '.join(lost)} is rounding noise: "
                "certified in a higher precision only"
            )
        return {name: float("inf") if name in lost else most for name in self._names}

    def _noise_of_rounding(self, judge: Judge, scales: Mapping[str, float]) -> dict[str, float]:
        """Returns errors that rounding explains; a model in float64 may compute some functions in float32."""
        errors = noise_of_sums(self._replay, self._weights, self._parameters, judge, scales)
        size = max(scales.values(), default=0.0)
        return {
            name: min(
                _NOISY * error, max(_MOST_NOISE, _MOST_OF_LARGEST * size / (scales[name] or 1))
            )
            for name, error in errors.items()
        }

    def _rounding(self, own: _Sums, judge: Judge) -> dict[str, float]:
        """Returns the size at which a gradient that should be zero is compared: rounding of the outputs.

        A relative change of a parameter changes the outputs by at most about themselves.
        """
        total = sum(float((o.tensor * o.gradient).abs().double().sum()) for o in own.outputs)
        total *= float(self._weights.abs().max())
        share = torch.finfo(judge.dtype).eps / judge.tolerance
        return {name: share * total / (largest(p) or 1.0) for name, p in self._parameters.items()}

    def _repeated_in(self, dtype: torch.dtype) -> _Sums:
        """Records the step once more in another precision, autocast off, and repeats it plainly."""
        replay, again = self._replay, Attribution(generator_of(0), self._attribution.weights)
        with self._precisely(dtype):
            replay.fill([again], self._options)
            outputs = replay.outputs()
            wanted = replay.ordinary(outputs, self._weights, self._parameters)
        seen = coarsest(map(_real, [dtype, *again.precision.values()]))
        if seen not in _PRECISE:
            raise PergradError(
                f"the model computes in {seen} although it was cast to {dtype} and autocast is off, so "
                "rounding could hide a wrong sample: cast inside the model by `.to(x.dtype)`, not to a fixed "
                "dtype"
            )
        return _Sums(again.result, wanted, seen, outputs)

    @contextmanager
    def _precisely(self, dtype: torch.dtype) -> Iterator[None]:
        """Repeats steps in another precision within the block; says so if the model does not run in it."""
        try:
            with self._replay.precisely(dtype):
                yield
        except PergradError:
            raise
        except Exception as error:
            raise PergradError(
                f"the step cannot be repeated in {dtype}, so rounding could hide a wrong sample: "
                f"{type(error).__name__}: {error}. Cast inside the model by `.to(x.dtype)` or to the dtype "
                "of its weights, not to a fixed dtype"
            ) from error

    # -- single samples

    def _drawn_samples(self) -> tuple[int, ...]:
        if not any(_reports_samples(quantity) for quantity in self._quantities):
            return ()
        size = self._replay.size
        drawn = torch.randperm(size, generator=self._attribution.generator)[:2]
        return tuple(sorted(drawn.tolist()))

    def _check_samples(self, own: _Sums, alone: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Compares what the quantities report for some samples with these samples' own gradients."""
        judge = Judge(own.dtype)
        limit = judge.tolerance_of_reports
        for n, gradient in alone.items():
            for quantity in self._quantities:
                compared = quantity.sample_report(n, gradient)
                if compared is None:
                    continue
                error = judge.error(compared.found, compared.expected, compared.scale)
                if error <= limit or error <= self._noise_of(n, gradient, own.dtype):
                    continue
                why = factor_off(compared.found, compared.expected, self._replay.size)
                self._problems.append(
                    f"{type(quantity).__name__} of sample {n} is off by {error:.1e}"
                    + (f": by {why}" if why else "")
                )

    def _alone(self, outputs: Sequence[Output], n: int) -> dict[str, Tensor]:
        """Returns the gradient of one sample by plain autograd, with the scale of the recording."""
        weights = torch.zeros_like(self._weights)
        weights[n] = self._weights[n] / self._attribution.weights[n]
        return self._replay.ordinary(outputs, weights, self._parameters, retain_graph=True)

    def _noise_of(self, n: int, gradient: Mapping[str, Tensor], dtype: torch.dtype) -> float:
        """Returns ten times the relative error that plain autograd itself makes for one sample."""
        if dtype == torch.float64:
            return 0.0
        with self._precisely(torch.float64):
            exact = self._alone(self._replay.outputs(), n)
        apart = sum(float((exact[name] - g).norm()) ** 2 for name, g in gradient.items())
        size = sum(float(g.norm()) ** 2 for g in gradient.values())
        return 10 * (apart / size) ** 0.5 if size else 0.0

    # -- mixing

    def _meeting(self) -> list[str]:
        dtype = coarsest(map(_real, (p.dtype for p in self._parameters.values())))
        seen = coarsest(map(_real, [dtype, *self._attribution.precision.values()]))
        if seen in _PRECISE:
            return meeting(self._replay, self._notes)
        with self._replay.precisely(torch.float32):
            return meeting(self._replay, self._notes)


@contextmanager
def _repeating() -> Iterator[None]:
    """Raises a PergradError for an error of the plain step, which has run once: it cannot be repeated."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PergradError | torch.OutOfMemoryError):
            raise
        raise PergradError(
            f"the step cannot be repeated, as its certificate needs: {type(error).__name__}: {error}\n"
            "Certify the model without what forbids a second backward pass, or use pergrad.verify"
        ) from error


def _reports_samples(quantity: Quantity) -> bool:
    return type(quantity).sample_report is not Quantity.sample_report


def _larger(*sizes: Mapping[str, float]) -> dict[str, float]:
    """Returns the largest of several sizes of each parameter."""
    return {name: max(of_each[name] for of_each in sizes) for name in sizes[0]}


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _noise(own: _Sums, precise: _Sums) -> dict[str, float]:
    """Returns the relative errors of the ordinary gradient itself, if both runs are the same one."""
    for a, b in zip(own.outputs, precise.outputs, strict=True):
        own_output, other = a.tensor.detach().to(b.tensor.dtype), b.tensor.detach()
        if float((own_output - other).norm()) > _SAME_RUN * float(other.norm()):
            return {}  # they drew other random numbers
    return Judge(own.dtype).errors(own.wanted, precise.wanted)
