"""Accepts what people have as data: data sets, loaders, tensors, tables, anything that can be iterated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from pergrad.audit.subject.files import FileData, is_file_of_rows
from pergrad.audit.subject.places import told
from pergrad.audit.subject.tables import SUFFIXES, near_file
from pergrad.errors import AuditError

__all__ = ["as_dataset", "listed", "name_of_data", "names_in_config", "names_of_classes"]

_MOST = 10_000_000  # items; an endless data set would fill the memory
_MOST_ERRORS = 100  # in a row


def as_dataset(
    data: Any, say: Callable[[str], None], classes: Any = None, *, prefers_text: bool = False
) -> tuple[Any, Callable[[list[Any]], Any] | None]:
    """Returns a map-style data set, and the collate function that comes with it, if any.

    A loader stands for its data set, a tuple of columns (tensors, arrays, data frames) for their rows, a data
    frame or the path of a file for its rows, and an iterable for the list of its items.

    >>> dataset, _ = as_dataset((torch.zeros(3, 2), np.zeros(3)), print)
    data: 3 rows of 2 tensors
    >>> len(dataset)
    3
    """
    if isinstance(data, DataLoader):
        say(f"data: the {type(data.dataset).__name__} of the DataLoader, in order")
        collate = None if data.collate_fn is default_collate else data.collate_fn
        return as_dataset(data.dataset, say, classes, prefers_text=prefers_text)[0], collate
    if _are_columns(data):
        return _rows_of([_column(part, where) for where, part in enumerate(data)], say), None
    if hasattr(data, "to_dict") and hasattr(data, "iloc"):  # a data frame of pandas
        return FileData(data, classes, say, prefers_text=prefers_text), None
    if isinstance(data, str | Path):
        if not is_file_of_rows(data):
            near = near_file(Path(data))
            raise AuditError(
                f"the data {str(data)!r} is not a file of rows: its name must end in {', '.join(SUFFIXES)}"
                f"{near and f'; {near}'}"
            )
        return FileData(data, classes, say, prefers_text=prefers_text), None
    _refuse_other_columns(data)
    if isinstance(data, type):
        raise AuditError(f"the data set is the class {data.__name__}: pass an object of it")
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        return listed(data, say), None
    if not hasattr(data, "__len__"):
        raise AuditError(
            f"the data set must have a length; {type(data).__name__} has items by index, but no __len__"
        )
    return data, None


def _are_columns(data: Any) -> bool:
    """Whether this is a tuple of (inputs, targets), with a row for every sample; lists may be targets."""
    if type(data) is not tuple or len(data) < 2 or not _is_array(data[0]):
        return False
    if not all(_is_array(part) or type(part) is list for part in data):
        return False
    return len({len(part) for part in data}) == 1


def _is_array(part: Any) -> bool:
    """Whether this is a tensor, an array, or a data frame or column of pandas."""
    is_of_pandas = hasattr(part, "to_numpy") and hasattr(part, "iloc")
    return is_of_pandas or (isinstance(part, Tensor | np.ndarray) and part.ndim > 0)


def _column(part: Any, where: int) -> Tensor | list[str]:
    """Returns the rows of a column as a tensor, or as strings."""
    if isinstance(part, Tensor):
        return part
    name = "the inputs" if where == 0 else "the targets"
    try:
        values = part.to_numpy() if hasattr(part, "to_numpy") else np.asarray(part)
        if values.dtype.kind in "OUT":  # objects and strings
            if values.ndim == 1 and all(isinstance(value, str) for value in values.tolist()):
                return [str(value) for value in values.tolist()]
            values = values.astype(np.float64)  # a data frame of several types has objects
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))
    except (TypeError, ValueError) as error:
        raise AuditError(
            f"{name} cannot be made a tensor ({error}): pass numbers, or names of classes"
        ) from error


def _rows_of(columns: list[Tensor | list[str]], say: Callable[[str], None]) -> Any:
    tensors = [part for part in columns if isinstance(part, Tensor)]
    if len(tensors) == len(columns):
        say(f"data: {len(columns[0]):,} rows of {len(columns)} tensors")
        return TensorDataset(*tensors)
    say(f"data: {len(columns[0]):,} rows of {len(columns)} columns, some of them strings")
    return list(zip(*columns, strict=True))


def _refuse_other_columns(data: Any) -> None:
    if isinstance(data, Mapping):
        names = ", ".join(f"data[{name!r}]" for name in list(data)[:2])
        raise AuditError(
            f"the data are a dict: pass one of its values, the tuple ({names}), or a list of dicts"
        )
    if type(data) is tuple and len(data) == 2:
        if _is_array(data[0]) and (_is_array(data[1]) or type(data[1]) is list):
            raise AuditError(
                f"the inputs have {len(data[0]):,} rows, the targets {len(data[1]):,}: they need one each"
            )
        if all(type(part) is list and len(part) == len(data[0]) > 2 for part in data):
            raise AuditError(
                "the data are a tuple of lists: pass arrays or tensors, or a list of (input, target)"
            )


class Items(list[Any]):
    """Items of an iterable; an entry that could not be read raises its error again."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(found, _Failed):
            raise found.error
        return found


@dataclass(frozen=True)
class _Failed:
    error: Exception


def listed(dataset: Iterable[Any], say: Callable[[str], None]) -> Items:
    """Returns the items in order; an audit that resumes reads them again from the start.

    An error takes the place of one item. A generator ends there, any other iterator may go on.

    >>> listed(iter("abc"), print)
    data: 3 items of str_ascii_iterator read once, in order, and kept in memory
    ['a', 'b', 'c']
    """
    kind = type(dataset).__name__
    if not hasattr(dataset, "__iter__"):
        raise AuditError(
            f"the data set must have items by index, or be iterable; {kind} is neither"
        )
    items, in_a_row = Items(), 0
    iterator = iter(dataset)
    while in_a_row < _MOST_ERRORS:
        try:
            item = next(iterator)
        except StopIteration:
            break
        except Exception as error:
            items.append(_Failed(error))
            in_a_row += 1
            continue
        items.append(item)
        in_a_row = 0
        if len(items) > _MOST:
            raise AuditError(
                f"the data set has given {_MOST:,} items and more: is it endless? Pass a part of it"
            )
    if in_a_row == len(items) > 0:
        raise AuditError(f"the data set failed at once: {told(items.pop().error)}")
    if in_a_row:  # the last that it did
        failed = list.__getitem__(items, -1).error
        say(f"data: {kind} ended after {len(items) - in_a_row:,} items by {told(failed)}")
        del items[len(items) - in_a_row + 1 :]
    say(f"data: {len(items):,} items of {kind} read once, in order, and kept in memory")
    return items


def names_of_classes(dataset: Any) -> list[str] | None:
    """Returns the names that a data set has for its classes, as of torchvision or Hugging Face."""
    while True:
        found = getattr(dataset, "classes", None)
        features = getattr(dataset, "features", None)
        for column in ("label", "labels"):
            if found is None and features is not None and hasattr(features, "get"):
                found = getattr(features.get(column), "names", None)
        if isinstance(found, list | tuple) and all(isinstance(name, str) for name in found):
            return list(found)
        if not hasattr(dataset, "dataset"):  # of a Subset
            return None
        dataset = dataset.dataset


def names_in_config(model: Any) -> list[str] | None:
    """Returns the names of classes in the configuration of a classifier of Hugging Face, if it has any."""
    found = getattr(getattr(model, "config", None), "id2label", None)
    if "Classification" not in type(model).__name__ or not isinstance(found, dict):
        return None
    names = [found.get(number) for number in range(len(found))]
    if any(not isinstance(name, str) for name in names):
        return None
    without = [f"LABEL_{number}" for number in range(len(found))]  # as made without names
    return None if names == without else [str(name) for name in names]


def name_of_data(dataset: Any) -> str | None:
    """Returns what to call data without a name of its own; None: the name of its class says enough."""
    if isinstance(dataset, FileData):
        return Path(dataset.path).name.removeprefix("the ")
    return f"{len(dataset):,} items" if isinstance(dataset, list) else None
