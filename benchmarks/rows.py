"""Stores results as JSON lines: the method, its figures, the commit and the machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

RESULTS = Path(__file__).parent / "results"

Checks = Literal["exact", "timed"]
Status = Literal["ok", "wrong", "failed", "skipped"]
PACKAGES = (
    *("pergrad", "opacus", "backpack-for-pytorch", "fastDP", "jax", "triton"),
    *("kronfluence", "dattri", "traker", "transformers"),
)


@dataclass(frozen=True)
class Provenance:
    """Code and machine of a run; no host name and no path.

    `checks` is "exact" if every method was compared with the loop in float64 and at the timed precision, and
    "timed" if only at the latter.
    """

    commit: str
    dirty: bool
    date: str
    versions: dict[str, str]
    machine: str
    rounds: int
    steps: int
    seed: int
    checks: Checks = "exact"


@dataclass(frozen=True)
class Row:
    """One (model, method) pair of one run; figures are None unless `status` is "ok".

    `seconds` is the median over the rounds, `ratio` the median of the rounds' ratios to plain, each with its
    interquartile range; `fastest` is the fastest single step; `first_seconds`, where it was measured, is what
    the first steps took, with their compilation; `device_seconds`, the time of the GPU in one step.
    """

    size: str
    precision: str
    model: str
    model_title: str
    method: str
    method_title: str
    quantity: str
    status: Status
    note: str
    seconds: float | None
    seconds_iqr: tuple[float, float] | None
    fastest: float | None
    ratio: float | None
    ratio_iqr: tuple[float, float] | None
    peak_bytes: int | None
    memory_ratio: float | None
    provenance: Provenance
    first_seconds: float | None = None
    device_seconds: float | None = None


def _git(*arguments: str) -> str | None:
    command = ["git", *arguments]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def commit() -> tuple[str, bool]:
    """Returns the commit of the checkout, and whether anything but stored results differs from it."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown", True
    changed = _git("status", "--porcelain", "--", ":/", ":(top,exclude)benchmarks/results")
    return head, bool(changed)


def versions() -> dict[str, str]:
    """Returns the versions of Python, torch and the installed peers."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine(device: torch.device) -> str:
    """Describes the device: the GPU's name, or the CPU's with its cores and memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{_cpu()}, {torch.get_num_threads()} threads, {memory:.0f} GiB"


def provenance(
    device: torch.device,
    *,
    of_commit: str | None,
    rounds: int,
    steps: int,
    seed: int,
    checks: Checks = "exact",
) -> Provenance:
    """Returns the provenance of a run that starts now; `of_commit` replaces the checkout's commit."""
    head, dirty = (of_commit, False) if of_commit is not None else commit()
    return Provenance(
        commit=head,
        dirty=dirty,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=versions(),
        machine=machine(device),
        rounds=rounds,
        steps=steps,
        seed=seed,
        checks=checks,
    )


def file_name(size: str, precision: str, run: Provenance, *, part: str = "") -> str:
    """Returns the file name for the rows of a run: its settings and start time."""
    date = datetime.datetime.fromisoformat(run.date)
    return "-".join([size, precision, *([part] if part else []), f"{date:%Y%m%dT%H%M%S}.jsonl"])


def write(path: Path, rows: list[Row]) -> None:
    """Stores the rows, one JSON line each; refuses to replace an existing file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x") as file:
        file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


def update(path: Path, rows: list[Any]) -> None:
    """Stores the rows, or any dataclass, of a running benchmark, replacing its earlier rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    partial.replace(path)  # atomic: a killed run leaves the old file or the new one


def _pair(values: list[float] | None) -> tuple[float, float] | None:
    return None if values is None else (values[0], values[1])


def read(path: Path) -> list[Row]:
    """Reads the rows of one stored run."""
    rows = []
    for line in path.read_text().splitlines():
        stored = json.loads(line)
        for later in ("first_seconds", "device_seconds"):  # rows of before have none
            stored.setdefault(later, None)
        unknown = stored.keys() ^ {field.name for field in fields(Row)}
        if unknown:
            raise ValueError(f"{path.name}: fields {sorted(unknown)} do not match benchmarks.rows")
        stored["provenance"] = Provenance(**stored["provenance"])
        stored["seconds_iqr"] = _pair(stored["seconds_iqr"])
        stored["ratio_iqr"] = _pair(stored["ratio_iqr"])
        rows.append(Row(**stored))
    return rows
