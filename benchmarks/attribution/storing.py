"""Stores the results of a task and a seed, and joins those of all seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import RESULTS, Provenance
from pergrad.evaluate import Evaluation

__all__ = ["SEEDS", "Run", "joined", "path_of", "runs", "store"]

FOLDER = RESULTS / "attribution"
SEEDS = frozenset({0, 1, 2})  # of a complete run
_DIGITS = 4  # of a stored number


@dataclass(frozen=True)
class Run:
    """A task after so many epochs: its evaluations over all seeds that are stored, and where it ran."""

    task: str
    epochs: int
    evaluations: tuple[Evaluation, ...]
    provenance: dict[str, Any]


def path_of(task: str, epochs: int, seed: int, folder: Path = FOLDER) -> Path:
    """Returns the file of a task, its epochs and a seed."""
    return folder / f"{task}-{epochs}-seed{seed}.json"


def store(
    task: str,
    epochs: int,
    seed: int,
    found: Sequence[Evaluation],
    run: Provenance,
    seconds: int,
    folder: Path = FOLDER,
) -> None:
    """Stores the numbers of every query; replaces those of an earlier run."""
    stored = {
        "task": task,
        "epochs": epochs,
        "seed": seed,
        "seconds": seconds,
        "provenance": asdict(run),
        "evaluations": [
            {
                "name": part.name,
                "about": dict(part.about),
                "notes": list(part.notes),
                "values": {name: v[0].round(_DIGITS).tolist() for name, v in part.values.items()},
            }
            for part in found
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path_of(task, epochs, seed, folder).write_text(json.dumps(stored) + "\n")


def runs(folder: Path = FOLDER) -> list[Run]:
    """Returns the stored runs that have all seeds, joined; an unfinished one is left out."""
    by_task: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        stored = json.loads(path.read_text())
        by_task.setdefault((stored["task"], stored["epochs"]), []).append(stored)
    return [
        Run(task, epochs, _evaluations(parts), parts[0]["provenance"])
        for (task, epochs), parts in by_task.items()
        if {part["seed"] for part in parts} >= SEEDS
    ]


def _evaluations(seeds: Sequence[dict[str, Any]]) -> tuple[Evaluation, ...]:
    parts = [
        [
            Evaluation(
                part["name"],
                {name: np.array([values]) for name, values in part["values"].items()},
                part["about"],
                tuple(part["notes"]),
            )
            for part in stored["evaluations"]
        ]
        for stored in seeds
    ]
    return tuple(joined(each) for each in zip(*parts, strict=True))


def joined(parts: Sequence[Evaluation]) -> Evaluation:
    """Joins evaluations of one seed each, whose queries differ."""
    names = [name for name in parts[0] if all(name in part.values for part in parts)]
    values = {name: np.concatenate([part.values[name] for part in parts]) for name in names}
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    return Evaluation(
        parts[0].name, values, {**parts[0].about, "seeds": len(parts)}, notes, paired=False
    )
