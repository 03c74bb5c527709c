"""Resolves private names of torch and Triton, and replaces missing ones by public functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pergrad.errors import PergradError

__all__ = ["TESTED", "Entry", "find", "resolver"]

# Versions on which the whole test suite passes.
TESTED = {"torch": "2.11 and 2.13", "triton": "3.6 and 3.7"}


@dataclass(frozen=True)
class Entry:
    """Describes a private name: its path, its purpose, and the behaviour without it.

    `instead` is a public replacement that gives the same results, only slower or with more memory. Without a
    replacement, reading a missing name raises an error; `without` says so, or who handles it. `make` builds
    the object that callers use if that is not the named object itself; it raises an AttributeError if the
    name is missing.
    """

    path: str
    purpose: str  # completes "which pergrad needs ..."
    without: str
    instead: Callable[..., Any] | None = None
    make: Callable[[], Any] | None = None

    def found(self) -> Any:
        """Returns the object behind the private name; AttributeError or ImportError if it is missing."""
        return find(self.path) if self.make is None else self.make()

    def resolve(self) -> Any:
        """Returns the object behind the private name, or its public replacement."""
        try:
            return self.found()
        except (AttributeError, ImportError) as error:
            if self.instead is not None:
                return self.instead
            package = self.path.partition(".")[0]
            raise PergradError(
                f"this version of {package} has no `{self.path}`, which pergrad needs {self.purpose}; "
                f"it is tested with {package} {TESTED[package]}: install one of these"
            ) from error


def find(path: str) -> Any:
    """Returns the object with a dotted name, importing modules as needed.

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
    """Returns a module's `__getattr__`, which resolves an entry on first access and stores it there.

    Later accesses are one lookup in the module's dictionary.
    """

    def get(alias: str) -> Any:
        entry = entries.get(alias)
        if entry is None:
            raise AttributeError(f"module {module['__name__']!r} has no attribute {alias!r}")
        module[alias] = resolved = entry.resolve()
        return resolved

    return get
