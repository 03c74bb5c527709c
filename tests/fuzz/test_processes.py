"""Programs run in processes of their own, and the end of one process is the failure of one program."""

from __future__ import annotations

import os
from itertools import islice

import pytest

from fuzz import processes
from fuzz.comparing import Outcome
from fuzz.judge import judge
from fuzz.processes import judge_all, judge_apart
from fuzz.programs import Program, draw


def programs(count: int) -> list[Program]:
    return list(islice(draw(5, mixing=False), count))


def test_a_process_that_dies_fails_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def die_at_three(program: Program) -> Outcome:
        if program.seed == 3:
            os._exit(11)
        return Outcome("exact")

    monkeypatch.setattr(processes, "judge", die_at_three)
    monkeypatch.setattr(processes, "BLOCK", 5)
    outcomes = dict(judge_all(programs(12), workers=2))
    assert sorted(outcomes) == list(range(12))
    assert [k for k, outcome in outcomes.items() if outcome.failed] == [3]
    assert outcomes[3].kind == "crash"


def test_outcomes_do_not_depend_on_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "BLOCK", 4)
    chosen = programs(12)
    one, two = ({k: outcome.kind for k, outcome in judge_all(chosen, workers=n)} for n in (1, 2))
    assert one == two


def test_apart_gives_the_outcome_of_the_last_program() -> None:
    first, second = programs(2)
    assert judge_apart(first, second).kind == judge(second).kind
