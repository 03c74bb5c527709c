"""Finds by how much a backward pass starts from more or less than the sum of the samples' losses."""

from __future__ import annotations

from collections.abc import Iterable
from math import isclose, prod
from typing import Any

from torch import Tensor

from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.recording.options import Options
from pergrad.engine.samples.layouts import Lost
from pergrad.engine.samples.origins import SUM, UNEVEN, Origin, joined, untold
from pergrad.engine.samples.shares import divided, share_of_weights, shares_of_terms
from pergrad.errors import PergradError, UntoldLossError
from pergrad.quantities import Batch, Quantity
from pergrad.quantities.base import LossUnits
from pergrad.reductions import SampleGradients
from pergrad.runtime import is_traced

__all__ = ["EvenSamples", "LossReader", "UnitsOfLoss"]


class LossReader:
    """Reads the factor on every sample's loss off the tensors that a backward pass starts from."""

    def __init__(self, options: Options, tracker: Tracker, units: LossUnits) -> None:
        self._options = options
        self._tracker = tracker
        self._units = units
        # What an earlier backward pass of the block has undone; one from a plain sum is not read.
        self._undone: tuple[Any, tuple[Any, ...]] | None = ("sum", ()) if units.how else None

    def read(self, tensors: Any, gradients: Any) -> None:
        """Finds what to multiply each sample's gradient by."""
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        weights = (
            [gradients] if isinstance(gradients, Tensor) else list(gradients or [None] * len(given))
        )
        origin = joined([self._origin(t, g) for t, g in zip(given, weights, strict=True)])
        how, factors = self._told(origin)
        undone = how, tuple(id(f) if isinstance(f, Tensor) else f for f in factors)
        if self._undone is not None and undone != self._undone:
            raise PergradError(
                "two backward passes in one `record` block start from losses of different kinds (a sum and "
                "a mean, or other factors): give each a block of its own, or add the losses up first"
            )
        self._undone = undone
        self._units.how = how
        self._units.scalers = origin.scalers
        count = self._tracker.scope.count
        self._units.scale = self._options.scale(count, how == "mean", factors)

    def _origin(self, t: Tensor, gradient: Tensor | None) -> Origin:
        layout = self._tracker.layout(t)
        is_told = not isinstance(layout, Lost) or layout.why != "total"
        if t.dim() or is_told:
            return self._origin_of_losses(t, gradient)
        origin = layout.origin or Origin(None, layout.reason)  # type: ignore[union-attr]
        if gradient is None or self._options.loss_reduction != "auto":
            return origin
        if is_traced(gradient) or gradient.device.type != "cpu":
            return origin.times_unknown("the gradient that backward() got")
        return origin.times(float(gradient))

    def _origin_of_losses(self, t: Tensor, gradient: Tensor | None) -> Origin:
        """Returns the origin of Σ_n l_n w_n for the weights that backward() got, and of one sample's loss.

        Weights are taken as they are, unless they make a mean of the losses.
        """
        scope = self._tracker.scope
        if gradient is None or not t.dim() or not scope.tells_reduction:
            return SUM
        weights = share_of_weights(gradient, scope)
        if weights is not None and weights.is_of_weights:
            return untold("the weights of the samples that backward() got add up to one")
        shares = [*shares_of_terms(t, scope), *([] if weights is None else [weights])]
        numbers = [share for share in shares if share.counted is None]
        return divided(numbers, "backward() adds up terms that are") if numbers else SUM

    def _told(self, origin: Origin) -> tuple[Any, tuple[float | Tensor, ...]]:
        """Returns whether the loss is a sum or a mean, and the factors on all of it to undo."""
        options = self._options
        if any(isinstance(f, Tensor) and is_traced(f) for f in origin.found):
            raise PergradError(
                "a gradient scaler in the loss function of a compiled step: return the loss unscaled"
            )
        if options.loss_reduction != "auto":
            return options.loss_reduction, self._factors(origin)
        if origin.how is None:
            raise untold_error(origin.why_not)
        is_plain = not origin.unknown and isclose(origin.factor, 1.0, rel_tol=1e-12)
        if options.loss_scale is None and not is_plain:
            if origin.why_not and isclose(origin.factor, origin.share or 1.0):
                raise untold_error(origin.why_not, " (write `losses.mean()` for a mean)")
            raise _whole_factor(origin)
        return origin.how, self._factors(origin)

    def _factors(self, origin: Origin) -> tuple[float | Tensor, ...]:
        """Returns the factors to undo: those that were found, and `loss_scale` for all others.

        `loss_scale` may be the product of all, too.
        """
        given = self._options.loss_scale
        if given is None:
            return origin.found
        if isinstance(given, Tensor) or origin.unknown or origin.how is None:
            return (given,) if any(given is f for f in origin.found) else (given, *origin.found)
        if isclose(origin.factor, given, rel_tol=1e-5):
            return given, *origin.found
        found = _numbers(origin.found)
        if origin.found and found is not None and isclose(origin.factor * prod(found), given):
            return (given,)
        if self._options.loss_reduction != "auto":
            return given, *origin.found  # the other factors are part of the loss
        besides = " besides the factor of the gradient scaler or trainer, which is found by itself"
        raise PergradError(
            f"loss_scale={given:g}, but the loss is multiplied by {origin.factor:g}"
            f"{besides if origin.found else ''}: pass that as loss_scale, or none if it is 1"
        )


def untold_error(reason: str, hint: str = "") -> UntoldLossError:
    """Returns the error for a loss of which it is not known how it sums over the samples."""
    return UntoldLossError(
        f"cannot tell whether the loss is a sum or a mean over the samples{hint}, because {reason}: "
        'pass loss_reduction="sum" or loss_reduction="mean", or backpropagate losses of shape (B,)'
    )


def _numbers(factors: Iterable[float | Tensor]) -> list[float] | None:
    """Returns factors as numbers; None if that would wait for a device."""
    found = []
    for factor in factors:
        if isinstance(factor, Tensor) and (is_traced(factor) or factor.device.type != "cpu"):
            return None
        found.append(float(factor))
    return found


def _whole_factor(origin: Origin) -> UntoldLossError:
    how = "by a factor" if origin.unknown else f"by {origin.factor:.6g}"
    scale = "..." if origin.unknown else f"{origin.factor:.6g}"
    return UntoldLossError(
        f"the loss, a {origin.how} over the samples, is multiplied {how} as a whole: pass loss_scale={scale} "
        f'to undo it, as for accumulation, or loss_reduction="{origin.how}" to make it part of each '
        "sample's loss"
        + (', or "mean" if it divides by the number of samples' if origin.how == "sum" else "")
    )


class UnitsOfLoss(Quantity):
    """Tells how the loss of a block came to be."""

    is_linear = True

    def begin(self, batch: Batch) -> None:
        self.units = batch.units

    def consume(self, name: str, gradients: SampleGradients) -> None:
        pass

    def end(self) -> None:
        pass


class EvenSamples(Quantity):
    """Holds whether samples have different numbers of valid positions, or rows of other samples.

    Compiled steps look at it when they have run.
    """

    is_linear = True
    traced_alone = ("misplaced",)  # what steps that are not traced see at once

    def begin(self, batch: Batch) -> None:
        self.uneven: list[Tensor] = []
        self.misplaced: list[Tensor] = []

    def consume(self, name: str, gradients: SampleGradients) -> None:
        pass

    def end(self) -> None:
        pass

    @property
    def is_misplaced(self) -> bool:
        """Whether a sample got rows of another one where the trace has taken that not to be so."""
        return any(map(bool, self.misplaced))

    def check(self) -> None:
        """Raises an error if a mean over valid positions was taken for one over the samples."""
        if any(map(bool, self.uneven)):
            raise untold_error(f"it {UNEVEN}")
