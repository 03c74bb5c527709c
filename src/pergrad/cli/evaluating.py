"""Evaluates attribution methods on a task: `pergrad evaluate`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pergrad.audit.subject.reference import load_object
from pergrad.errors import EvaluationError

if TYPE_CHECKING:
    from pergrad.evaluate import Evaluation, Task

__all__ = ["evaluate"]


class Measure(StrEnum):
    """What to measure."""

    LDS = "lds"
    REMOVAL = "removal"
    MISLABELLED = "mislabelled"
    FACTS = "facts"
    DUPLICATES = "duplicates"


def evaluate(
    reference: Annotated[
        str,
        typer.Argument(
            help="The task: package.module:attribute or file.py:attribute, a pergrad.evaluate.Task or a "
            "function that returns one.",
            metavar="REFERENCE",
        ),
    ],
    measure: Annotated[
        Measure,
        typer.Option(
            help="lds: do sums of scores predict retraining on subsets? removal: loss without the top "
            "samples; mislabelled: precision of finding task.wrong; facts: is task.planted first? "
            "duplicates: is the original of a changed copy first?"
        ),
    ] = Measure.LDS,
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated: index, index-final (without checkpoints), index-ekfac, dots, kronfluence, "
            "kronfluence-damped, dattri, traker. Baselines are always beside them."
        ),
    ] = "index,index-final,dots",
    subsets: Annotated[int, typer.Option(help="Subsets of each seed, for lds.", min=3)] = 100,
    fraction: Annotated[
        float, typer.Option(help="Share of the samples in a subset, for lds.")
    ] = 0.5,
    repeats: Annotated[
        int, typer.Option(help="Models trained on each subset, for lds and removal.", min=1)
    ] = 3,
    seeds: Annotated[int, typer.Option(help="Number of seeds.", min=1)] = 3,
    k: Annotated[
        int | None,
        typer.Option(
            help="Samples to remove (default 10), or ranks that count (default 1).", min=1
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSON file for the result.")
    ] = None,
) -> None:
    """Evaluate attribution: do the scores predict what training on other data would have given?"""
    names = _chosen(methods)
    if output is not None:  # before hours of training, not after
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.is_dir():
            raise EvaluationError(f"--output {output} is a folder: name a JSON file")
    task = _task(reference)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        shown: dict[str, Any] = {}

        def watch(done: int, total: int, what: str) -> None:
            if what not in shown:
                shown[what] = bar.add_task(f"{what}, models", total=total)
            bar.update(shown[what], completed=done)

        options: dict[str, Any] = {"seeds": seeds}
        if measure is Measure.LDS:
            options |= {
                "subsets": subsets,
                "fraction": fraction,
                "repeats": repeats,
                "watch": watch,
            }
        elif measure is Measure.REMOVAL:
            options |= {"repeats": repeats, "watch": watch, **({} if k is None else {"k": k})}
        elif measure in (Measure.FACTS, Measure.DUPLICATES) and k is not None:
            options["k"] = k
        found = _measured(measure, names, task, options)
    Console().print(str(found), highlight=False, soft_wrap=True, markup=False)
    if output is not None:
        output.write_text(
            json.dumps({"measure": measure.value, **found.as_json()}, indent=1) + "\n"
        )


def _measured(
    measure: Measure, methods: list[str], task: Task, options: dict[str, Any]
) -> Evaluation:
    from pergrad import evaluate as measures  # noqa: PLC0415  # needs the extra

    return getattr(measures, measure.value)(methods, task, **options)


def _chosen(methods: str) -> list[str]:
    """Returns names of known methods; on the command line they are written without commas and blanks."""
    from pergrad.evaluate.methods import BUILT_IN  # noqa: PLC0415  # needs the extra

    known = {_short(name): name for name in BUILT_IN}
    wanted = [name.strip() for name in methods.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise EvaluationError(f"method {name!r} is not known; choose from {', '.join(known)}")
    return [known[name] for name in wanted]


def _short(name: str) -> str:
    return {"gradient dots": "dots", "index, final model": "index-final"}.get(
        name, name.replace(", ", "-").replace(" ", "-").replace("EK-FAC", "ekfac")
    )


def _task(reference: str) -> Task:
    from pergrad.evaluate import Task  # noqa: PLC0415  # needs the extra

    found = load_object(reference, "task")
    if not isinstance(found, Task):
        raise EvaluationError(
            f"{reference!r} must be a pergrad.evaluate.Task or a function without arguments that returns "
            f"one, got {type(found).__name__}"
        )
    return found
