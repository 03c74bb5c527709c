"""Answers "how much noise for epsilon 3?" and "what has this run spent?"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pergrad.errors import PrivacyError
from pergrad.private import Plan, selftest
from pergrad.private.stepping.ledger import read_ledger

__all__ = ["privacy"]

_FAILED = 1
_SAMPLING, _ACCOUNTANT = "poisson", "pld"  # by default
_ROWS, _WIDTH, _HEIGHT = 8, 48, 10  # of the table and of the plot


def privacy(
    epsilon: Annotated[
        float | None, typer.Option(help="Target: find the noise that gives it.")
    ] = None,
    noise: Annotated[
        float | None, typer.Option(help="Noise multiplier: print the epsilon that it gives.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Delta; below 1 / population.")] = None,
    sample_rate: Annotated[
        float | None, typer.Option(help="Probability of each record to be in a batch.")
    ] = None,
    batch_size: Annotated[
        float | None, typer.Option(help="Expected batch size; with --population, the sample rate.")
    ] = None,
    population: Annotated[int | None, typer.Option(help="Public number of records.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps.")] = None,
    epochs: Annotated[
        float | None,
        typer.Option(help="Epochs, instead of --steps: each is 1 / sample rate steps."),
    ] = None,
    neighbours: Annotated[
        str | None, typer.Option(help="add-remove, replace-one or replace-special.")
    ] = None,
    sampling: Annotated[str, typer.Option(help="poisson, truncated or shuffled.")] = _SAMPLING,
    bands: Annotated[int, typer.Option(help="Bands of correlated noise.", min=1)] = 1,
    accountant: Annotated[str, typer.Option(help="pld or rdp.")] = _ACCOUNTANT,
    ledger: Annotated[
        Path | None, typer.Option(help="Ledger of a run: print the epsilon that it has spent.")
    ] = None,
    run_selftest: Annotated[
        bool,
        typer.Option("--selftest", help="Plant known bugs and check that the audits find them."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Random seed of --selftest.")] = 0,
) -> None:
    """Find the noise for an epsilon, or the epsilon of a noise, a plan or a run; or test the audit.

    Prints epsilon after parts of the run as a table and as a plot. Needs the extra "private".
    """
    console = Console()
    asked = {
        "--epsilon": epsilon,
        "--noise": noise,
        "--sample-rate": sample_rate,
        "--batch-size": batch_size,
        "--population": population,
        "--steps": steps,
        "--epochs": epochs,
        "--neighbours": neighbours,
        "--sampling": sampling if sampling != _SAMPLING else None,
        "--bands": bands if bands != 1 else None,
        "--accountant": accountant if accountant != _ACCOUNTANT else None,
    }
    given = [name for name, value in asked.items() if value is not None]
    if run_selftest:
        more = {"--delta": delta, "--ledger": ledger}
        given += [name for name, value in more.items() if value is not None]
        if given:
            raise PrivacyError(
                f"--selftest trains by a plan of its own: leave out {', '.join(given)}"
            )
        _selftest(console, seed)
        return
    if ledger is not None:
        if given:
            raise PrivacyError(
                f"--ledger tells what a run has spent by its own plan: leave out {', '.join(given)}"
            )
        head, spent = read_ledger(ledger)
        plan = Plan.from_state_dict(head["plan"])
        delta = plan.delta if delta is None else delta
        if delta is None:
            raise PrivacyError("the plan of this ledger has no delta: pass --delta")
        console.print(
            f"{escape(str(ledger))}: {spent} of {plan.steps} steps released, "
            f"epsilon [bold]{plan.epsilon(delta, steps=spent):.4f}[/bold] at delta {delta:g}",
            highlight=False,
        )
        _show(console, plan, delta, spent)
        return
    options: dict[str, Any] = {
        "neighbours": neighbours,
        "sampling": sampling,
        "bands": bands,
        "accountant": accountant,
        "population": population,
        "expected_batch_size": batch_size,
        "max_norm": 1.0,
    }
    options["sample_rate"] = _rate(sample_rate, batch_size, population)
    options["steps"] = _steps(steps, epochs, options["sample_rate"])
    if delta is None:
        raise PrivacyError("pass --delta: an epsilon holds for one delta, below 1 / population")
    if (epsilon is None) == (noise is None):
        raise PrivacyError("pass --epsilon to find the noise, or --noise to find epsilon")
    if epsilon is not None:
        plan = Plan.calibrate(epsilon=epsilon, delta=delta, **options)
    else:
        assert noise is not None
        plan = Plan(noise_multiplier=noise, delta=delta, **options)
    console.print(
        f"noise multiplier [bold]{plan.noise_multiplier:.4f}[/bold] gives epsilon "
        f"[bold]{plan.epsilon():.4f}[/bold] at delta {delta:g}, {plan.neighbours} neighbours, "
        f"{plan.accountant.upper()}"
        + (f" at discretization {plan.discretization:g}" if plan.accountant == "pld" else ""),
        highlight=False,
    )
    _show(console, plan, delta, plan.steps)


def _rate(rate: float | None, batch_size: float | None, population: int | None) -> float:
    both = None
    if batch_size is not None and population is not None:
        if population < 1:
            raise PrivacyError(f"--population must be a positive integer, got {population}")
        both = batch_size / population
    if rate is not None and both is not None and not math.isclose(rate, both, rel_tol=1e-3):
        raise PrivacyError(
            f"--sample-rate {rate:g} is not --batch-size / --population = {both:g}: leave one of them out"
        )
    found = both if rate is None else rate
    if found is None:
        raise PrivacyError("pass --sample-rate, or --batch-size and --population")
    return found


def _steps(steps: int | None, epochs: float | None, rate: float) -> int:
    if (steps is None) == (epochs is None):
        raise PrivacyError("pass one of --steps and --epochs")
    if steps is not None:
        return steps
    assert epochs is not None
    if not 0 < rate <= 1 or not 0 < epochs < math.inf:
        raise PrivacyError(
            f"--epochs must be positive and the sample rate in (0, 1], got {epochs:g} and {rate:g}"
        )
    return math.ceil(epochs / rate)


def _show(console: Console, plan: Plan, delta: float, last: int) -> None:
    """Prints epsilon after parts of the first `last` steps."""
    if not last:
        return
    places = sorted({max(1, round(last * k / _ROWS)) for k in range(1, _ROWS + 1)})
    curve = [plan.epsilon(delta, steps=place) for place in places]
    table = Table("steps", "epsilon", box=None, header_style="bold")
    for column in table.columns:
        column.justify = "right"
    for place, value in zip(places, curve, strict=True):
        table.add_row(f"{place:,}", f"{value:.4f}")
    console.print(table)
    if len(curve) > 1 and max(curve) < math.inf:
        console.print(plot([0, *places], [0.0, *curve]), highlight=False)


def plot(steps: Sequence[int], values: Sequence[float]) -> str:
    """Draws values over steps as text."""
    top = max(values)
    columns = []
    for k in range(_WIDTH):
        at = steps[-1] * (k + 1) / _WIDTH
        right = next(i for i, step in enumerate(steps) if step >= at - 1e-9)
        left = max(right - 1, 0)
        width = steps[right] - steps[left]
        share = (at - steps[left]) / width if width else 1.0
        columns.append(values[left] + share * (values[right] - values[left]))
    lines = []
    for row in range(_HEIGHT, 0, -1):
        label = f"{top * row / _HEIGHT:8.3f} ┤" if row in (_HEIGHT, _HEIGHT // 2) else " " * 9 + "│"
        cells = "".join(_cell(value / top * _HEIGHT - (row - 1)) for value in columns)
        lines.append(label + cells.rstrip())
    lines.append(" " * 9 + "└" + "─" * _WIDTH)
    lines.append(" " * 10 + "epsilon after steps 0" + f"{steps[-1]:,}".rjust(_WIDTH - 21))
    return "\n".join(lines)


def _cell(height: float) -> str:
    return " ▁▂▃▄▅▆▇█"[min(max(round(height * 8), 0), 8)]


def _selftest(console: Console, seed: int) -> None:
    table = Table("training", "found", "", "limit", "", box=None, header_style="bold")
    is_ok = True
    with console.status("auditing"):
        for finding in selftest(seed):
            is_ok &= finding.ok
            what = ("found" if finding.planted else "passes") if finding.ok else "WRONG"
            table.add_row(
                finding.name, finding.unit, f"{finding.found:.3f}", f"{finding.limit:g}", what
            )
    console.print(table)
    if not is_ok:
        raise typer.Exit(_FAILED)
