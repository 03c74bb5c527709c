"""Batches of a data set: the same ones wherever an audit begins, and errors that name the item."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from pergrad.audit.subject.spec import Spec
from pergrad.errors import AuditError

__all__ = ["Loaded", "Loader", "drawing_from", "item_of"]


@dataclass(frozen=True)
class Loaded:
    """The samples at positions start to stop, as the loss takes them."""

    start: int
    stop: int
    arguments: tuple[Any, ...]
    labels: list[str] | None
    seconds: float


@contextmanager
def drawing_from(*seed: int) -> Iterator[None]:
    """Within, whatever is drawn by torch, NumPy and Python depends on the seed alone."""
    of_torch, of_numpy, of_python = np.random.SeedSequence(seed).generate_state(3).tolist()
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    # Of GPUs the current one: a copy of the state of each would wait for all of them.
    before_on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    # Not torch.manual_seed: it leaves a note with a stack trace for each kind of device that is not there.
    torch.default_generator.manual_seed(of_torch)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(of_torch)
    np.random.seed(of_numpy)
    random.seed(of_python)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
        if before_on_gpu is not None:
            torch.cuda.set_rng_state(before_on_gpu)


class Loader(Dataset[Any]):
    """Loads, labels and collates the samples at (start, stop) in the order of the indices."""

    def __init__(self, spec: Spec, indices: np.ndarray, seed: int) -> None:
        self._dataset = spec.dataset
        self._label = spec.label
        self._collate: Callable[[list[Any]], Any] = spec.collate or default_collate
        self._indices = indices
        self._seed = seed
        is_plain = type(spec.dataset) is TensorDataset and spec.collate is None
        self._tensors = spec.dataset.tensors if is_plain else None

    def batches(self, pieces: Sequence[tuple[int, int]], workers: int) -> Iterator[Loaded]:
        """The batches one after the other; the error of a bad one is raised when its turn comes."""
        outcomes: Iterable[Loaded | AuditError]
        if workers:
            outcomes = DataLoader(
                self, batch_size=None, sampler=pieces, num_workers=workers, prefetch_factor=2
            )
        else:
            outcomes = map(self.__getitem__, pieces)
        for outcome in outcomes:
            if isinstance(outcome, AuditError):
                raise outcome
            yield outcome

    def __getitem__(self, piece: tuple[int, int]) -> Loaded | AuditError:
        """A batch, or, since a worker's exception would come with its traceback, its error."""
        if self._tensors is not None and self._label is None:  # nothing is drawn
            return self.load(*piece)
        try:
            with drawing_from(self._seed, piece[0]):
                return self.load(*piece)
        except AuditError as error:
            return error

    def load(self, start: int, stop: int) -> Loaded:
        began = time.perf_counter()
        indices = self._indices[start:stop].tolist()
        labels: list[str] | None = None
        if self._tensors is not None:  # cut out at once what would be taken apart and put together
            chosen = torch.from_numpy(self._indices[start:stop])
            arguments = tuple(tensor[chosen.to(tensor.device)] for tensor in self._tensors)
            if self._label is not None:
                parts = [tensor.unbind() for tensor in arguments]
                labels = self._labels(zip(*parts, strict=True), indices)
        else:
            items = self._items(indices)
            if self._label is not None:  # before a batch is made, which may take the items apart
                labels = self._labels(items, indices)
            batch = self._collated(items, indices)
            arguments = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
        return Loaded(start, stop, arguments, labels, time.perf_counter() - began)

    def _items(self, indices: list[int]) -> list[Any]:
        dataset = self._dataset
        try:
            return [dataset[index] for index in indices]
        except Exception:
            return [item_of(dataset, index) for index in indices]  # finds out which one it was

    def _labels(self, items: Iterable[Any], indices: list[int]) -> list[str]:
        assert self._label is not None
        found = []
        for item, index in zip(items, indices, strict=True):
            try:
                found.append(str(self._label(item)))
            except Exception as error:
                raise AuditError(
                    f"spec.label raised {type(error).__name__} on item {index}, {form_of(item)}: {error}"
                ) from error
        return found

    def _collated(self, items: list[Any], indices: list[int]) -> Any:
        try:
            return self._collate(items)
        except Exception as error:
            odd = self._odd_one(items, indices)
            if odd is not None:
                raise AuditError(odd) from error
            raise AuditError(
                f"the items {indices[0]} to {indices[-1]} cannot be made a batch: "
                f"{type(error).__name__}: {error}; give spec.collate, or items of one form"
            ) from error

    def _odd_one(self, items: list[Any], indices: list[int]) -> str | None:
        """In words, the first item that no batch can be made of or that has not the form of the first."""
        for item, index in zip(items, indices, strict=True):
            try:
                self._collate([item])
            except Exception as error:
                return (
                    f"item {index} of the data set has a wrong form, {form_of(item)}: "
                    f"{type(error).__name__}: {error}"
                )
        first = int(self._indices[0])
        expected = form_of(item_of(self._dataset, first))
        for item, index in zip(items, indices, strict=True):
            if form_of(item) != expected:
                return (
                    f"item {index} of the data set has another form than item {first}: "
                    f"{form_of(item)} in place of {expected}"
                )
        return None


def item_of(dataset: Any, index: int) -> Any:
    """One item, or an error that names it."""
    try:
        return dataset[index]
    except IndexError as error:
        raise AuditError(
            f"item {index} of the data set does not exist, though its length is {len(dataset)}: {error}"
        ) from error
    except Exception as error:
        raise AuditError(
            f"item {index} of the data set cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def form_of(item: Any) -> str:
    """The types and shapes in an item.

    >>> form_of((torch.zeros(2, 3), 4, {"text": "a"}))
    '(float32 (2, 3), int, {text: str})'
    """
    if isinstance(item, Tensor | np.ndarray):
        return f"{str(item.dtype).removeprefix('torch.')} {tuple(item.shape)}"
    if isinstance(item, Mapping):
        return f"{{{', '.join(f'{key}: {form_of(value)}' for key, value in item.items())}}}"
    if isinstance(item, list | tuple):
        return f"({', '.join(map(form_of, item))})"
    return type(item).__name__
