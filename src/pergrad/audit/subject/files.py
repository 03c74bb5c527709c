"""Reads a data set from a file of rows, CSV, JSON lines or Parquet, or from a data frame."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq
import torch
from torch import Tensor

from pergrad.errors import AuditError

__all__ = ["SUFFIXES", "FileData"]

_READERS: dict[str, Callable[[Path], pa.Table]] = {
    ".csv": pyarrow.csv.read_csv,
    ".json": pyarrow.json.read_json,
    ".jsonl": pyarrow.json.read_json,
    ".parquet": pq.read_table,
}
SUFFIXES = tuple(_READERS)
_LABELS = ("label", "labels", "target", "class", "y")


class FileData:
    """Rows of a file as (input, target): the columns of numbers as one float tensor, or a text.

    The target is the column `label`, `labels`, `target`, `class` or `y`, else the last one. Labels that are
    strings become positions in `classes`, by default in alphabetical order. A row with an empty cell cannot
    be read: an audit skips and lists it.

    Args:
        source: the path of a file, or a data frame.
        classes: names of the classes, in the order of the model's outputs.
        say: receives what was inferred.
    """

    def __init__(
        self,
        source: Any,
        classes: Sequence[str] | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        is_file = isinstance(source, str | Path)
        table = (
            _read(Path(source)) if is_file else pa.Table.from_pandas(source, preserve_index=False)
        )
        self.path = path = str(source) if is_file else "the data frame"
        if table.num_rows == 0 or table.num_columns < 2:
            raise AuditError(
                f"{path} has {table.num_rows} rows and {table.num_columns} columns: an audit needs rows of "
                "inputs and a target"
            )
        names = table.column_names
        label = next((name for name in _LABELS if name in names), names[-1])
        inputs = [name for name in names if name != label]
        numbers = [name for name in inputs if _is_number(table.schema.field(name).type)]
        texts = [name for name in inputs if _is_text(table.schema.field(name).type)]
        self.text = texts[0] if texts and not numbers else None
        if not numbers and not texts:
            raise AuditError(f"{path} has no column of numbers or texts beside {label!r}: {names}")
        self.classes = None if classes is None else [str(name) for name in classes]
        self._empty = _empty_cells(table, [*numbers, *([self.text] if self.text else []), label])
        self.label = label
        self._targets = self._as_targets(table[label], label, say)
        self._texts = None if self.text is None else table[self.text].to_pylist()
        self.columns = numbers
        self._rows = None if self.text is not None else _tensor(table, numbers)
        what = f"the text {self.text!r}" if self.text else f"{len(numbers)} columns of numbers"
        left = [name for name in inputs if name not in numbers and name != self.text]
        unused = f" (not used: {', '.join(left)})" if left else ""
        say(f"data: {table.num_rows:,} rows of {path}, {what}, target {label!r}{unused}")
        if self._empty:
            say(f"data: {len(self._empty):,} rows have empty cells")

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        if index >= len(self):
            raise IndexError(index)
        if index in self._empty:
            raise ValueError(
                f"row {index} of {self.path} is empty in column {self._empty[index]!r}"
            )
        source = self._texts if self._texts is not None else self._rows
        assert source is not None
        return source[index], self._targets[index]

    def shown(self, item: tuple[Any, Tensor]) -> str:
        """Returns a row as text, with the names of its columns; a target that is no class at the end."""
        target = f" → {self.label} {item[1].item():.4g}" if item[1].is_floating_point() else ""
        if isinstance(item[0], str):
            return f"{item[0]}{target}"
        pairs = zip(self.columns, item[0].tolist(), strict=True)
        return ", ".join(f"{name} {value:.4g}" for name, value in pairs) + target

    def _as_targets(self, column: Any, name: str, say: Callable[[str], None]) -> Tensor:
        if column.null_count == len(column):
            raise AuditError(f"column {name!r} of {self.path} is empty: it should have the labels")
        if _is_text(column.type):
            given = [label for label in column.to_pylist() if label]
            if self.classes is None:
                self.classes = sorted(set(given))
                say(
                    f"classes: {', '.join(self.classes[:8])} in alphabetical order, as outputs 0 up"
                )
            unknown = sorted(set(given) - set(self.classes))
            if unknown:
                raise AuditError(
                    f"label {unknown[0]!r} of {self.path} is none of the classes given"
                )
            place = {label: n for n, label in enumerate(self.classes)}
            return torch.tensor([place.get(label, -1) for label in column.to_pylist()])
        if pa.types.is_integer(column.type) or pa.types.is_boolean(column.type):
            known = column.fill_null(False if pa.types.is_boolean(column.type) else 0)
            return torch.tensor(known.to_numpy().astype("int64"))
        return torch.tensor(column.to_numpy()).float()


def _read(path: Path) -> pa.Table:
    reader = _READERS[path.suffix.lower()]
    try:
        table = reader(path)
    except FileNotFoundError as error:
        files = [p.name for p in path.parent.glob("*")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, files, 1)
        hint = f"did you mean {path.parent / near[0]}?" if near else "check its name and folder"
        raise AuditError(f"no file {path}: {hint}") from error
    except (OSError, pa.ArrowException) as error:
        raise AuditError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    return table


def _empty_cells(table: pa.Table, names: Sequence[str]) -> dict[int, str]:
    """Returns the rows that are empty in one of the columns, and the first such column."""
    found: dict[int, str] = {}
    for name in names:
        if table[name].null_count:
            for row in table[name].is_null().to_numpy().nonzero()[0].tolist():
                found.setdefault(row, name)
    if _is_text(table[names[-1]].type):  # CSV files have empty strings instead
        for row, label in enumerate(table[names[-1]].to_pylist()):
            if label == "":
                found.setdefault(row, names[-1])
    return found


def _is_text(kind: pa.DataType) -> bool:
    is_dictionary = pa.types.is_dictionary(kind)  # a category of pandas
    plain = kind.value_type if is_dictionary else kind
    return pa.types.is_string(plain) or pa.types.is_large_string(plain)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _tensor(table: pa.Table, names: Sequence[str]) -> Tensor:  # (n, columns)
    columns = [torch.tensor(table[name].to_numpy().astype("float32")) for name in names]
    return torch.stack(columns, dim=1)
