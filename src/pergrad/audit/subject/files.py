"""Reads a data set from a file of rows, CSV, JSON lines or Parquet, or from a data frame."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import torch
from torch import Tensor

from pergrad.audit.subject.tables import SUFFIXES, read_frame, read_table
from pergrad.errors import AuditError

__all__ = ["FileData", "counted", "is_file_of_rows"]

_LABELS = ("label", "labels", "target", "class", "y")
_NAMED = 8  # columns


def is_file_of_rows(source: Any) -> bool:
    """Whether this is the path of a file that `FileData` reads, by its suffix."""
    return isinstance(source, str | Path) and Path(source).suffix.lower() in SUFFIXES


class FileData:
    """Rows of a file as (input, target): the columns of numbers as one float tensor, a list, or a text.

    The target is the column `label`, `labels`, `target`, `class` or `y`, else the last one. Labels that are
    strings become positions in `classes`, by default in alphabetical order. A row with an empty cell cannot
    be read: an audit skips and lists it.

    Args:
        source: the path of a file, or a data frame.
        classes: names of the classes, in the order of the model's outputs.
        say: receives what was inferred.
        prefers_text: take the text of rows that have both text and numbers, as for a tokenizer.
    """

    def __init__(
        self,
        source: Any,
        classes: Sequence[str] | None = None,
        say: Callable[[str], None] = lambda _: None,
        *,
        prefers_text: bool = False,
    ) -> None:
        is_file = isinstance(source, str | Path)
        table = read_table(Path(source), say) if is_file else read_frame(source)
        self.path = path = str(source) if is_file else "the data frame"
        if table.num_rows == 0 or table.num_columns < 2:
            raise AuditError(
                f"{path} has {table.num_rows} rows and the columns {table.column_names}: an audit needs rows "
                "of inputs and a target"
            )
        names = table.column_names
        known = {name.lower(): name for name in reversed(names)}
        label = next((known[name] for name in _LABELS if name in known), names[-1])
        inputs = [name for name in names if name != label]
        numbers = [name for name in inputs if _is_number(table.schema.field(name).type)]
        texts = [name for name in inputs if _is_text(table.schema.field(name).type)]
        lists = [name for name in inputs if _is_list(table.schema.field(name).type)]
        if texts and prefers_text:
            numbers, lists = [], []
        self._is_list = bool(lists) and not numbers  # such as an embedding
        numbers = lists[:1] if self._is_list else numbers
        self.text = texts[0] if texts and not numbers else None
        if not numbers and not texts:
            raise AuditError(f"{path} has no column of numbers or texts beside {label!r}: {names}")
        self.classes = None if classes is None else [str(name) for name in classes]
        self._empty = _empty_cells(table, [*numbers, *([self.text] if self.text else []), label])
        self.label = label
        self._targets = self._as_targets(table[label], label, say)
        self._texts = None if self.text is None else table[self.text].to_pylist()
        self.columns = numbers
        self._rows: Tensor | None = None
        if self._is_list:
            self._rows = _vectors(table[numbers[0]], numbers[0], path)
            what = f"lists of {self._rows.shape[1]:,} numbers ({numbers[0]})"
        elif self.text is None:
            self._rows = _tensor(table, numbers)
            what = counted(numbers)
        else:
            what = f"the text {self.text!r}"
        left = [name for name in inputs if name not in numbers and name != self.text]
        unused = f" (not used: {', '.join(left)})" if left else ""
        say(f"data: {table.num_rows:,} rows of {path}, {what}, target {label!r}{unused}")
        if self._empty:
            say(f"data: rows with empty cells: {len(self._empty):,}")

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

    def shown(self, item: tuple[Any, Tensor], *, with_target: bool = False) -> str:
        """Returns a row as text, with the names of its columns; a target that is no class at the end."""
        has_target = with_target or item[1].is_floating_point()
        target = f" → {self.label} {item[1].item():.4g}" if has_target else ""
        if isinstance(item[0], str):
            return f"{item[0]}{target}"
        if self._is_list:
            row = item[0].tolist()
            words = ", ".join(f"{value:.4g}" for value in row[:_NAMED])
            return f"{words}{f', ... ({len(row):,} numbers)' if row[_NAMED:] else ''}{target}"
        pairs = zip(self.columns, item[0].tolist(), strict=True)
        return ", ".join(f"{name} {value:.4g}" for name, value in pairs) + target

    def _as_targets(self, column: Any, name: str, say: Callable[[str], None]) -> Tensor:
        if column.null_count == len(column):
            raise AuditError(f"column {name!r} of {self.path} is empty: it should have the labels")
        if _is_text(column.type):
            labels = [(label or "").strip() for label in column.to_pylist()]
            given = list(filter(None, labels))
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
            return torch.tensor([place.get(label, -1) for label in labels])
        if pa.types.is_integer(column.type) or pa.types.is_boolean(column.type):
            known = column.fill_null(False if pa.types.is_boolean(column.type) else 0)
            try:
                return torch.tensor(known.cast(pa.int64()).to_numpy())
            except pa.ArrowInvalid as error:
                raise AuditError(
                    f"a target in column {name!r} of {self.path} is too large: {error}"
                ) from error
        return torch.tensor(column.to_numpy().astype("float64")).float()


def _empty_cells(table: pa.Table, names: Sequence[str]) -> dict[int, str]:
    """Returns the rows that are empty in one of the columns, and the first such column."""
    found: dict[int, str] = {}
    for name in names:
        if table[name].null_count:
            for row in table[name].is_null().to_numpy().nonzero()[0].tolist():
                found.setdefault(row, name)
        if _is_text(table[name].type):  # CSV files have empty strings instead
            for row, text in enumerate(table[name].to_pylist()):
                if text is not None and not text.strip():
                    found.setdefault(row, name)
    return found


def counted(names: Sequence[str]) -> str:
    """Counts and names columns of numbers."""
    listed = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return f"{len(names):,} column{'s' if len(names) > 1 else ''} of numbers ({listed})"


def _is_text(kind: pa.DataType) -> bool:
    is_dictionary = pa.types.is_dictionary(kind)  # a category of pandas
    plain = kind.value_type if is_dictionary else kind
    return pa.types.is_string(plain) or pa.types.is_large_string(plain)


def _is_number(kind: pa.DataType) -> bool:
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
    return any(is_kind(kind) for is_kind in kinds)


def _is_list(kind: pa.DataType) -> bool:
    are_lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(kind) for is_kind in are_lists) and _is_number(kind.value_type)


def _vectors(column: Any, name: str, path: str) -> Tensor:  # (n, width)
    known = column.drop_null().combine_chunks()
    values = np.asarray(known.flatten().to_numpy(zero_copy_only=False), dtype=np.float32)
    lengths = set(pyarrow.compute.list_value_length(known).unique().to_pylist())
    if len(lengths) != 1 or 0 in lengths:
        raise AuditError(
            f"column {name!r} of {path} has lists of {min(lengths, default=0)} to {max(lengths, default=0)} "
            "numbers: inputs need one length"
        )
    found = np.zeros((len(column), lengths.pop()), dtype=np.float32)
    found[~column.is_null().to_numpy()] = values.reshape(len(known), -1)
    return torch.from_numpy(found)


def _tensor(table: pa.Table, names: Sequence[str]) -> Tensor:  # (n, columns)
    columns = [torch.tensor(table[name].to_numpy().astype("float32")) for name in names]
    return torch.stack(columns, dim=1)
