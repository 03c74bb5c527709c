"""The summary counts outcomes, and refusals by the function that they name."""

from __future__ import annotations

from fuzz.comparing import Outcome
from fuzz.programs import Program, Step
from fuzz.registry import Sizes
from fuzz.report import Summary, describe
from fuzz.shrinking import Failure

PLAIN = Program(Sizes(2, 3, 4), "vec", (Step("linear", 0),))
ODD = Program(Sizes(2, 3, 4), "vec", (Step("hooked_parameter", 0),))
REFUSED = Outcome("refused", "MixedSamplesError: `index_put` moves samples in an unknown way")


def test_programs_that_may_be_refused_do_not_count_as_unanswered() -> None:
    summary = Summary(0, mixing=False)
    for program, outcome in ((PLAIN, Outcome("exact")), (PLAIN, REFUSED), (ODD, REFUSED)):
        summary.add(program, outcome)
    summary.add(PLAIN, Outcome("invalid"))
    assert (summary.programs, summary.answerable, summary.answered) == (3, 2, 1)
    assert summary.failures == 0
    assert "50.00% of those that have an answer" in str(summary)


def test_refusals_are_counted_by_function() -> None:
    summary = Summary(0, mixing=True)
    summary.add(PLAIN, REFUSED)
    summary.add(PLAIN, REFUSED)
    assert summary.refusals == {"MixedSamplesError: index_put": 2}


def test_every_kind_of_failure_counts() -> None:
    summary = Summary(0, mixing=True)
    for kind in ("wrong", "crash", "state", "poisoned", "certified", "alarm"):
        summary.add(PLAIN, Outcome(kind))
    assert summary.failures == 6


def test_a_failure_is_described_by_its_seed_number_and_class() -> None:
    text = describe(Failure(12, ODD, Outcome("wrong", "off by 1")), seed=7)
    assert text.startswith("# wrong: off by 1\n# seed 7, program 12; classes of issue 19: 9\n")


def test_json_has_classes_that_nothing_else_explains() -> None:
    summary = Summary(7, mixing=False)
    both = Program(Sizes(2, 3, 4), "vec", (Step("stale_view", 0), Step("scripted", 0)))
    data = summary.as_json([Failure(n, p, Outcome("wrong")) for n, p in ((12, ODD), (13, both))])
    assert data["classes"] == [9]
    assert [failure["classes"] for failure in data["failures"]] == [[9], [1, 6]]
    assert data["failures"][1]["parts"] == "stale_view > scripted"
