"""Chooses how to show an item: an image-shaped tensor as a picture, a row of numbers as a text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from pergrad.audit.subject.files import FileData
from pergrad.audit.subject.inferring.collating import TEXTS, are_numbers
from pergrad.audit.subject.inferring.probing import first_items

__all__ = ["inferred_show", "words_of_show"]

_LEAST_SIDE = 4  # pixels of a picture; smaller arrays are numbers
_MOST_NUMBERS = 24  # of a row in words
_MOST_TARGETS = 4  # numbers of a target beside its input
_TOKENS = "input_ids"


def inferred_show(
    dataset: Any, *, tokenizer: Any = None, with_target: bool = False
) -> Callable[[Any], Any] | None:
    """Returns a function that shows an item, or None if nothing in the first item can be shown.

    A tokenizer decodes items that are tokens. `with_target` shows the target of (input, target) too, beside
    what is not a picture: where labels are not judged, it is not shown elsewhere.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> show = inferred_show(TensorDataset(torch.zeros(2, 3), torch.zeros(2)))
    >>> show((torch.tensor([1.0, 2.5, 0.0]), torch.tensor(0)))
    '1, 2.5, 0'
    """
    if isinstance(dataset, FileData):
        return functools.partial(dataset.shown, with_target=with_target)
    item = _first(dataset)
    part = _inputs(item)
    if part is None:
        return None
    if hasattr(tokenizer, "decode") and _is_tokens(_tokens(item)):
        return lambda item: str(tokenizer.decode(_tokens(item), skip_special_tokens=True))
    if with_target:
        return lambda item: _with_target(_shown(_inputs(item)), item)
    return lambda item: _shown(_inputs(item))


def _with_target(shown: Any, item: Any) -> Any:
    if not isinstance(shown, str) or not isinstance(item, tuple | list) or len(item) != 2:
        return shown
    target = item[1]
    if isinstance(target, int | float):
        target = np.asarray(target)
    is_short = _is_array(target) and int(np.prod(target.shape)) <= _MOST_TARGETS
    return f"{shown} → {_shown(target)}" if is_short else shown


def words_of_show(show: Callable[[Any], Any] | None, item: Any) -> str:
    """Says how items are shown, by what is shown of one of them."""
    if show is None:
        return "nothing, since no part of an item is a picture, a row of numbers or a text"
    try:
        found = show(item)
    except Exception as error:
        return f"nothing, since showing an item raised {type(error).__name__}: {error}"
    if not isinstance(found, str):
        return f"pictures{_size(found)}"
    return "texts" if isinstance(_inputs(item), str) else "rows, as text"


def _size(picture: Any) -> str:
    if hasattr(picture, "convert"):
        return " as they are"
    shape = [side for side in picture.shape if side not in (1, 3)] or list(picture.shape)
    return f" of {' by '.join(map(str, shape))} pixels"


def _first(dataset: Any) -> Any:
    """Returns the first item as `first_items` finds it; None if no item can be read."""
    try:
        return first_items(dataset)[0]
    except Exception:
        return None


def _tokens(item: Any) -> Any:
    if isinstance(item, Mapping):
        return item.get(_TOKENS)
    return item[0] if isinstance(item, tuple | list) and item else item


def _is_tokens(part: Any) -> bool:
    if isinstance(part, list):
        return bool(part) and all(isinstance(token, int) for token in part)
    return isinstance(part, Tensor) and part.dim() == 1 and not part.is_floating_point()


def _inputs(item: Any) -> Any:
    """Returns the part of an item that is the input: the first of a tuple, the text or image of a dict."""
    if isinstance(item, Mapping):
        found = [key for key in TEXTS if isinstance(item.get(key), str)]
        found += [key for key, part in item.items() if hasattr(part, "convert")]
        found += [key for key, part in item.items() if _is_array(part) and np.ndim(part) > 0]
        found += [key for key, part in item.items() if isinstance(part, str)]
        found += [key for key, part in item.items() if _is_tokens(part)]
        found += [key for key, part in item.items() if are_numbers(part)]
        return item[found[0]] if found else None
    if isinstance(item, tuple | list) and item and not isinstance(item[0], int | float):
        return _inputs(item[0]) if isinstance(item[0], Mapping | tuple | list) else item[0]
    return item


def _is_array(part: Any) -> bool:
    return isinstance(part, Tensor | np.ndarray)


def is_picture(shape: Sequence[int]) -> bool:
    """Whether an array of this shape is a picture: (H, W), (1 or 3, H, W) or (H, W, 1 or 3)."""
    if len(shape) == 2:
        return min(shape) >= _LEAST_SIDE
    if len(shape) == 3:
        return (shape[0] in (1, 3) and min(shape[1:]) >= _LEAST_SIDE) or (
            shape[2] in (1, 3) and min(shape[:2]) >= _LEAST_SIDE
        )
    return False


def _shown(part: Any) -> Any:
    if isinstance(part, str) or hasattr(part, "convert"):
        return part
    if _is_tokens(part) or are_numbers(part):
        part = np.asarray(part)
    if _is_array(part):
        is_real = part.is_floating_point() if isinstance(part, Tensor) else part.dtype.kind == "f"
        is_bytes = str(part.dtype).endswith("uint8")
        if is_picture(tuple(part.shape)) and (is_real or is_bytes):
            return part
        numbers = np.asarray(part.detach().cpu() if isinstance(part, Tensor) else part).ravel()
        words = ", ".join(map(_number, numbers[:_MOST_NUMBERS].tolist()))
        return words + (f", ... ({len(numbers):,} numbers)" if len(numbers) > _MOST_NUMBERS else "")
    return str(part)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
