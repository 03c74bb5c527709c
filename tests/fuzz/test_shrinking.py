"""Shrinking keeps what a failure needs and drops the rest."""

from __future__ import annotations

from fuzz.comparing import Outcome
from fuzz.programs import Program, Step
from fuzz.registry import Sizes
from fuzz.shrinking import shrink

NAMES = ("linear", "activation", "stale_view", "matmul", "scripted", "dropout")
PROGRAM = Program(
    Sizes(4, 3, 4), "vec", tuple(Step(n, k, residual=True) for k, n in enumerate(NAMES)), "labels"
)
WRONG = Outcome("wrong", "off")


def has(program: Program, *names: str) -> bool:
    return {*names} <= {step.name for step in program.steps}


def test_only_the_guilty_step_is_left() -> None:
    def run(*programs: Program) -> Outcome:
        return WRONG if has(programs[-1], "stale_view") else Outcome("exact")

    failure = shrink(7, PROGRAM, WRONG, run=run)
    assert failure.program.steps == (Step("stale_view", 2),)
    assert failure.program.loss == "squares"
    assert failure.classes == {6}


def test_steps_that_fail_only_together_are_both_left() -> None:
    def run(*programs: Program) -> Outcome:
        return WRONG if has(programs[-1], "stale_view", "scripted") else Outcome("exact")

    failure = shrink(7, PROGRAM, WRONG, run=run)
    assert [step.name for step in failure.program.steps] == ["stale_view", "scripted"]


def test_another_kind_of_failure_does_not_count() -> None:
    def run(*programs: Program) -> Outcome:
        return WRONG if has(programs[-1], "stale_view") else Outcome("crash")

    failure = shrink(7, PROGRAM, WRONG, run=run)
    assert has(failure.program, "stale_view")
    assert failure.outcome.kind == "wrong"


def test_a_failure_by_the_caches_of_another_program_names_it() -> None:
    others = [Program(Sizes(4, 3, 4), "vec", (Step(n, 0),)) for n in ("sort", "gather", "flip")]

    def run(*programs: Program) -> Outcome:
        *before, last = programs
        spoilt = any(has(program, "gather") for program in before)
        return WRONG if spoilt and has(last, "scripted") else Outcome("exact")

    failure = shrink(7, PROGRAM, WRONG, others, run=run)
    assert failure.before == others[1]
    assert failure.program.steps == (Step("scripted", 4),)
    assert failure.classes == {8}
