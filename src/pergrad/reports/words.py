"""Writes the findings of an audit as sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pergrad.attribution import holding_half
from pergrad.reports.numbers import batch_size, count, middle_cut, number, share
from pergrad.reports.reading import Results

__all__ = [
    "first_count",
    "grade_words",
    "headline",
    "layer_words",
    "noise_words",
    "opposing_label",
    "size_words",
    "why_first",
]

_FEW = 0.2  # a list of more than this share of the data is not short


def first_count(results: Results) -> int:
    """Returns how many samples hold half of all suspicion; 0 if that is not a short list."""
    held = holding_half(results.samples["suspicion"])
    not_finite = int((~_finite(results)).sum())
    return held if held <= max(1, _FEW * len(results)) else not_finite


def headline(results: Results) -> tuple[str, ...]:
    """Returns one sentence per finding; the first says what to look at."""
    lines = [_title(results)]
    lines += _opposed(results)
    lines += grade_words(results.summary.get("grade"))[:1]
    found = int(results.summary.get("duplicates") or 0)
    if found:
        lines.append(f"{count(found, 'pair')} of samples train the model in nearly the same way.")
    lines.append(noise_words(results.summary)[0])
    return tuple(lines)


def _title(results: Results) -> str:
    samples, first = len(results), first_count(results)
    not_finite = int((~_finite(results)).sum())
    if samples == 1:
        return "One sample was audited: there is nothing to compare it with."
    if not_finite and first == not_finite:
        return f"Look first at {count(first, 'sample')} whose loss or gradient is not finite."
    if first == 0:
        return f"No small group among the {samples:,} samples stands out."
    return f"Look first at {first:,} of {count(samples, 'sample')}."


def why_first(results: Results) -> str:
    """Returns the line below the headline: why the first samples stand out."""
    first, not_finite = first_count(results), int((~_finite(results)).sum())
    if len(results) == 1:
        return "This report describes that sample alone."
    if first == 0 or first == not_finite:
        return "Suspicion is spread over many samples; the ranking below still begins with the highest."
    words = (
        f"These {share(first / len(results))} hold half of all suspicion: the model is far off on them, and "
        "their gradients point where few others do."
    )
    if not_finite:
        words += f" {count(not_finite, 'of them has', 'of them have')} a loss or gradient that is not finite."
    return words


def _finite(results: Results) -> np.ndarray:
    samples = results.samples
    return np.isfinite(samples["loss"]) & np.isfinite(samples["suspicion"])


def opposing_label(results: Results, index: int) -> str | None:
    """Returns the label of most samples that push hardest against this one, if it is another label."""
    own = results.label(index)
    _, harmers = results.pushed(index)
    labels = [label for label in map(results.label, harmers) if label is not None]
    if own is None or not labels:
        return None
    label, votes = Counter(labels).most_common(1)[0]
    return label if votes > len(labels) / 2 and label != own else None


def _opposed(results: Results) -> list[str]:
    pushed = set(results.pushes["index"].tolist())
    rows = [
        row for row in results.top(first_count(results)) if results.samples["index"][row] in pushed
    ]
    opposed = sum(
        opposing_label(results, int(results.samples["index"][row])) is not None for row in rows
    )
    if not opposed:
        return []
    many = "All" if opposed == len(rows) else f"{opposed:,}"
    return [
        f"{many} of the first {len(rows):,} are pushed against by samples that agree on another label: it "
        "may be the right one."
    ]


def grade_words(grade: Mapping[str, Any] | None) -> list[str]:
    """Returns how well the ranking found the samples known to be wrong, compared with loss alone."""
    if not grade:
        return []
    widest = max(grade["within"], key=lambda row: row["share"])
    known, ours, by_loss = grade["known"], widest["found"], widest["found_by_loss"]
    many = f"All {known:,}" if ours == known else f"{ours:,} of {known:,}"
    other = "as many" if by_loss == ours else f"{by_loss:,}"
    found = (
        f"{many} samples known to be wrong are among the {100 * widest['share']:g}% ranked highest; loss "
        f"alone finds {other} there."
    )
    ours, by_loss = grade["average_precision"], grade["average_precision_by_loss"]
    if abs(ours - by_loss) < 0.005:
        compared = (
            f"By average precision, loss alone ranks as well here ({by_loss:.3f}, by suspicion {ours:.3f}). "
            "The gradients add the rest of this report: samples that push against a label and the label they "
            "suggest, near-duplicates, layers, and the noise scale."
        )
    elif ours > by_loss:
        compared = (
            f"The gradients rank better than loss alone: average precision {ours:.3f} against "
            f"{by_loss:.3f}."
        )
    else:
        compared = (
            f"Loss alone ranks better here: average precision {by_loss:.3f} against {ours:.3f}. Wrong "
            "samples that resemble each other do not stand alone; sort samples.parquet by loss instead."
        )
    return [found, compared]


def noise_words(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the batch size that the gradient noise suggests, in one sentence, then its meaning."""
    scale, noise = summary.get("noise_scale"), summary.get("noise") or {}
    low, high = noise.get("low"), noise.get("high")
    if summary.get("samples") == 1:
        return ("The noise scale needs at least two samples.",)
    if scale is not None:
        within = ""
        if low is not None and high is not None:
            within = f" ({batch_size(low)} to {batch_size(high)})"
        elif low is not None:
            within = f" (at least {batch_size(low)})"
        first = f"The gradient noise suggests batches of about {batch_size(scale)}{within}."
        return (
            first,
            "Smaller batches need more steps, larger ones more samples for the same progress. The value "
            "holds for the model as it is now: it grows while a model trains.",
        )
    if low is not None:
        return (
            f"The gradient noise suggests batches of {batch_size(low)} or more.",
            "The gradients of the samples nearly cancel: their mean cannot be told from noise, so the noise "
            "scale has only a lower bound. This is usual for a model that has converged on these samples; to "
            "choose a batch size, audit a model that is still learning.",
        )
    return (
        "The gradients cancel each other, so they suggest no batch size: the model has converged.",
        "Their mean is even smaller than noise alone would make it, so the noise scale cannot be estimated. "
        "This is usual for a model that was trained on these samples: every batch is almost all noise. To "
        "choose a batch size, audit a model that is still learning.",
    )


def layer_words(groups: Sequence[Mapping[str, Any]]) -> str:
    """Returns which layers hold most of the gradient, and how many of the parameters they have."""
    if not groups or not any(group["share"] for group in groups):
        return "No layer has a gradient."
    first = groups[0]
    total = sum(group["parameters"] for group in groups)
    part = first["parameters"] / total if total else 0.0
    words = (
        f"{middle_cut(first['name'])} holds {share(first['share'])} of the squared gradients with "
        f"{share(part)} of the parameters"
    )
    if first["share"] > 0.9 and len(groups) > 1:
        return f"{words}: the others hardly learn from these samples."
    return f"{words}."


def size_words(results: Results, name: str, title: str) -> str:
    """Returns the median and the largest value of a quantity, in words."""
    values = results.samples[name]
    finite = np.isfinite(values)
    if not finite.any():
        return f"No sample has a finite {title}."
    known, indices = values[finite], results.samples["index"][finite]
    median, largest = float(np.median(known)), int(np.argmax(known))
    if known.min() == known.max():
        words = f"All samples have the same {title}, {number(median)}."
    else:
        words = f"Half of the samples have a {title} below {number(median)}; the largest is "
        words += f"{number(float(known[largest]))}, of sample {indices[largest]}"
        times = float(known[largest]) / median if median > 0 else 0.0
        words += f", {number(times)} times the median." if times >= 2 else "."
    without = int((~finite).sum())
    zeros = int((known == 0).sum())
    if zeros and name == "norm":
        words += f" {count(zeros, 'sample has', 'samples have')} no gradient at all."
    if without:
        words += f" {count(without, 'sample is', 'samples are')} not finite and not drawn."
    return words
