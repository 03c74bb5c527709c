"""All libraries of the table, by distribution; importing this imports none of them."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.outside.case import Library

__all__ = ["LIBRARIES"]


def _found() -> dict[str, Library]:
    found: dict[str, Library] = {}
    for path in sorted((Path(__file__).parent / "libraries").glob("*.py")):
        module = importlib.import_module(f"tests.outside.libraries.{path.stem}")
        for library in (value for value in vars(module).values() if isinstance(value, Library)):
            if found.get(library.distribution, library) is not library:
                raise ValueError(f"{library.distribution} is in two files")
            found[library.distribution] = library
    return {name: library for name, library in found.items() if library.cases}


LIBRARIES = _found()
