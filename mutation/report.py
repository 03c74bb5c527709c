"""Writes the report: how many mutations were noticed, and the survivors with their reasons."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from mutation.changes import Mutation
from mutation.trials import Outcome

__all__ = ["Key", "StaleError", "load_accepted", "report"]

Key = tuple[str, str, str]  # the file, the lines before and the lines after


class StaleError(RuntimeError):
    """Raised for an accepted survivor whose line or change no longer exists."""


def load_accepted(path: Path, mutations: Sequence[Mutation]) -> dict[Key, str]:
    """Reads the reasons of accepted survivors; raises for an entry that matches no line."""
    if not path.exists():
        return {}
    found: dict[Key, str] = {}
    by_line: dict[tuple[str, str], list[Mutation]] = {}
    for mutation in mutations:
        by_line.setdefault((mutation.path, mutation.before), []).append(mutation)
    for entry in tomllib.loads(path.read_text()).get("survivor", []):
        key: Key = entry["file"], entry["line"], entry["change"]
        own = by_line.get(key[:2], [])
        if not any(m.source is not None and m.after == key[2] for m in own):
            raise StaleError(
                f"{path.name}: no change of {key[0]} turns\n    {key[1]}\ninto\n    {key[2]}\n"
                "take the entry out, or write it for the line as it is now"
            )
        if not entry["reason"].strip():
            raise StaleError(
                f"{path.name}: {key[0]}: {key[1]}: an accepted survivor needs a reason"
            )
        found[key] = entry["reason"]
    return found


def report(
    results: Sequence[tuple[Mutation, Outcome]],
    accepted: Mapping[Key, str],
    *,
    seed: int,
    goal: float,
) -> str:
    """Returns the report as Markdown."""
    noticed = sum(outcome.noticed for _, outcome in results)
    lines = [
        "# Mutations",
        "",
        f"{noticed} of {len(results)} changed lines were noticed by a test: "
        f"{noticed / max(len(results), 1):.1%}, of at least {goal:.0%} wanted (seed {seed}). "
        "`make mutants` writes this; `mutation/__init__.py` says how.",
        "",
        "| folder | changed | noticed |",
        "|---|---:|---:|",
    ]
    changed = Counter(_folder(m) for m, _ in results)
    seen = Counter(_folder(m) for m, outcome in results if outcome.noticed)
    lines += [f"| {name} | {changed[name]} | {seen[name]} |" for name in sorted(changed)]
    survivors = [(m, outcome) for m, outcome in results if not outcome.noticed]
    lines += ["", "## Survivors", ""] if survivors else []
    for mutation, outcome in sorted(survivors, key=lambda pair: (pair[0].path, pair[0].line)):
        reason = accepted.get(mutation.key)
        ran = f"{outcome.tests} tests ran" if outcome.tests else "no test runs this line"
        lines += [
            f"### {mutation.path}:{mutation.line}",
            "",
            f"{mutation.kind}; {ran}. {f'Accepted: {reason}' if reason else '**No reason on record.**'}",
            "",
            "```diff",
            f"-{mutation.before}",
            f"+{mutation.after}",
            "```",
            "",
        ]
    superfluous = [m for m, outcome in results if outcome.noticed and m.key in accepted]
    if superfluous:
        lines += ["## Accepted, but noticed", ""]
        lines += [f"- {m.path}:{m.line}: `{m.after}`" for m in superfluous]
    return "\n".join(lines).rstrip() + "\n"


def _folder(mutation: Mutation) -> str:
    return Path(mutation.path).parts[2] if mutation.path.count("/") > 2 else "."
