"""Writes the findings of an audit as sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pergrad.attribution.groups import layer_named
from pergrad.reports.numbers import batch_size, count, middle_cut, number, share
from pergrad.reports.reading import Results

__all__ = [
    "first_count",
    "grade_words",
    "headline",
    "layer_words",
    "memorised_words",
    "noise_words",
    "opposing_label",
    "size_words",
    "suggested_label",
    "why_first",
]


def first_count(results: Results) -> int:
    """Returns how many samples to look at first; 0 if no short list stands out."""
    return len(results.first_rows())


def headline(results: Results) -> tuple[str, ...]:
    """Returns one sentence per finding; the first says what to look at."""
    lines = [_title(results)]
    lines += memorised_words(results)
    if not results.judges_labels:
        lines += _opposed(results)
    lines += grade_words(results.summary.get("grade"), by_labels=results.judges_labels)[:1]
    lines += _counted(results)
    lines.append(noise_words(results.summary)[0])
    return tuple(lines)


def _title(results: Results) -> str:
    samples, first = len(results), first_count(results)
    not_finite = int(results.not_finite.sum())
    if samples == 1:
        return "One sample was audited: there is nothing to compare it with."
    if not_finite and first == not_finite:
        return f"Look first at {count(first, 'sample')} whose loss or gradient is not finite."
    if results.judges_labels:
        return _title_of_labels(results)
    if first == 0:
        return f"No small group among the {samples:,} samples stands out."
    return f"Look first at {first:,} of {count(samples, 'sample')}."


def _title_of_labels(results: Results) -> str:
    found = results.summary["label_errors"]
    expected, samples = found["expected"], len(results)
    if expected is None:
        return f"The gradients hardly tell the classes of the {samples:,} samples apart."
    if expected == 0:
        return f"No label of the {samples:,} samples looks wrong."
    looks = "looks" if expected == 1 else "look"
    within = f" ({found['low']:,} to {found['high']:,})" if found["low"] < found["high"] else ""
    return f"About {expected:,} of {samples:,} labels {looks} wrong{within}."


def _counted(results: Results) -> list[str]:
    lines = []
    broken = results.samples["index"][results.not_finite].tolist()
    if 0 < len(broken) < first_count(results):
        which = ", ".join(f"#{index}" for index in broken[:5]) + (", ..." if broken[5:] else "")
        what = count(len(broken), "sample has", "samples have")
        lines.append(f"{what} a loss or gradient that is not finite: {which}.")
    groups, pairs = (int(results.summary.get(k) or 0) for k in ("duplicate_groups", "duplicates"))
    if groups:
        alike = f"{count(groups, 'group')} of near-duplicates"
        lines.append(f"{alike} ({count(pairs, 'pair')}): to the model they are the same sample.")
        differ = sum(results.labels_differ(rows) for rows in results.groups().values())
        if differ and results.judges_labels:
            which = f"In {differ:,} of them" if groups > 1 else "In it"
            lines[-1] += f" {which} the labels differ."
    recall = results.summary.get("duplicates_recall")
    if recall is not None and recall["share"] is not None:
        lines.append(
            f"Near-duplicates were searched in buckets, which find {recall['share']:.1%} of the pairs."
        )
    outliers = len(results.outlying())
    if outliers:
        lines.append(f"{count(outliers, 'input is', 'inputs are')} unlike all others.")
    skipped = len(results.summary.get("skipped") or [])
    if skipped:
        lines.append(
            f"{count(skipped, 'item')} could not be read and {'was' if skipped == 1 else 'were'} skipped."
        )
    return lines


def memorised_words(results: Results) -> list[str]:
    """Returns a warning if the model predicts labels that the other samples doubt."""
    found = results.summary.get("memorised") or {}
    if not found.get("is_so"):
        return []
    return [
        f"The model has learnt doubtful labels by heart: it predicts {found['predicted']:,} of the "
        f"{found['doubted']:,} most doubtful ones, so its loss does not show them. Earlier checkpoints would "
        "judge them better."
    ]


def why_first(results: Results) -> str:
    """Returns the line below the headline: why the first samples stand out."""
    first, not_finite = first_count(results), int(results.not_finite.sum())
    if len(results) == 1:
        return "This report describes that sample alone."
    words = _why_labels(results) if results.judges_labels else _why_loss(results, first, not_finite)
    if not_finite and first > not_finite:
        words += f" {count(not_finite, 'of them has', 'of them have')} a loss or gradient that is not finite."
    return words


def _why_labels(results: Results) -> str:
    found = results.summary["label_errors"]
    if found["expected"] is None:
        return "Train the model first, or check that labels and inputs belong together."
    return (
        "Their gradients are like those of another class, whatever their labels. The ranking does not use "
        "the loss, so a model that has learnt wrong labels by heart does not hide them."
    )


def _why_loss(results: Results, first: int, not_finite: int) -> str:
    said = "Samples rank by their loss and how far their gradients stand out: labels are not judged, because "
    said += "the audit knows no classes."
    if first in (0, not_finite):
        return f"Suspicion is spread over many samples; the ranking still begins with the highest. {said}"
    return f"These {share(first / len(results))} hold half of all suspicion. {said}"


def opposing_label(results: Results, index: int) -> str | None:
    """Returns the label of most samples that push hardest against this one, if it is another label."""
    own = results.label(index)
    _, harmers = results.pushed(index)
    labels = [label for label in map(results.label, harmers) if label is not None]
    if own is None or not labels:
        return None
    label, votes = Counter(labels).most_common(1)[0]
    return label if votes > len(labels) / 2 and label != own else None


def suggested_label(results: Results, index: int) -> str | None:
    """Returns the label that the other samples suggest, if it is another one."""
    row = results.row_of(index)
    if not results.judges_labels or row is None:
        return opposing_label(results, index)
    suggested = results.text("suggested", row)
    return None if suggested == results.label(index) else suggested


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
    if len(rows) == 1:
        which = "The first is"
    else:
        which = (
            f"{'All' if opposed == len(rows) else f'{opposed:,}'} of the first {len(rows):,} are"
        )
    return [
        f"{which} pushed against by samples that agree on another label: it may be the right one."
    ]


def grade_words(grade: Mapping[str, Any] | None, *, by_labels: bool = False) -> list[str]:
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
            f"By average precision, loss alone ranks as well here ({by_loss:.3f}, by gradients {ours:.3f}). "
            "The gradients add the rest of this report: the label that other samples suggest, outliers, "
            "near-duplicates, layers, and the noise scale."
        )
    elif ours > by_loss:
        compared = (
            f"The gradients rank better than loss alone: average precision {ours:.3f} against "
            f"{by_loss:.3f}."
        )
    else:
        compared = (
            f"Loss alone ranks better here: average precision {by_loss:.3f} against {ours:.3f}. "
            + (
                "Sort the samples by loss instead."
                if by_labels
                else "Wrong samples that resemble each other do not stand alone; sort them by loss instead."
            )
        )
    return [found, compared]


def noise_words(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the batch size that the gradient noise suggests, in one sentence, then its meaning."""
    scale, noise = summary.get("noise_scale"), summary.get("noise") or {}
    low, high = noise.get("low"), noise.get("high")
    if summary.get("samples") == 1:
        return ("The noise scale needs at least two samples.",)
    if "mean" not in (summary.get("norm") or {"mean": 0.0}):
        return ("No sample has a finite gradient, so no batch size is suggested.",)
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
    name = middle_cut(first["name"])
    called = layer_named(name).replace("layer", "Layer") if layer_named(name) != name else name
    words = (
        f"{called} holds {share(first['share'])} of the squared gradients with "
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
