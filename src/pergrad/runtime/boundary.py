"""The boundary to names that torch and Triton do not promise: how they are found and replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pergrad.errors import PergradError

__all__ = ["TESTED", "Entry", "find", "resolver"]

# The versions that the whole test suite has passed with.
TESTED = {"torch": "2.11 and 2.13", "triton": "3.6 and 3.7"}


@dataclass(frozen=True)
class Entry:
    """A private name: where it is, what it is for, and what happens without it.

    `instead` is the public way, which gives the same, only slower or with more memory. Where there is none,
    asking for the name is an error. `make` gives what callers use, where that is not the object itself; it
    raises an AttributeError where the name is missing.
    """

    path: str
    purpose: str  # completes "which pergrad needs ..."
    without: str
    instead: Callable[..., Any] | None = None
    make: Callable[[], Any] | None = None

    def found(self) -> Any:
        """What callers use, by the private name; an AttributeError or ImportError where it is missing."""
        return find(self.path) if self.make is None else self.make()

    def resolve(self) -> Any:
        """What callers use, by the private name or the public way."""
        try:
            return self.found()
        except (AttributeError, ImportError) as error:
            if self.instead is not None:
                return self.instead
            package = self.path.partition(".")[0]
            raise PergradError(
                f"this {package} has no `{self.path}`, which pergrad needs {self.purpose}; it is tested "
                f"with {package} {TESTED[package]}"
            ) from error


def find(path: str) -> Any:
    """The object of a dotted name; modules on the way are imported.

    >>> find("torch.nn.Linear").__name__
    'Linear'
    """
    first, *rest = path.split(".")
    found, module = import_module(first), first
    for name in rest:
        module = f"{module}.{name}"
        try:
            found = getattr(found, name)
        except AttributeError:
            found = import_module(module)
    return found


def resolver(entries: Mapping[str, Entry], module: dict[str, Any]) -> Callable[[str], Any]:
    """A module's `__getattr__`: resolves an entry when it is first read and keeps it in the module.

    From then on, reading it is one lookup in the module's dictionary.
    """

    def get(alias: str) -> Any:
        entry = entries.get(alias)
        if entry is None:
            raise AttributeError(f"module {module['__name__']!r} has no attribute {alias!r}")
        module[alias] = resolved = entry.resolve()
        return resolved

    return get
