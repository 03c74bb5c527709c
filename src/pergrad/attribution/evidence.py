"""Explains in words why a sample ranks where it does."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from pergrad.attribution.groups import layer_named, unusual_group
from pergrad.attribution.labels import LabelErrors
from pergrad.attribution.samples import Floats, Samples

__all__ = ["evidence", "shares_below"]

_NOTABLE = 0.95  # a value higher than this share of the samples' is worth a sentence
_AGAINST = -0.2  # largest cosine with the mean gradient that is worth a sentence


def evidence(
    samples: Samples,
    alignment: Floats,
    influence: Floats,
    labels: LabelErrors | None = None,
    outlier: Floats | None = None,
    names: Mapping[int, str] | None = None,
) -> tuple[tuple[str, ...], ...]:
    """Returns short sentences for each sample, the most important first; none if nothing stands out.

    What the other samples say of its label comes first, with the names of the classes, then its input, then
    its loss and gradient.

    >>> import numpy as np
    >>> norm = np.arange(100.0)
    >>> samples = Samples(np.arange(100), norm, norm, {}, np.eye(100))
    >>> evidence(samples, np.zeros(100), np.zeros(100))[99]
    ('loss 99 is higher than that of 99.0% of the samples', 'its gradient is longer than that of 99.0%')
    """
    losses, norms, influences = (shares_below(v) for v in (samples.loss, samples.norm, influence))
    groups = unusual_group(samples.group_norms, len(samples))
    has_loss = np.isfinite(samples.loss)
    has_gradient = samples.has_gradient
    notable = (losses >= _NOTABLE) | (influences >= _NOTABLE) | (norms >= _NOTABLE)
    notable |= (alignment <= _AGAINST) | ~has_loss | ~has_gradient
    unlike = np.zeros(len(samples)) if outlier is None else shares_below(outlier)
    notable |= unlike >= _NOTABLE
    if labels is not None:
        notable |= labels.doubted
    of_label = _words_of_labels(samples, labels, names or {})
    found: list[tuple[str, ...]] = [()] * len(samples)
    rows = np.flatnonzero(notable)
    columns = (samples.loss, has_loss, has_gradient, losses, influences, norms, alignment, unlike)
    # Python numbers: NumPy scalars take several times as long to compare and to format.
    for row, *values in zip(rows.tolist(), *(c[rows].tolist() for c in columns), strict=True):
        value, is_loss, is_gradient, loss, pull, norm, cosine, apart = values
        words = of_label.get(row, [])
        if not is_loss:
            words.append("its loss is not finite")
        if not is_gradient:
            words.append("its gradient is not finite")
        if apart >= _NOTABLE:
            words.append(f"its input is unlike the others, more than that of {_share(apart)}")
        if loss >= _NOTABLE:
            words.append(f"loss {value:.3g} is higher than that of {_share(loss)} of the samples")
        if pull >= _NOTABLE:
            words.append(
                f"its gradient points where few others do: self-influence above that of {_share(pull)}"
            )
        if norm >= _NOTABLE:
            words.append(f"its gradient is longer than that of {_share(norm)}")
        if cosine <= _AGAINST:
            words.append(f"points against the mean gradient (cosine {cosine:.2f})")
        group = groups[row]
        if group is not None:
            words.append(f"pulls on {layer_named(group)} more than most samples do")
        found[row] = tuple(words)
    return tuple(found)


def _words_of_labels(
    samples: Samples, labels: LabelErrors | None, names: Mapping[int, str]
) -> dict[int, list[str]]:
    """Returns, for the samples whose label is doubted, what the others and the model itself say."""
    if labels is None:
        return {}
    found = {}
    for row in np.flatnonzero(labels.doubted).tolist():
        other = int(labels.suggested[row])
        found[row] = [
            f"the other samples would call it {names.get(other, str(other))} "
            f"({_chance(labels.confidence[row])}); they give its own label {_chance(labels.own[row])}"
        ]
        if samples.predicted is None or samples.probability is None or samples.target is None:
            continue
        model_says, chance = int(samples.predicted[row]), float(samples.probability[row, 1])
        if model_says == samples.target[row]:
            found[row].append(
                f"the model itself predicts its label ({_chance(chance)}): learnt by heart, or right after "
                "all"
            )
        else:
            found[row].append(
                f"the model predicts {names.get(model_says, str(model_says))} ({_chance(chance)})"
            )
    return found


def shares_below(values: Floats) -> Floats:  # (n,) -> (n,)
    """Returns, for each value, the share of finite values below it; 0 for a value that is not finite."""
    finite = np.isfinite(values)
    known = np.sort(values[finite])
    if len(known) == 0:
        return np.zeros(len(values))
    below = np.searchsorted(known, np.where(finite, values, -np.inf), side="left") / len(known)
    return np.asarray(below, dtype=np.float64)


def _chance(chance: float) -> str:
    """Writes a probability; one below 1 must not read as certain."""
    return ">99%" if 0.995 <= chance < 1 else "<1%" if 0 < chance < 0.005 else f"{chance:.0%}"


def _share(share: float) -> str:
    # Rounded down: 99.96% must not read as 100%.
    return f"{math.floor(share * 1000) / 10:.1f}%"
