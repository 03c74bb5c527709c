"""Sequences of vectors and of words for packages of one idea each."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.outside.case import Library, noise, of, words

__all__ = ["LANGUAGE", "TINY", "on_rows", "on_words", "rows"]

TINY = {"dim": 16, "depth": 2, "heads": 2}
LANGUAGE = {"num_tokens": 32, "dim": 16, "depth": 2}


def rows(batch: int) -> Tensor:
    return noise(batch, 16, 16)


def on_rows(library: Library, path: str, name: str = "", **config: Any) -> None:
    """A model of sequences of 16 vectors of 16 numbers."""
    library.add(name or path, lambda batch: of(library(path)(**config), rows(batch)))


def on_words(library: Library, path: str, name: str = "", length: int = 16, **config: Any) -> None:
    library.add(name or path, lambda batch: of(library(path)(**config), words(batch, length)))
