"""Times the fastest of many runs: other load on the machine only ever makes a run slower."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

import torch

from benchmarks.models import Size
from benchmarks.rows import RESULTS, Provenance, Row, write


def fastest(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm_up: int,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Returns the seconds of the fastest of `rounds` alternating runs of each, after a warm-up."""
    best = dict.fromkeys(functions, float("inf"))
    for number in range(-warm_up, rounds):
        for name, function in functions.items():
            start = clock()
            function()
            taken = clock() - start
            if number >= 0:
                best[name] = min(best[name], taken)
    return best


def fastest_rows(
    seconds: Mapping[str, float],
    titles: Mapping[str, str],
    *,
    size: str,
    model: str,
    model_title: str,
    quantity: str,
    note: str,
    provenance: Provenance,
) -> list[Row]:
    """Returns a row per method; `ratio` is the fastest run relative to the fastest of "plain"."""
    return [
        Row(
            size=size,
            precision="float32",
            model=model,
            model_title=model_title,
            method=name,
            method_title=titles[name],
            quantity=quantity,
            status="ok",
            note=note,
            seconds=taken,
            seconds_iqr=None,
            fastest=taken,
            ratio=taken / seconds["plain"],
            ratio_iqr=None,
            peak_bytes=None,
            memory_ratio=None,
            provenance=provenance,
        )
        for name, taken in seconds.items()
    ]


def show(found: Sequence[Row]) -> None:
    """Prints a line for each row."""
    for row in found:
        assert row.seconds is not None
        what = f"{row.model_title:60} {row.method_title:30}"
        print(f"{what} {row.seconds * 1e3:8.2f} ms {row.ratio:5.2f}x")


def store(found: list[Row], folder: str, kind: str = "cpu") -> None:
    """Keeps the rows in a folder of their own, which no table of all results reads."""
    path = RESULTS / folder / f"{kind}-{datetime.now(UTC):%Y%m%dT%H%M%S}.jsonl"
    write(path, found)
    print(path)


def run_on_one_thread(
    rows: Callable[[Size, int, int], list[Row]],
    arguments: Sequence[str] | None,
    *,
    description: str | None,
    folder: str,
    rounds: int,
) -> list[Row]:
    """Runs a benchmark on the CPU by the arguments of its command line: shows its rows, and may keep them."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--size", choices=["tiny", "cpu"], default="cpu")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", action="store_true", help="keep the rows")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = rows(options.size, options.rounds, options.seed)
    show(found)
    if options.store:
        store(found, folder)
    return found
