"""The stored rows of the table: one line of JSON for each case, in the order of the registry."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from tests.outside.case import Case
from tests.outside.judging import Row
from tests.outside.registry import LIBRARIES

__all__ = ["ROWS", "all_cases", "store", "stored"]

ROWS = Path(__file__).parent / "rows.jsonl"
Key: TypeAlias = tuple[str, str]


def all_cases() -> Iterator[Case]:
    for library in LIBRARIES.values():
        yield from library.cases


def stored(path: Path = ROWS) -> dict[Key, Row]:
    """The rows of the last runs, without those of cases that are gone."""
    if not path.exists():
        return {}
    rows = [Row(**json.loads(line)) for line in path.read_text().splitlines()]
    found = {(row.library, row.name): row for row in rows}
    keys = [(case.library, case.name) for case in all_cases()]
    return {key: found[key] for key in keys if key in found}


def store(row: Row, path: Path = ROWS) -> None:
    """Puts one row among the stored ones, which another run may have changed meanwhile."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        rows = {**stored(path), (row.library, row.name): row}
        keys = [(case.library, case.name) for case in all_cases()]
        lines = [json.dumps(rows[key].as_dict()) for key in keys if key in rows]
        file.truncate(0)
        file.write("\n".join(lines) + "\n")
