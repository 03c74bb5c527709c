"""Reads a data set from a file of rows: CSV, JSON lines or Parquet."""

from __future__ import annotations

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

__all__ = ["SUFFIXES", "FileData", "tokenized"]

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
    strings become positions in `classes`, by default in alphabetical order.
    """

    def __init__(
        self,
        path: str | Path,
        classes: Sequence[str] | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.path = Path(path)
        table = _read(self.path)
        names = table.column_names
        label = next((name for name in _LABELS if name in names), names[-1])
        inputs = [name for name in names if name != label]
        numbers = [name for name in inputs if _is_number(table.schema.field(name).type)]
        texts = [name for name in inputs if pa.types.is_string(table.schema.field(name).type)]
        self.text = texts[0] if texts and not numbers else None
        if not numbers and not texts:
            raise AuditError(f"{path} has no column of numbers or texts beside {label!r}: {names}")
        self.classes = None if classes is None else [str(name) for name in classes]
        self._targets = self._as_targets(table[label], label, say)
        self._texts = None if self.text is None else table[self.text].to_pylist()
        self.columns = numbers
        self._rows = None if self.text is not None else _tensor(table, numbers)
        what = f"the text {self.text!r}" if self.text else f"{len(numbers)} columns of numbers"
        left = [name for name in inputs if name not in numbers and name != self.text]
        unused = f" (not used: {', '.join(left)})" if left else ""
        say(f"data: {table.num_rows:,} rows of {path}, {what}, target {label!r}{unused}")

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        if index >= len(self):
            raise IndexError(index)
        source = self._texts if self._texts is not None else self._rows
        assert source is not None
        return source[index], self._targets[index]

    def shown(self, item: tuple[Any, Tensor]) -> str:
        """Returns a row as text, with the names of its columns."""
        if isinstance(item[0], str):
            return item[0]
        pairs = zip(self.columns, item[0].tolist(), strict=True)
        return ", ".join(f"{name} {value:.4g}" for name, value in pairs)

    def _as_targets(self, column: Any, name: str, say: Callable[[str], None]) -> Tensor:
        if column.null_count:
            raise AuditError(f"column {name!r} of {self.path} has {column.null_count} empty labels")
        if pa.types.is_string(column.type):
            given = column.to_pylist()
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
            return torch.tensor([place[label] for label in given])
        if pa.types.is_integer(column.type) or pa.types.is_boolean(column.type):
            return torch.tensor(column.to_numpy().astype("int64"))
        return torch.tensor(column.to_numpy()).float()


def tokenized(tokenizer: Any) -> Callable[[list[Any]], Any]:
    """Returns a collate function that tokenizes the texts of (text, target)."""

    def collate(items: list[Any]) -> dict[str, Tensor]:
        batch = tokenizer(
            [text for text, _ in items], padding=True, truncation=True, return_tensors="pt"
        )
        return {**dict(batch), "labels": torch.stack([target for _, target in items])}

    return collate


def _read(path: Path) -> pa.Table:
    reader = _READERS[path.suffix.lower()]
    try:
        table = reader(path)
    except FileNotFoundError as error:
        raise AuditError(f"no file {path}: check its name and folder") from error
    except (OSError, pa.ArrowException) as error:
        raise AuditError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    if table.num_rows == 0 or table.num_columns < 2:
        raise AuditError(
            f"{path} has {table.num_rows} rows and {table.num_columns} columns: an audit needs rows of "
            "inputs and a target"
        )
    return table


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _tensor(table: pa.Table, names: Sequence[str]) -> Tensor:  # (n, columns)
    columns = [torch.tensor(table[name].to_numpy().astype("float32")) for name in names]
    return torch.stack(columns, dim=1)
