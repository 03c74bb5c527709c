"""Loads the batches of a plan, empty ones included."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from pergrad.errors import PrivacyError
from pergrad.private.drawing.sampling import PlanSampler
from pergrad.private.drawing.streams import seeded

__all__ = ["PlanLoader", "of_kind", "without_rows"]

_PLANNED = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator")
_SEED_BYTES = 12


class PlanLoader:
    """Yields the batches of a plan through a `DataLoader`; see `Plan.loader`.

    Random numbers that the data set draws, for augmentation, are a function of the plan's key and the step:
    a resumed run draws the same ones, whatever the number of workers.
    """

    def __init__(self, sampler: PlanSampler, dataset: Any, options: Mapping[str, Any]) -> None:
        for name in _PLANNED:
            if name in options:
                raise PrivacyError(
                    f"{name} is decided by the plan: leave it out of plan.loader, whose batches are the ones "
                    "that the account counts"
                )
        if not options.get("in_order", True):
            raise PrivacyError(
                "in_order=False gives batches in another order than the plan draws them: leave it out"
            )
        options = dict(options)
        collate = options.pop("collate_fn", None) or default_collate
        self.sampler, self.dataset = sampler, dataset
        try:
            self._loader = DataLoader(
                _Seeded(dataset),
                batch_sampler=_Numbered(sampler),
                collate_fn=_Collate(dataset, collate),
                # Without it, workers are seeded from the global generator, which a resumed run must not move.
                generator=torch.Generator().manual_seed(0),
                **options,
            )
        except TypeError as error:
            raise PrivacyError(f"plan.loader takes the options of DataLoader: {error}") from None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        number = self.sampler.done
        for batch in self._loader:
            self.sampler.handed_out = number
            yield batch
            number += 1


class _Numbered(Sampler[list[Any]]):
    """Puts the seed of a batch in front of its indices."""

    def __init__(self, sampler: PlanSampler) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[list[Any]]:
        for number, indices in enumerate(self._sampler, start=self._sampler.done):
            seed = self._sampler.streams.seed("samples", number, count=_SEED_BYTES)
            # Each rank has its own samples, and must not augment them alike.
            yield [_spread(seed, self._sampler.ranks.rank), *indices]


def _spread(seed: bytes, rank: int) -> bytes:
    number = (int.from_bytes(seed, "little") + rank * 0x9E3779B97F4A7C15F39CC060) % (
        1 << 8 * _SEED_BYTES
    )
    return number.to_bytes(_SEED_BYTES, "little")


class _Seeded(Dataset[Any]):
    """Reads the samples of a batch with the batch's own random numbers."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, numbered: Sequence[Any]) -> list[Any]:
        seed, *indices = numbered
        if not indices:
            return []
        with seeded(seed):
            read = getattr(self._dataset, "__getitems__", None)
            if read is not None:
                return list(read(indices))
            return [self._dataset[index] for index in indices]


class _Collate:
    """Collates the samples of a batch; an empty one becomes the first sample's batch without its rows."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate
        self._empty: Any = None

    def __call__(self, samples: list[Any]) -> Any:
        if samples:
            return self._collate(samples)
        if self._empty is None:
            if not len(self._dataset):
                return ()
            with seeded(bytes(_SEED_BYTES)):
                self._empty = without_rows(self._collate([self._dataset[0]]))
        return self._empty


def of_kind(mapping: Mapping[str, Any], items: dict[str, Any]) -> Mapping[str, Any]:
    """Returns items as a mapping of the same kind, such as a tokenizer's, whose attributes are its items."""
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return items
    made = copy.copy(mapping)
    made.update(items)
    return made


def without_rows(batch: Any) -> Any:
    """Drops the one sample of a batch; keeps the structure."""
    if isinstance(batch, Tensor):
        return batch[:0] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return of_kind(batch, {name: without_rows(value) for name, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(without_rows, batch))
    if isinstance(batch, list | tuple):
        if all(isinstance(value, str | bytes) for value in batch):
            return type(batch)()
        return type(batch)(map(without_rows, batch))
    return batch
