"""Reads a table from a file, CSV, JSON or Parquet, or from a data frame; says what is wrong with it."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from pergrad.errors import AuditError

__all__ = ["SUFFIXES", "read_frame", "read_table"]

_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_LONGEST = 2**31 - 1  # bytes of a block of pyarrow
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_FAILURES = (OSError, ValueError, TypeError, OverflowError, pa.ArrowException)


def read_table(path: Path, say: Callable[[str], None] = lambda _: None) -> pa.Table:
    """Returns the rows of a file.

    CSV files may be separated by commas, semicolons, tabs or bars. If their first line has numbers alone,
    columns have no names, and are called f0, f1, ... JSON is an object on each line, or one list of objects.

    Args:
        path: a file whose suffix is one of `SUFFIXES`.
        say: receives what was inferred.
    """
    if not path.exists():
        files = [p.name for p in path.parent.glob("*")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, files, 1)
        hint = f"did you mean {path.parent / near[0]}?" if near else "check its name and folder"
        raise AuditError(f"no file {path}: {hint}")
    try:
        return _refuse_repeated_names(_READERS[path.suffix.lower()](path, say), str(path))
    except UnicodeDecodeError as error:
        raise AuditError(f"{path} is not text in UTF-8: convert it, or read it yourself") from error
    except _FAILURES as error:
        raise AuditError(f"cannot read {path}: {' '.join(str(error).split())}") from error


def read_frame(frame: Any) -> pa.Table:
    """Returns the rows of a data frame of pandas."""
    names = [str(name) for name in frame.columns]
    _refuse_repeated(names, "the data frame")
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except _FAILURES as error:
        said = "; ".join(map(str, error.args))
        raise AuditError(
            f"cannot read the data frame: {said}; a column needs values of one type"
        ) from error


def _refuse_repeated_names(table: pa.Table, where: str) -> pa.Table:
    _refuse_repeated(table.column_names, where)
    for name in table.column_names:
        if pa.types.is_binary(table.schema.field(name).type):
            raise AuditError(
                f"column {name!r} of {where} is not text in UTF-8: convert it, or read it yourself"
            )
    return table


def _refuse_repeated(names: list[str], where: str) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise AuditError(
            f"{where} has several columns {repeated[0]!r}: each column needs a name of its own"
        )


def _read_csv(path: Path, say: Callable[[str], None]) -> pa.Table:
    with path.open("rb") as file:
        encoding = "utf-16" if file.read(2) in _UTF_16 else "utf-8-sig"
    with path.open(encoding=encoding, errors="replace", newline="") as text:
        first = re.sub(r'"[^"]*"', "", text.readline(1 << 20))
    separator = max(_SEPARATORS, key=first.count)  # of as many, the comma
    if separator != ",":
        say(f"data: columns are separated by {_SEPARATORS[separator]}")
    has_names = not all(_is_number(part) for part in first.split(separator))
    if not has_names:
        say("data: the first line has numbers, so columns have no names: f0, f1, ...")

    def read(block: int | None) -> pa.Table:
        return pyarrow.csv.read_csv(
            path,
            pyarrow.csv.ReadOptions(
                block_size=block,
                encoding=encoding[:6].rstrip("-"),
                autogenerate_column_names=not has_names,
            ),
            pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True),
        )

    return _in_one_block(read, path)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _read_json(path: Path, say: Callable[[str], None]) -> pa.Table:
    with path.open("rb") as file:
        is_list = file.read(1 << 16).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    if not is_list:
        return _in_one_block(
            lambda block: pyarrow.json.read_json(path, pyarrow.json.ReadOptions(block_size=block)),
            path,
        )
    rows = json.loads(path.read_text(encoding="utf-8-sig"))
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("the entries of its list must be objects, one for each row")
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})


def _in_one_block(read: Callable[[int | None], pa.Table], path: Path) -> pa.Table:
    """Reads a file block by block; types that the first block does not show take all of it as one block."""
    try:
        return read(None)
    except pa.ArrowInvalid:
        size = path.stat().st_size
        if not 0 < size <= _LONGEST:
            raise
        return read(size)


_READERS: dict[str, Callable[[Path, Callable[[str], None]], pa.Table]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": lambda path, say: pq.read_table(path),
}
SUFFIXES = tuple(_READERS)
