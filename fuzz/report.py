"""Counts outcomes and describes failures, for the terminal and as JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fuzz.comparing import FAILURES, Outcome
from fuzz.programs import Program
from fuzz.reproduction import reproduction
from fuzz.shrinking import Failure

__all__ = ["GOAL", "Summary", "describe", "parts_of"]

GOAL = 0.97  # of programs that do not mix samples, answered
_NAMED = re.compile(r"`([^`]+)`")


@dataclass
class Summary:
    """Counts the outcomes of a run."""

    seed: int
    mixing: bool
    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    certificates: Counter[str] = field(default_factory=Counter)
    answerable: int = 0  # programs that must not be refused
    answered: int = 0
    seconds: float = 0.0

    def add(self, program: Program, outcome: Outcome) -> None:
        """Counts one program."""
        self.outcomes[outcome.kind] += 1
        if outcome.certificate:
            self.certificates[outcome.certificate] += 1
        if outcome.kind == "refused":
            self.refusals[_by_function(outcome.why)] += 1
        if outcome.kind != "invalid" and not program.may_refuse:
            self.answerable += 1
            self.answered += outcome.kind == "exact"

    @property
    def programs(self) -> int:
        return sum(self.outcomes.values()) - self.outcomes["invalid"]

    @property
    def failures(self) -> int:
        return sum(self.outcomes[kind] for kind in FAILURES)

    def __str__(self) -> str:
        family = (
            "with a function that mixes samples" if self.mixing else "whose samples do not meet"
        )
        total = max(self.programs, 1)
        lines = [
            f"{self.programs} programs {family} (seed {self.seed}; {self.outcomes['invalid']} more do "
            f"not run under plain autograd), {total / max(self.seconds, 1e-9):.0f} a second",
            *(
                f"  {kind:9} {self.outcomes[kind]:6}  {self.outcomes[kind] / total:.2%}"
                for kind in ("exact", "refused", *FAILURES)
            ),
        ]
        if not self.mixing:
            share = self.answered / max(self.answerable, 1)
            lines.append(f"  answered  {share:.2%} of those that have an answer, {GOAL:.0%} wanted")
        if self.certificates:
            counts = ", ".join(f"{n} {kind}" for kind, n in self.certificates.most_common())
            lines.append(f"  certificates of exact answers: {counts}")
        lines += [f"  refused {n:6}  {why}" for why, n in self.refusals.most_common(25)]
        return "\n".join(lines)

    def as_json(self, failures: Sequence[Failure]) -> dict[str, Any]:
        """Returns the counts, and the smallest program of each kind of failure.

        A class of issue 19 is found if one program has nothing else that may have shown the failure.
        """
        return {
            "seed": self.seed,
            "mixing": self.mixing,
            "programs": self.programs,
            "outcomes": dict(sorted(self.outcomes.items())),
            "answered": round(self.answered / max(self.answerable, 1), 4),
            "classes": sorted({c for f in failures if len(f.classes) == 1 for c in f.classes}),
            "failures": [
                {
                    "number": failure.number,
                    "kind": failure.outcome.kind,
                    "why": failure.outcome.why,
                    "classes": sorted(failure.classes),
                    "parts": parts_of(failure.program),
                }
                for failure in failures
            ],
        }


def parts_of(program: Program) -> str:
    """Names the steps of a program, and what is odd about its call and its loss."""
    odd = [program.call] if program.call != "plain" else []
    odd += ["a NaN in the first batch"] if program.nan_first else []
    odd += ["a compiled loss"] if program.loss == "compiled" else []
    return " > ".join([*(step.name for step in program.steps), *odd])


def describe(failure: Failure, seed: int) -> str:
    """Returns what failed, as a script that shows it."""
    classes = ", ".join(map(str, sorted(failure.classes))) or "none"
    why = (
        f"{failure.outcome.kind}: {failure.outcome.why}\n"
        f"seed {seed}, program {failure.number}; classes of issue 19: {classes}"
    )
    if failure.before is not None:
        why += f"\nfails after another program in the same process: {parts_of(failure.before)}"
    return reproduction(failure.program, why=why)


def _by_function(why: str) -> str:
    """Shortens a refusal to its kind and the function that it names."""
    kind, _, message = why.partition(": ")
    named = _NAMED.search(message)
    return f"{kind}: {named[1] if named else re.sub(r'[0-9]+', 'N', message)[:60]}"
