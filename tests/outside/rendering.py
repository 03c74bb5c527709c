"""Writes the table of results from the stored rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from tests.outside.judging import VERDICTS, Row

__all__ = ["LEAST_PLAIN", "RESULTS", "markdown", "ratio_of", "tally", "timed"]

RESULTS = Path(__file__).parent / "RESULTS.md"
LEAST_PLAIN = 0.05  # seconds of a plain step below which Python's own time hides all else
_MEANING = {
    "exact": "the gradients of `pergrad.grads` are those of the loop",
    "sized": "the same, once `batch_size` is given; without it pergrad asks for it",
    "fallback": 'refused by itself, and exact with `fallback="loop"`',
    "of the batch": "samples meet in a statistic that carries no gradient, before the first parameter; the "
    "answer is the gradient of each sample's loss in this batch, and `certify` reports the meeting",
    "refused": "refused, and rightly so: run alone, a sample has another loss than in its batch",
    "over-refused": "refused, although the samples do not meet",
    "wrong": "an answer that is not the loop's",
    "crash": "an error that is not pergrad's own",
    "unrun": "the model itself does not run here",
}


def tally(rows: Sequence[Row]) -> str:
    """The counts of the verdicts, from the best to the worst."""
    counts = Counter(row.verdict for row in rows)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])


def ratio_of(row: Row) -> float:
    return (row.recorded or 0.0) / (row.plain or 1.0)


def timed(rows: Sequence[Row]) -> list[Row]:
    """The rows whose plain step takes long enough to be compared, the slowest first."""
    long_enough = [row for row in rows if row.plain is not None and row.plain >= LEAST_PLAIN]
    return sorted(long_enough, key=ratio_of, reverse=True)


def markdown(rows: Sequence[Row]) -> str:
    """The whole table."""
    return "\n".join(_lines(rows)) + "\n"


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    judged = [row for row in rows if not row.is_timed]
    libraries = list(dict.fromkeys(row.library for row in judged))
    yield "# Models of other libraries"
    yield ""
    yield (
        f"{len(judged)} models of {len(libraries)} libraries, in tiny random configurations: "
        f"{tally(judged)}. "
        f"Written by `make outside` with torch {judged[0].torch}; nothing is downloaded."
    )
    yield ""
    yield (
        "Each model is given batches of three and of four samples, in float64 where it can. Its per-sample "
        "gradients are compared with one backward pass for each sample, parameter by parameter: exact is an "
        "error of 1e-9 or less relative to the largest element (1e-4 in float32). `pergrad.certify` gives a "
        "second opinion. Whether samples meet is read off the losses: run alone, a sample has the loss that "
        "it has in its batch, or it has not. All models are in eval mode unless their name says otherwise."
    )
    yield ""
    for verdict in VERDICTS:
        if any(row.verdict == verdict for row in judged):
            yield f"- **{verdict}**: {_MEANING[verdict]}"
    yield ""
    free = [row for row in judged if row.meets is False]
    without = sum(row.verdict in ("exact", "sized") for row in free)
    all_in_all = without + sum(row.verdict == "fallback" for row in free)
    yield (
        f"Of the {len(free)} models whose samples do not meet, {without} "
        f"({without / max(len(free), 1):.1%}) are exact without a fallback, and {all_in_all} "
        f"({all_in_all / max(len(free), 1):.1%}) with it. " + _of_certificates(judged)
    )
    yield from _by_library(judged, libraries)
    yield from _refusals(judged)
    yield from _times(timed(rows), rows)
    yield from _models(judged, libraries)


def _of_certificates(judged: Sequence[Row]) -> str:
    answered = [row for row in judged if row.verdict in ("exact", "sized")]
    proved = sum(row.certificate == "proved" for row in answered)
    others = [row for row in answered if row.certificate != "proved"]
    text = f"`certify` proves {proved} of the {len(answered)} that are exact."
    for row in others:
        text += f" {row.library} {row.name}: {_cell(row.certificate)}."
    return text


def _by_library(judged: Sequence[Row], libraries: Sequence[str]) -> Iterator[str]:
    present = [verdict for verdict in VERDICTS if any(row.verdict == verdict for row in judged)]
    yield "\n## By library\n"
    yield f"| library | version | models | {' | '.join(present)} |"
    yield "|---|---|---|" + "---|" * len(present)
    for library in libraries:
        rows = [row for row in judged if row.library == library]
        counts = Counter(row.verdict for row in rows)
        cells = [str(counts[verdict] or "") for verdict in present]
        yield f"| {library} | {rows[0].version} | {len(rows)} | {' | '.join(cells)} |"


def _refusals(judged: Sequence[Row]) -> Iterator[str]:
    yield "\n## All that is not exact by itself\n"
    others = [row for row in judged if row.verdict != "exact"]
    if not others:
        yield "Nothing."
        return
    yield "| library | model | verdict | do samples meet? | reason |"
    yield "|---|---|---|---|---|"
    for row in sorted(others, key=lambda row: VERDICTS.index(row.verdict)):
        meets = {True: "yes", False: "no", None: "?"}[row.meets]
        yield f"| {row.library} | {row.name} | {row.verdict} | {meets} | {_cell(row.reason)} |"


def _times(found: Sequence[Row], rows: Sequence[Row]) -> Iterator[str]:
    if not found:
        return
    short = sum(row.plain is not None and row.plain < LEAST_PLAIN for row in rows)
    yield "\n## Time\n"
    yield (
        f"A step that records norms against a plain one, in float32, with one thread: {len(found)} larger "
        f"configurations whose plain step takes {LEAST_PLAIN * 1e3:.0f} ms or more ({short} take less and "
        f"are left out). Median {median(map(ratio_of, found)):.2f}, largest {ratio_of(found[0]):.2f}. "
        "Plain and recorded steps take turns in one process; medians of seven. The machine was "
        "shared with other work. `rungs`: how many parameters are computed by which, see "
        "`pergrad.explain`. The slowest come first."
    )
    yield ""
    yield "| library | model | plain, ms | recorded, ms | ratio | rungs |"
    yield "|---|---|---|---|---|---|"
    for row in found:
        rungs = ", ".join(f"{count} {rung}" for rung, count in sorted(row.rungs.items()))
        yield (
            f"| {row.library} | {row.name} | {(row.plain or 0) * 1e3:.0f} | "
            f"{(row.recorded or 0) * 1e3:.0f} | {ratio_of(row):.2f} | {rungs} |"
        )


def _models(judged: Sequence[Row], libraries: Sequence[str]) -> Iterator[str]:
    yield "\n## All models\n"
    yield "`error`: the largest, relative to the largest element of the parameter's gradient."
    for library in libraries:
        yield f"\n### {library}\n"
        yield "| model | parameters | verdict | error | dtype | certificate |"
        yield "|---|---|---|---|---|---|"
        for row in judged:
            if row.library == library:
                error = "" if row.error is None else f"{row.error:.0e}"
                verdict = f"{row.verdict}; {row.note}" if row.note else row.verdict
                certificate = row.certificate.partition(":")[0]
                cells = [row.name, f"{row.parameters:,}", verdict, error, row.dtype, certificate]
                yield f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """A text of one cell: one line, without what would end the cell; the advice is left out."""
    first = re.split(
        r"(?<=[a-z\)\]'`])[:.;] (?=[A-Z]|call |pass |freeze |write )", text, maxsplit=1
    )[0]
    return first.replace("|", "\\|").replace("\n", " ")[:300]
