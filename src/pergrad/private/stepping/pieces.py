"""Cuts a batch into pieces of rows, and pads them to one size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pergrad.errors import PrivacyError

__all__ = ["check_rows", "chosen_of", "pieces_of", "rows_of"]


def check_rows(batch: tuple[Any, ...], size: int) -> None:
    """Refuses a batch that cannot be the one that was drawn: no tensor of it has `size` rows."""
    shapes = [tuple(t.shape) for t in _tensors(batch)]
    if not any(shape[:1] == (size,) for shape in shapes):
        raise PrivacyError(
            f"the plan drew {size} samples for this step, but the batch has tensors of shapes {shapes}: pass "
            "the loader's batch as it is, the samples in the first dimension"
        )


def pieces_of(
    batch: tuple[Any, ...], size: int, most: int | None, *, padded: bool
) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yields (rows, piece) for pieces of at most `most` rows; padded ones repeat their last row up to it."""
    if most is None or (size <= most and not padded):
        yield size, batch
        return
    for start in range(0, size, most):
        stop = min(start + most, size)
        rows = stop - start
        missing = most - rows if padded else 0

        yield rows, rows_of(batch, size, start, stop, missing)


def rows_of(
    batch: tuple[Any, ...], size: int, start: int, stop: int, missing: int = 0
) -> tuple[Any, ...]:
    """Returns some rows of a batch, the last of them repeated `missing` times."""

    def cut(value: Any) -> Any:
        part = value[start:stop]
        if not missing:
            return part
        if isinstance(part, Tensor):
            return torch.cat([part, part[-1:].expand(missing, *part.shape[1:])])
        return type(part)([*part, *[part[-1]] * missing])

    return tuple(_mapped(value, size, cut) for value in batch)


def chosen_of(batch: tuple[Any, ...], is_chosen: Tensor) -> tuple[Any, ...]:
    """Returns some rows of a batch; `is_chosen` tells which, (n,)."""

    def chosen(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[is_chosen.to(value.device)]
        return type(value)(
            item for item, is_in in zip(value, is_chosen.tolist(), strict=True) if is_in
        )

    return tuple(_mapped(value, len(is_chosen), chosen) for value in batch)


def _mapped(value: Any, size: int, cut: Callable[[Any], Any]) -> Any:
    if isinstance(value, Tensor):
        return cut(value) if value.dim() and len(value) == size else value
    if isinstance(value, Mapping):
        return {name: _mapped(item, size, cut) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, size, cut) for item in value))
    if isinstance(value, list | tuple):
        has_tensors = any(True for _ in _tensors(value))
        if not has_tensors and len(value) == size:
            return cut(value)
        return type(value)(_mapped(item, size, cut) for item in value)
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
