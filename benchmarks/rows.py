"""A result is one JSON line: what was run, what came out, on which code and which machine."""

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
PACKAGES = ("pergrad", "opacus", "backpack-for-pytorch", "fastDP", "jax", "triton")


@dataclass(frozen=True)
class Provenance:
    """Where and on what a run was made; no host name and no path.

    `checks`: "exact" where every method was compared with the loop in float64 and as it was timed, "timed"
    where only the latter.
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
    """One (model, method) of one run; figures are None unless `status` is "ok".

    `seconds` is the median over the rounds, `ratio` the median of the rounds' own ratios to plain,
    each with its interquartile range beside it; `fastest` is the fastest single step.
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
    """The commit of the checkout and whether anything but stored results differs from it."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown", True
    changed = _git("status", "--porcelain", "--", ":/", ":(top,exclude)benchmarks/results")
    return head, bool(changed)


def versions() -> dict[str, str]:
    """Versions of Python, torch and those peers that are installed."""
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
    """The device in words: the GPU's name, or the CPU's with its cores and memory."""
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
    """Of a run that begins now; `of_commit` where the checkout itself cannot tell."""
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
    """Where the rows of a run are stored, by what it was and when it began."""
    date = datetime.datetime.fromisoformat(run.date)
    return "-".join([size, precision, *([part] if part else []), f"{date:%Y%m%dT%H%M%S}.jsonl"])


def write(path: Path, rows: list[Row]) -> None:
    """Store the rows, a JSON line each; a file that is there is refused, never replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x") as file:
        file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


def update(path: Path, rows: list[Any]) -> None:
    """Store the rows, or any dataclass, of a run that goes on, in place of those it stored before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    partial.replace(path)  # at once: a run that is killed here leaves the old file or the new one


def _pair(values: list[float] | None) -> tuple[float, float] | None:
    return None if values is None else (values[0], values[1])


def read(path: Path) -> list[Row]:
    """The rows of one stored run."""
    rows = []
    for line in path.read_text().splitlines():
        stored = json.loads(line)
        unknown = stored.keys() ^ {field.name for field in fields(Row)}
        if unknown:
            raise ValueError(f"{path.name}: fields {sorted(unknown)} do not match benchmarks.rows")
        stored["provenance"] = Provenance(**stored["provenance"])
        stored["seconds_iqr"] = _pair(stored["seconds_iqr"])
        stored["ratio_iqr"] = _pair(stored["ratio_iqr"])
        rows.append(Row(**stored))
    return rows
