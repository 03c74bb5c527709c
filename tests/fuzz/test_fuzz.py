"""Random programs get the gradients of a plain loop over the samples, or are refused."""

from __future__ import annotations

from itertools import islice

import pytest

from fuzz.processes import judge_all
from fuzz.programs import draw
from fuzz.report import GOAL, Summary, parts_of

# Few enough for a few seconds; `make fuzz` runs more.
PROGRAMS = {False: 200, True: 100}


def judged(seed: int, *, mixing: bool) -> tuple[Summary, list[str]]:
    """Judges the first programs of a seed; describes those that fail."""
    programs = list(islice(draw(seed, mixing=mixing), PROGRAMS[mixing]))
    summary, failures = Summary(seed, mixing), list[str]()
    for number, outcome in judge_all(programs, workers=1):
        summary.add(programs[number], outcome)
        if outcome.failed:
            failures.append(f"{number} {parts_of(programs[number])} {outcome.kind}: {outcome.why}")
    return summary, failures


@pytest.mark.parametrize("mixing", [False, True])
def test_every_answer_is_right_or_refused(mixing: bool) -> None:
    summary, failures = judged(19, mixing=mixing)
    assert not failures, "\n".join(["python -m fuzz --seed 19 shows these:", *failures])
    assert summary.programs > 0.9 * PROGRAMS[mixing]  # nearly all of them run plainly
    if not mixing:
        assert summary.answered >= GOAL * summary.answerable, str(summary)
