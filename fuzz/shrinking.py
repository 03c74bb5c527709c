"""Shrinks a failing program: drops and simplifies one part at a time while it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fuzz.comparing import Outcome
from fuzz.processes import judge_apart
from fuzz.programs import Program, Step

__all__ = ["Failure", "shrink"]


@dataclass(frozen=True)
class Failure:
    """A failing program, its smallest form, and the program that must run before it, if one must."""

    number: int
    program: Program
    outcome: Outcome
    before: Program | None = None

    @property
    def classes(self) -> set[int]:
        """Returns the classes of issue 19 that it may belong to; 8 if it needs another one's caches."""
        found = self.program.classes
        if self.before is not None:  # torch's own compiler has caches too
            return {12} if 12 in found else {8}
        return found


def shrink(
    number: int,
    program: Program,
    outcome: Outcome,
    earlier: Sequence[Program] = (),
    run: Callable[..., Outcome] = judge_apart,
) -> Failure:
    """Returns the failure with the smallest program that fails in the same way.

    A program that does not fail by itself fails because of an `earlier` one of its block, whose answers were
    cached: that one is looked for.
    """
    alone = run(program)
    if alone.kind != outcome.kind:
        if alone.failed:  # it fails by itself too, in another way
            outcome = alone
        else:
            return _with_history(number, program, outcome, earlier, run)
    program, outcome = _smallest(program, outcome, run)
    return Failure(number, program, outcome)


def _smallest(
    program: Program, outcome: Outcome, run: Callable[..., Outcome]
) -> tuple[Program, Outcome]:
    tried = {program}
    progress = True
    while progress:
        progress = False
        for candidate in _simpler(program):
            if candidate in tried:
                continue
            tried.add(candidate)
            found = run(candidate)
            if found.kind == outcome.kind:
                program, outcome, progress = candidate, found, True
                break
    return program, outcome


def _simpler(program: Program) -> Iterator[Program]:
    """Yields programs with one part less: a step, a residual, an odd call, an odd loss."""
    for k in reversed(range(len(program.steps))):
        less = program.without(k)
        if less.steps and less.is_well_formed:
            yield less
    for k, step in enumerate(
        program.steps
    ):  # a step to another kind of shape may go with its start
        if k == 0 and step.ingredient.gives != "any" and len(program.steps) > 1:
            yield replace(program.without(0), start=step.ingredient.gives)
    for k, step in enumerate(program.steps):
        if step.residual:
            steps = list(program.steps)
            steps[k] = replace(step, residual=False)
            yield replace(program, steps=tuple(steps))
    if program.nan_first:
        yield replace(program, nan_first=False)
    if program.loss != "squares":
        yield replace(program, loss="squares")
    if program.call == "tuple":
        yield replace(program, call="plain")
    for k, step in enumerate(program.steps):  # an odd layer may as well be a linear one
        if step.ingredient.is_layer and step.name != "linear":
            steps = list(program.steps)
            steps[k] = Step("linear", step.seed, step.residual)
            yield replace(program, steps=tuple(steps))
    if (program.first, program.second) not in (("grads", "sums"), ("grads", "grads")):
        yield replace(program, first="grads", second="sums")


def _with_history(
    number: int,
    program: Program,
    outcome: Outcome,
    earlier: Sequence[Program],
    run: Callable[..., Outcome],
) -> Failure:
    if run(*earlier, program).kind != outcome.kind:
        return Failure(number, program, replace(outcome, why=f"{outcome.why} (not again)"))
    guilty = (p for p in reversed(earlier) if run(p, program).kind == outcome.kind)
    before = next(guilty, None)
    if before is None:
        return Failure(
            number, program, replace(outcome, why=f"{outcome.why} (after many others)"), earlier[-1]
        )
    program, outcome = _smallest(program, outcome, partial(run, before))
    before, _ = _smallest(before, outcome, lambda candidate: run(candidate, program))
    return Failure(number, program, outcome, before)
