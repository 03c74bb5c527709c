"""Keeps the caches of the process: each is bounded, all are listed in one place and cleared by one call.

A cached value depends on its key only, never on the values of tensors. Clearing a cache costs time and
changes no result.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from functools import lru_cache
from threading import Lock
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, cast

__all__ = ["CACHES", "Cache", "Listed", "cached", "clear_caches"]

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")


class _Clearable(Protocol):
    def clear(self) -> None: ...

    def __len__(self) -> int: ...


class Listed(NamedTuple):
    """Describes one cache: its module, its contents, its bound and its present number of entries."""

    owner: str
    holds: str
    bound: str
    entries: int


class _Caches:
    """Lists all caches by weak references."""

    def __init__(self) -> None:
        self._known: list[tuple[str, str, str, weakref.ref[_Clearable]]] = []
        self._lock = Lock()

    def add(self, owner: str, holds: str, bound: str, cache: _Clearable) -> None:
        with self._lock:
            self._known = [known for known in self._known if known[-1]() is not None]
            self._known.append((owner, holds, bound, weakref.ref(cache)))

    def listed(self) -> list[Listed]:
        """Returns all caches, sorted by owner."""
        return sorted(
            Listed(owner, holds, bound, len(cache))
            for owner, holds, bound, reference in self._known
            if (cache := reference()) is not None
        )

    def clear(self) -> None:
        """Clears every cache; the next step fills them again."""
        for *_, reference in self._known:
            cache = reference()
            if cache is not None:
                cache.clear()


CACHES = _Caches()


def clear_caches() -> None:
    """Clears all caches of pergrad and frees the memory that it keeps for results on the CPU.

    >>> clear_caches()
    >>> {cache.entries for cache in CACHES.listed()}
    {0}
    """
    CACHES.clear()


class Cache(Generic[V]):
    """Maps keys to values; clears itself when it holds `most` entries.

    `get` is the dictionary's own method, since it runs for every function of every step. None stands for
    "no key" and is never stored.
    """

    def __init__(self, owner: str, holds: str, *, most: int = 10_000) -> None:
        self._known: dict[Hashable, V] = {}
        self.get: Callable[[Hashable], V | None] = self._known.get
        self.most = most
        CACHES.add(owner, holds, f"{most:,} entries", self)

    def put(self, key: Hashable, value: V) -> None:
        if len(self._known) >= self.most:
            self._known.clear()
        self._known[key] = value

    def clear(self) -> None:
        self._known.clear()

    def __len__(self) -> int:
        return len(self._known)


class _Results:
    """Gives an `lru_cache` the interface of a listed cache."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def clear(self) -> None:
        self._function.cache_clear()

    def __len__(self) -> int:
        return int(self._function.cache_info().currsize)


def cached(holds: str, *, most: int = 10_000) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Caches the results of a function for the `most` arguments used last."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        keeping = lru_cache(maxsize=most)(function)
        results = _Results(keeping)
        vars(keeping)["results"] = results  # CACHES has only a weak reference
        CACHES.add(function.__module__, holds, f"{most:,} entries", results)
        return cast("Callable[P, R]", keeping)

    return decorate
