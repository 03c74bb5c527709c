"""Measures how well an audit finds planted errors, against the loss and cleanlab's normalised margin.

Run as ``python -m benchmarks.ranking --workers 2 --store``; ``--only digits`` selects data sets, and
``--seeds 1`` one seed. A cell is a data set, a kind of label noise and a seed; each is measured undertrained,
well trained and memorised. At least half of the cells have data sets or noises that were not used to choose
the method. The margin is that of five-fold cross-validation: the model is trained five more times.

``--cells FILE`` keeps each cell in a file of JSON lines as soon as it is computed, and computes only those
that are missing there; ``--stop-after 200`` begins no cell after 200 seconds. ``--store`` needs all cells.

``--fresh 200`` computes cells of every data set and noise at the seeds from 200 on instead, to confirm rules
that were chosen or changed after the other cells had been seen; they are stored as a confirmation.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.ranking.cells import Cell, cells, computed, fresh_cells
from benchmarks.ranking.data import DATA, FEW_COLUMNS
from benchmarks.ranking.table import tables
from benchmarks.rows import RESULTS, file_name, provenance


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each data set and noise")
    parser.add_argument("--fresh", type=int, help="first of seeds that were never used")
    parser.add_argument("--only", nargs="+", choices=[*DATA, *FEW_COLUMNS], help="data sets")
    parser.add_argument("--noises", nargs="+", help="noises; 'planted' for outliers and duplicates")
    parser.add_argument("--cells", type=Path, help="file that keeps cells, to resume")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds")
    parser.add_argument("--store", action="store_true", help="keep the cells")
    parser.add_argument("--note", default="", help="kept with the cells")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    chosen = options(argv)
    console = Console(width=110)
    wanted = [
        cell
        for cell in _cells(chosen)
        if (chosen.only is None or cell.data in chosen.only)
        and (chosen.noises is None or cell.noise in chosen.noises)
    ]
    wanted.sort(key=lambda cell: ("planted" not in cell.noise, cell.seed % 100))
    made = provenance(torch.device("cpu"), of_commit=None, rounds=1, steps=1, seed=0)
    began = time.perf_counter()
    found = _kept(chosen.cells, wanted)
    done = {_key(row) for row in found}
    left = [cell for cell in wanted if (cell.data, cell.noise, cell.seed) not in done]
    is_time = lambda: time.perf_counter() - began < chosen.stop_after  # noqa: E731
    for rows in _all(left, chosen.workers, is_time):
        found += rows
        done |= {_key(row) for row in rows}
        if chosen.cells is not None:
            with chosen.cells.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        print(
            f"{len(done)} of {len(wanted)} cells, {time.perf_counter() - began:.0f} s", flush=True
        )
    if len(done) < len(wanted):
        print("run the same command to go on")
        return 3
    for table in tables(found):
        console.print(table)
    if chosen.store:
        kind = "ranking" if chosen.fresh is None else "confirmation"
        path = RESULTS / "ranking" / file_name(kind, "float32", made).replace("jsonl", "json")
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {
            "provenance": asdict(made),
            "cleanlab": version_of("cleanlab"),
            "note": chosen.note,
        }
        path.write_text(json.dumps({**about, "cells": found}) + "\n")
        print(path.relative_to(RESULTS.parent))
    return 0


def _cells(chosen: argparse.Namespace) -> list[Cell]:
    if chosen.fresh is None:
        return cells(chosen.seeds)
    return fresh_cells(chosen.fresh, chosen.seeds)


def version_of(package: str) -> str | None:
    """Returns the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _key(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["data"], row["noise"], row["seed"]


def _kept(path: Path | None, wanted: list[Cell]) -> list[dict[str, Any]]:
    """Returns the rows in the file that belong to the wanted cells."""
    if path is None or not path.exists():
        return []
    keys = {(cell.data, cell.noise, cell.seed) for cell in wanted}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if _key(row) in keys]


def _all(
    wanted: list[Cell], workers: int, is_time: Callable[[], bool]
) -> Iterator[list[dict[str, Any]]]:
    if workers <= 1:
        for cell in wanted:
            if not is_time():
                return
            yield computed(cell)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for rows in pool.imap_unordered(computed, wanted):
            yield rows
            if not is_time():
                return


if __name__ == "__main__":
    sys.exit(main())
