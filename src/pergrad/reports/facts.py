"""Lists how an audit was run, for the end of a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pergrad.reports.numbers import count, duration, number

__all__ = ["facts"]


def facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns (name, value) rows; skips values missing in the summary."""
    model, data = summary.get("model") or {}, summary.get("dataset") or {}
    rows = [
        ("model", _joined(model.get("name"), _counted(model.get("parameters"), "parameter"))),
        ("fingerprint of the model", model.get("fingerprint")),
        ("data set", _joined(data.get("name"), _counted(data.get("size"), "sample"))),
        ("fingerprint of the data", data.get("fingerprint")),
        ("subset", data.get("subset")),
        ("device", _joined(summary.get("device"), summary.get("dtype"))),
        ("processes", summary.get("processes")),
        ("batch size of the audit", summary.get("batch_size")),
        ("length of a sketch", summary.get("sketch_dim")),
        ("seed", summary.get("seed")),
        ("speed", _speed(summary.get("samples_per_second"))),
        *((f"time of {phase}", duration(time)) for phase, time in _seconds(summary).items()),
        ("pergrad", summary.get("pergrad")),
        ("torch", summary.get("torch")),
        ("Python", summary.get("python")),
    ]
    return [(name, str(value)) for name, value in rows if value is not None]


def _seconds(summary: Mapping[str, Any]) -> Mapping[str, float]:
    return summary.get("seconds") or {}


def _counted(value: int | None, noun: str) -> str | None:
    return None if value is None else count(value, noun)


def _speed(value: float | None) -> str | None:
    return None if value is None else f"{number(value)} samples per second"


def _joined(*parts: Any) -> str | None:
    return ", ".join(str(part) for part in parts if part is not None) or None
