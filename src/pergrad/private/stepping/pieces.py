"""Cuts a batch into pieces of rows, and pads them to one size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pergrad.errors import PrivacyError
from pergrad.private.drawing.loading import of_kind

__all__ = ["NONE_SHARED", "Shared", "check_rows", "chosen_of", "pieces_of", "rows_of"]


def check_rows(batch: tuple[Any, ...], size: int) -> None:
    """Refuses a batch that cannot be the one that was drawn: no tensor of it has `size` rows."""
    shapes = [tuple(t.shape) for t in _tensors(batch)]
    if not any(shape[:1] == (size,) for shape in shapes):
        raise PrivacyError(
            f"the plan drew {size} samples for this step, but the batch has tensors of shapes {shapes}: pass "
            "the loader's batch as it is, the samples in the first dimension"
        )


class Shared:
    """Tells the parts of a batch that all samples share from those with a row for each sample.

    A shared part, such as weights of classes, may be as long as a batch by chance. One that was not once is
    shared in all batches. `places` names these parts.
    """

    def __init__(self, places: Iterable[str] = ()) -> None:
        self.places = {*places}
        self._of_rows: set[str] = set()

    def see(self, batch: tuple[Any, ...], size: int, *, is_cut: bool) -> None:
        """Learns from a batch; refuses a part that was cut as rows and has another length now."""
        for place, part in _parts(batch):
            if len(part) != size:
                if is_cut and place in self._of_rows:
                    raise PrivacyError(
                        f"part {place} of the batch has {len(part)} rows for {size} samples, and was cut "
                        "into pieces with an earlier batch, which was as long by chance: give loss_fn what "
                        "all samples share in another way, such as functools.partial"
                    )
                self.places.add(place)
            elif size > 1 and place not in self.places:
                self._of_rows.add(place)


NONE_SHARED = Shared()


def pieces_of(
    batch: tuple[Any, ...],
    size: int,
    most: int | None,
    *,
    padded: bool,
    shared: Shared = NONE_SHARED,
) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yields (rows, piece) for pieces of at most `most` rows; padded ones repeat their last row up to it."""
    if most is None or (size <= most and not padded):
        yield size, batch
        return
    for start in range(0, size, most):
        stop = min(start + most, size)
        rows = stop - start
        missing = most - rows if padded else 0

        yield rows, rows_of(batch, size, start, stop, missing, shared)


def rows_of(
    batch: tuple[Any, ...],
    size: int,
    start: int,
    stop: int,
    missing: int = 0,
    shared: Shared = NONE_SHARED,
) -> tuple[Any, ...]:
    """Returns some rows of a batch, the last of them repeated `missing` times."""

    def cut(value: Any) -> Any:
        part = value[start:stop]
        if not missing:
            return part
        if isinstance(part, Tensor):
            return torch.cat([part, part[-1:].expand(missing, *part.shape[1:])])
        return type(part)([*part, *[part[-1]] * missing])

    return _cut(batch, size, cut, shared)


def chosen_of(
    batch: tuple[Any, ...], is_chosen: Tensor, shared: Shared = NONE_SHARED
) -> tuple[Any, ...]:
    """Returns some rows of a batch; `is_chosen` tells which, (n,)."""

    def chosen(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[is_chosen.to(value.device)]
        return type(value)(
            item for item, is_in in zip(value, is_chosen.tolist(), strict=True) if is_in
        )

    return _cut(batch, len(is_chosen), chosen, shared)


def _cut(
    batch: tuple[Any, ...], size: int, cut: Callable[[Any], Any], shared: Shared
) -> tuple[Any, ...]:
    def one(place: str, part: Any) -> Any:
        return cut(part) if len(part) == size and place not in shared.places else part

    return tuple(_mapped(value, f"{number}", one) for number, value in enumerate(batch))


def _parts(batch: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Returns the parts of a batch that have a length, with their places."""
    found: list[tuple[str, Any]] = []

    def seen(place: str, part: Any) -> Any:
        found.append((place, part))
        return part

    for number, value in enumerate(batch):
        _mapped(value, f"{number}", seen)
    return found


def _mapped(value: Any, place: str, change: Callable[[str, Any], Any]) -> Any:
    """Applies a function to each tensor with dimensions, and to each list without tensors."""
    if isinstance(value, Tensor):
        return change(place, value) if value.dim() else value
    if isinstance(value, Mapping):
        found = {name: _mapped(item, f"{place}.{name}", change) for name, item in value.items()}
        return of_kind(value, found)
    if isinstance(value, list | tuple):
        is_named = isinstance(value, tuple) and hasattr(value, "_fields")
        if not is_named and not any(True for _ in _tensors(value)):
            return change(place, value)
        items = [_mapped(item, f"{place}.{n}", change) for n, item in enumerate(value)]
        return type(value)(*items) if is_named else type(value)(items)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
