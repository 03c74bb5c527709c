"""Makes batches of texts and of lists of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from pergrad.errors import AuditError

__all__ = ["are_numbers", "inferred_collate", "place_of_text", "tokenized"]

TEXTS = ("text", "sentence", "content", "review", "question", "prompt", "input")
LABELS = ("labels", "label", "target", "targets", "y")
IGNORED = -100  # the target of tokens and pixels that do not count


def place_of_text(item: Any) -> Any:
    """Returns where the text of an item is that has nothing else to feed a model with: a key, or 0.

    () stands for an item that is a text itself, None for one without.
    """
    if isinstance(item, str):
        return ()
    if isinstance(item, Mapping):
        if any(_is_input(part) for part in item.values()):
            return None
        found = [name for name in TEXTS if isinstance(item.get(name), str)]
        found += [k for k, part in item.items() if isinstance(part, str) and k not in LABELS]
        return found[0] if found else None
    if isinstance(item, tuple | list) and item and isinstance(item[0], str):
        return 0
    return None


def _is_input(part: Any) -> bool:
    """Whether a part of an item is no text and no plain number, but what else a model takes."""
    return isinstance(part, Tensor | list | np.ndarray) or hasattr(part, "convert")


def inferred_collate(
    item: Any, tokenizer: Any, say: Callable[[str], None]
) -> Callable[[list[Any]], Any] | None:
    """Returns a collate function for items such as this one; None if torch's own serves."""
    place = place_of_text(item)
    if place is not None:
        text = _text_at(item, place)
        if tokenizer is None:
            raise AuditError(
                f"the items are texts (such as {text[:40]!r}): pass tokenizer=, which makes inputs of them"
            )
        say(f"inputs: texts through {type(tokenizer).__name__}{_which_text(item, place)}")
        return tokenized(tokenizer, place)
    if isinstance(item, Mapping) and any(_is_tokens(part) for part in item.values()):
        padding = getattr(tokenizer, "pad_token_id", None) or 0
        say(f"inputs: lists of tokens, padded with {padding}")
        return lambda items: _padded(items, padding)
    if any(map(are_numbers, _parts_of(item))):
        say("inputs: lists of numbers, as tensors")
        return lambda items: default_collate(list(map(_with_tensors, items)))
    return None


def _parts_of(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    return list(item) if isinstance(item, tuple) else []


def are_numbers(part: Any) -> bool:
    """Whether a part of an item is a list of numbers, or of lists of numbers."""
    if not isinstance(part, list) or not part:
        return False
    return all(isinstance(n, int | float) for n in part) or all(map(are_numbers, part))


def _with_tensors(item: Any) -> Any:
    """Makes tensors of the lists of numbers in an item: torch's own collate gives a list of columns."""
    if isinstance(item, Mapping):
        return {name: _with_tensors((part,))[0] for name, part in item.items()}
    return tuple(torch.tensor(part) if are_numbers(part) else part for part in item)


def _which_text(item: Any, place: Any) -> str:
    """Names the text of an item that has several."""
    parts = item.items() if isinstance(item, Mapping) else ()
    others = [str(k) for k, part in parts if isinstance(part, str) and k not in (place, *LABELS)]
    return f": {place!r} (not used: {', '.join(others)})" if others else ""


def _text_at(item: Any, place: Any) -> str:
    text = item if place == () else item[place]
    if not isinstance(text, str):
        raise ValueError(f"it has no text, but {text!r}")
    return text


def tokenized(tokenizer: Any, place: Any) -> Callable[[list[Any]], Any]:
    """Returns a collate function that tokenizes the texts of the items, with their targets as `labels`.

    Args:
        tokenizer: called as tokenizer(texts, padding=True, truncation=True, return_tensors="pt").
        place: where an item has its text, by `place_of_text`.
    """

    def collate(items: list[Any]) -> dict[str, Any]:
        texts = [_text_at(item, place) for item in items]
        batch = dict(tokenizer(texts, padding=True, truncation=True, return_tensors="pt"))
        targets = [_target_in(item) for item in items]
        if targets[0] is not None:
            batch["labels"] = default_collate(targets)
        return batch

    return collate


def _target_in(item: Any) -> Any:
    if isinstance(item, Mapping):
        return next((item[name] for name in LABELS if name in item), None)
    return item[-1] if isinstance(item, tuple | list) and len(item) > 1 else None


def _is_tokens(part: Any) -> bool:
    return isinstance(part, list) and bool(part) and all(isinstance(n, int) for n in part)


def _padded(items: Sequence[Mapping[str, Any]], padding: int) -> dict[str, Any]:
    """Pads lists of tokens at their ends; the mask marks what is padding if the items have none."""
    found: dict[str, Any] = {}
    lengths = []
    for name, first in items[0].items():
        parts = [item[name] for item in items]
        if not _is_tokens(first):
            found[name] = default_collate(parts)
            continue
        lengths = [len(part) for part in parts]
        fill = IGNORED if name in LABELS else padding if name == "input_ids" else 0
        rows = [part + [fill] * (max(lengths) - len(part)) for part in parts]
        found[name] = torch.tensor(rows)
    if "input_ids" in found and "attention_mask" not in found and len(set(lengths)) > 1:
        marks = [[1] * size + [0] * (max(lengths) - size) for size in lengths]
        found["attention_mask"] = torch.tensor(marks)
    return found
