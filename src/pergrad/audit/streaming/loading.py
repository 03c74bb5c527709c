"""Loads batches of a data set, independent of where a run starts; errors name the item."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from pergrad.audit.subject.forms import form_of, most_alike
from pergrad.audit.subject.places import told
from pergrad.audit.subject.spec import Spec
from pergrad.audit.subject.texts import as_text
from pergrad.errors import AuditError

__all__ = ["Loaded", "Loader", "drawing_from", "item_of"]

_COMPARED = 32  # items whose most common form is the one that the others must have


@dataclass(frozen=True)
class Loaded:
    """A batch: the samples at positions start to stop, as arguments of the loss."""

    start: int
    stop: int
    arguments: tuple[Any, ...]
    labels: list[str] | None
    seconds: float
    skipped: dict[int, str] = field(default_factory=dict)  # index of an unreadable item -> why

    @property
    def count(self) -> int:
        """Returns the number of samples in the batch, without those that were skipped."""
        return self.stop - self.start - len(self.skipped)


@contextmanager
def drawing_from(*seed: int) -> Iterator[None]:
    """Seeds the generators of torch, NumPy and Python within the block and restores them afterwards."""
    of_torch, of_numpy, of_python = np.random.SeedSequence(seed).generate_state(3).tolist()
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    # Only the current GPU: copying the state of every GPU would synchronize all of them.
    before_on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    # Not torch.manual_seed: it queues a call with a stack trace for each kind of device that is missing.
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
    """Loads, labels and collates the samples at positions start to stop of `indices`."""

    def __init__(self, spec: Spec, indices: np.ndarray, seed: int, *, strict: bool = True) -> None:
        self._strict = strict
        self._dataset = spec.dataset
        self._label = spec.label
        self._collate: Callable[[list[Any]], Any] = spec.collate or default_collate
        self._indices = indices
        self._seed = seed
        is_plain = type(spec.dataset) is TensorDataset and spec.collate is None
        self._tensors = spec.dataset.tensors if is_plain else None
        self._usual: tuple[int, str] | None = None  # what items should look like, once one does not

    def batches(self, pieces: Iterable[tuple[int, int]], workers: int) -> Iterator[Loaded]:
        """Yields the batches in order; raises the error of a bad batch when its turn comes."""
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
        """Returns a batch or its error; an exception raised in a worker would carry a traceback."""
        if self._tensors is not None and self._label is None:  # no user code, so nothing random
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
        skipped: dict[int, str] = {}
        if self._tensors is not None:  # one indexing call instead of items and a collate
            chosen = torch.from_numpy(self._indices[start:stop])
            arguments = tuple(tensor[chosen.to(tensor.device)] for tensor in self._tensors)
            if self._label is not None:
                parts = [tensor.unbind() for tensor in arguments]
                labels = self._labels(zip(*parts, strict=True), indices)
        else:
            items, skipped = self._items(indices)
            kept = [index for index in indices if index not in skipped]
            if self._label is not None:  # before collating, which may modify the items
                labels = self._labels(items, kept)
            arguments = self._arguments(items, kept, skipped)
            if self._label is not None and labels is not None:
                labels = [t for t, n in zip(labels, kept, strict=True) if n not in skipped]
        seconds = time.perf_counter() - began
        return Loaded(start, stop, arguments, labels, seconds, skipped)

    def labels_of(self, indices: Sequence[int]) -> list[str]:
        """Returns the labels of items that were read before."""
        return self._labels((item_of(self._dataset, index) for index in indices), list(indices))

    def _items(self, indices: list[int]) -> tuple[list[Any], dict[int, str]]:
        """Returns the items that can be read, and why the others cannot."""
        dataset, skipped = self._dataset, {}
        try:
            return [dataset[index] for index in indices], {}
        except Exception:
            found = []
            for index in indices:
                try:
                    found.append(item_of(dataset, index))
                except AuditError as error:
                    if self._strict:
                        raise
                    skipped[index] = str(error)
            return found, skipped

    def _arguments(
        self, items: list[Any], indices: list[int], skipped: dict[int, str]
    ) -> tuple[Any, ...]:
        """Collates the items; adds those that do not fit to `skipped`."""
        if not items:
            return ()
        try:
            batch = self._collated(items, indices)
        except AuditError:
            if self._strict:
                raise
            odd = self._odd_ones(items, indices)
            if not odd:
                raise
            skipped |= odd
            fitting = [(item, n) for item, n in zip(items, indices, strict=True) if n not in odd]
            if not fitting:
                return ()
            batch = self._collated([item for item, _ in fitting], [n for _, n in fitting])
        return tuple(batch) if isinstance(batch, list | tuple) else (batch,)

    def _labels(self, items: Iterable[Any], indices: list[int]) -> list[str]:
        assert self._label is not None
        found = []
        for item, index in zip(items, indices, strict=True):
            try:
                found.append(as_text(self._label(item)))
            except Exception as error:
                raise AuditError(
                    f"spec.label failed on item {index}, {form_of(item)}: {told(error)}"
                ) from error
        return found

    def _collated(self, items: list[Any], indices: list[int]) -> Any:
        try:
            return self._collate(items)
        except Exception as error:
            odd = self._odd_ones(items, indices)
            if odd:
                raise AuditError(next(iter(odd.values()))) from error
            raise AuditError(
                f"cannot collate the items {indices[0]} to {indices[-1]}: "
                f"{told(error)}; set spec.collate, or return items of one shape"
            ) from error

    def _odd_ones(self, items: list[Any], indices: list[int]) -> dict[int, str]:
        """Describes the items that cannot be collated, or have other types or shapes than the first."""
        odd = {}
        self._usual = self._usual or self._expected()
        first, expected = self._usual
        for item, index in zip(items, indices, strict=True):
            try:
                self._collate([item])
            except Exception as error:
                odd[index] = (
                    f"cannot collate item {index} of the data set, {form_of(item)}: {told(error)}"
                )
                continue
            if form_of(item) != expected:
                odd[index] = (
                    f"item {index} of the data set differs from item {first}: "
                    f"got {form_of(item)}, expected {expected}"
                )
        return odd

    def _expected(self) -> tuple[int, str]:
        """Returns the first item of the most common types and shapes, and these.

        Of the first items that can be read and collated, as many as are looked at.
        """
        found: dict[int, str] = {}
        for index in self._indices.tolist():
            try:
                item = item_of(self._dataset, index)
                self._collate([item])
            except Exception:
                continue
            found[index] = form_of(item)
            if len(found) == _COMPARED:
                break
        if not found:
            return int(self._indices[0]), "an item that can be read"
        first = most_alike(list(found), found.__getitem__)[0]
        return first, found[first]


def item_of(dataset: Any, index: int) -> Any:
    """Returns one item; errors name its index."""
    try:
        return dataset[index]
    except IndexError as error:
        raise AuditError(
            f"item {index} of the data set does not exist, though its length is {len(dataset)}: {error}"
        ) from error
    except Exception as error:
        raise AuditError(f"cannot load item {index} of the data set: {told(error)}") from error
