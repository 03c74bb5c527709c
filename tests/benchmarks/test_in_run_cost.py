"""The benchmark of in-run values times whole periods of their defaults; the stored row meets its goal."""

import inspect

from benchmarks import in_run_cost
from benchmarks.rows import RESULTS, read
from pergrad.index import InRunValues


def test_rows_of_a_tiny_model() -> None:
    plain, valued = in_run_cost.rows("tiny", rounds=1, seed=0)
    assert (plain.method, valued.method) == ("plain", "in-run")
    assert plain.ratio == 1
    assert plain.provenance.steps == 40


def test_a_run_is_a_period_of_the_defaults() -> None:
    defaults = inspect.signature(InRunValues).parameters
    assert defaults["every"].default == in_run_cost._EVERY
    assert defaults["refresh"].default == in_run_cost._REFRESH


def test_the_stored_cost_is_at_most_a_tenth() -> None:
    newest = sorted((RESULTS / "in_run_cost").glob("*.jsonl"))[-1]
    ratios = {row.method: row.ratio for row in read(newest)}
    assert (ratios["in-run"] or 9) <= 1.10
