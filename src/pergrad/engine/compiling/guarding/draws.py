"""Refuses to trace a step that draws from Python's or numpy's random numbers: a graph would keep them."""

from __future__ import annotations

import random
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from pergrad.errors import PergradError

__all__ = ["UnrepeatableError", "is_generator", "refusing_draws"]


class UnrepeatableError(PergradError):
    """Says why a graph would not repeat all that the step does."""


class _Source(NamedTuple):
    """Random numbers outside of torch."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    seed: Callable[[int], object] | None


def is_generator(value: Any) -> bool:
    """Whether a value generates random numbers outside of torch."""
    return isinstance(value, random.Random) or _of_numpy(value) is not None


def _of_numpy(value: Any) -> _Source | None:
    kind = type(value)
    if not kind.__module__.startswith("numpy.random"):
        return None
    if kind.__name__ == "RandomState":
        return _Source(value.get_state, value.set_state, value.seed)
    if kind.__name__ == "Generator":
        bits = value.bit_generator
        return _Source(lambda: bits.state, lambda state: setattr(bits, "state", state), None)
    return None


def _sources(generators: Iterable[Any]) -> list[_Source]:
    found = [_Source(random.getstate, random.setstate, random.seed)]
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    if numpy_random is not None:
        found.append(_Source(numpy_random.get_state, numpy_random.set_state, numpy_random.seed))
    for generator in generators:
        if isinstance(generator, random.Random):
            found.append(_Source(generator.getstate, generator.setstate, generator.seed))
        elif (source := _of_numpy(generator)) is not None:
            found.append(source)
    return found


@contextmanager
def refusing_draws(generators: Iterable[Any]) -> Iterator[None]:
    """Raises at the end of the block if it drew; the generators are left as they were.

    They are seeded anew meanwhile: a step that seeds one before it draws ends where the last one did.
    """
    sources = _sources(generators)
    before = [source.read() for source in sources]
    try:
        for source in sources:
            if source.seed is not None:
                source.seed(secrets.randbits(32))
        marks = [repr(source.read()) for source in sources]
        yield
        has_drawn = any(repr(source.read()) != m for source, m in zip(sources, marks, strict=True))
    finally:
        for source, state in zip(sources, before, strict=True):
            source.write(state)
    if has_drawn:
        raise UnrepeatableError(
            "the step draws random numbers of Python or numpy, which a graph would keep"
        )
