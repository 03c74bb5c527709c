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

__all__ = ["SUFFIXES", "near_file", "read_frame", "read_table", "refuse_missing"]

_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_LONGEST = 2**31 - 1  # bytes of a block of pyarrow
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_DECIMAL_COMMA = re.compile(r"\s*[+-]?\d+(,\d+)?\s*")
# What pandas calls an index without a name: in CSV files, read from such files, and in Parquet files.
_OF_PANDAS = re.compile(r"|Unnamed: \d+|__index_level_\d+__")
_FAILURES = (OSError, ValueError, TypeError, OverflowError, pa.ArrowException)


def read_table(path: Path, say: Callable[[str], None] = lambda _: None) -> pa.Table:
    """Returns the rows of a file.

    CSV files may be separated by commas, semicolons, tabs or bars; numbers may have decimal commas. If their
    first line has numbers alone, columns have no names, and are called f0, f1, ... JSON is an object on each
    line, one list of objects, or one object of columns. An index that pandas has written is left out.

    Args:
        path: a file whose suffix is one of `SUFFIXES`.
        say: receives what was inferred.
    """
    refuse_missing(path)
    try:
        table = _READERS[path.suffix.lower()](path, say)
        return _without_index(_refuse_repeated_names(table, str(path)), say)
    except UnicodeDecodeError as error:
        raise AuditError(f"{path} is not text in UTF-8: convert it, or read it yourself") from error
    except _FAILURES as error:
        raise AuditError(f"cannot read {path}: {' '.join(str(error).split())}") from error


def refuse_missing(path: Path) -> None:
    """Raises an error if there is no such file; suggests one of a similar name."""
    if not path.exists():
        raise AuditError(f"no file {path}: {near_file(path) or 'check its name and folder'}")


def near_file(path: Path) -> str:
    """Suggests a file of a similar name, with a suffix that is read; empty if there is none."""
    files = path.parent.glob("*") if path.parent.is_dir() else ()
    names = [file.name for file in files if file.suffix.lower() in SUFFIXES]
    near = difflib.get_close_matches(path.name, names, 1)
    return f"did you mean {path.parent / near[0]}?" if near else ""


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


def _without_index(table: pa.Table, say: Callable[[str], None]) -> pa.Table:
    """Leaves out columns without a name that count the rows, and others that pandas names as its index."""
    for name in table.column_names:
        if _OF_PANDAS.fullmatch(name) and (name.startswith("__") or _counts(table[name])):
            what = repr(name) if name else "the column without a name"
            say(f"data: {what} is an index of pandas: not used")
            table = table.drop_columns([name])
    return table


def _counts(column: pa.ChunkedArray) -> bool:
    """Whether a column is 0, 1, 2, ..., or part of that in order, as after rows were taken out."""
    if not pa.types.is_integer(column.type) or column.null_count:
        return False
    values = column.to_numpy()
    return bool((values >= 0).all() and (values[1:] > values[:-1]).all())


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

    def table(point: str) -> pa.Table:
        return _in_one_block(
            lambda block: pyarrow.csv.read_csv(
                path,
                pyarrow.csv.ReadOptions(
                    block_size=block,
                    encoding=encoding[:6].rstrip("-"),
                    autogenerate_column_names=not has_names,
                ),
                pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True),
                pyarrow.csv.ConvertOptions(decimal_point=point),
            ),
            path,
        )

    found = table(".")
    if separator != "," and any(map(_has_decimal_commas, found.columns)):
        say("data: numbers have decimal commas")
        found = table(",")
    return found.rename_columns([name.strip() for name in found.column_names])


def _has_decimal_commas(column: pa.ChunkedArray) -> bool:
    """Whether a column that was read as strings has numbers such as 2,5, and nothing else."""
    if not pa.types.is_string(column.type):
        return False
    given = [text for text in column.to_pylist() if text and text.strip()]
    return any("," in text for text in given) and all(map(_DECIMAL_COMMA.fullmatch, given))


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
        table = _in_one_block(
            lambda block: pyarrow.json.read_json(path, pyarrow.json.ReadOptions(block_size=block)),
            path,
        )
        return _of_columns(table) if table.num_rows == 1 else table
    rows = json.loads(path.read_text(encoding="utf-8-sig"))
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("the entries of its list must be objects, one for each row")
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})


def _of_columns(table: pa.Table) -> pa.Table:
    """Returns the rows of one object of columns, as `DataFrame.to_json` writes it; another table as it is."""
    columns: dict[str, list[Any]] = {}
    for name in table.column_names:
        (value,) = table[name].to_pylist()
        if not isinstance(value, dict | list):
            return table
        columns[name] = list(value.values()) if isinstance(value, dict) else value
    return pa.table(columns) if len({len(part) for part in columns.values()}) == 1 else table


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
