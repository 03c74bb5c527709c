"""Fingerprints a function: its code, and the values and functions that it uses."""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pergrad.audit.streaming.fingerprint.content import DIGITS, add_values, checksum_of_model
from pergrad.audit.subject.sharding import is_sharded_model, structure_of
from pergrad.audit.subject.texts import as_text

__all__ = ["fingerprint_of_function"]

_PLAIN = (int, float, complex, str, bytes, bool, type(None), Tensor, np.ndarray, np.generic)
_NAMED = (torch.dtype, torch.device, enum.Enum)
_USED = (*_PLAIN, *_NAMED, FunctionType, MethodType, functools.partial, nn.Module)
_INSTALLED = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
_LIBRARIES = (str(Path(__file__).parents[2]), *_INSTALLED)


def fingerprint_of_function(function: Callable[..., Any]) -> str:
    """Hashes a function with all that it closes over, its defaults, and the globals that it uses.

    The globals of functions of installed packages are left out, and what a function writes itself, such as a
    count of its calls. Of an object the type counts, and the plain values, functions and modules among its
    attributes.

    >>> def scaled(factor):
    ...     return lambda model, x: factor * model(x)
    >>> fingerprint_of_function(scaled(2.0)) == fingerprint_of_function(scaled(3.0))
    False
    """
    found = _Fingerprint()
    found.add(function)
    return found.digest.hexdigest()[:DIGITS]


class _Fingerprint:
    """A digest of values, each function and object of them once."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self._seen: set[int] = set()
        self._written: set[str] = set()  # names of attributes

    def add(self, value: Any) -> None:
        if isinstance(value, _PLAIN):
            add_values(self.digest, value)
        elif isinstance(value, _NAMED):
            self._say(repr(value))
        elif isinstance(value, ModuleType | type):
            self._say(value.__name__)
        elif isinstance(value, Mapping):
            for key, part in value.items():
                self._say(f"{key}=")
                self.add(part)
        elif isinstance(value, list | tuple):
            self._say(f"[{len(value)}]")
            for part in value:
                self.add(part)
        elif isinstance(value, set | frozenset):  # in no order
            self.add(sorted(repr(part) for part in value if isinstance(part, _PLAIN)))
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            self._add_object(value)

    def _say(self, words: str) -> None:
        self.digest.update(as_text(words).encode())

    def _add_object(self, value: Any) -> None:
        if isinstance(value, FunctionType):
            self._add_function(value)
        elif isinstance(value, MethodType):
            self.add([value.__func__, value.__self__])
        elif isinstance(value, functools.partial):
            self.add([value.func, value.args, value.keywords])
        elif isinstance(value, nn.Module):
            self._add_module(value)
        else:
            self._say(getattr(value, "__qualname__", type(value).__qualname__))
            if isinstance(own_call := getattr(type(value), "__call__", None), FunctionType):  # noqa: B004
                self.add(own_call)
            self._add_attributes(value)

    def _add_function(self, function: FunctionType) -> None:
        self._say(function.__qualname__)
        codes = list(_codes(function.__code__))
        for code in codes:
            self.digest.update(code.co_code)
            self._say(repr((code.co_names, code.co_varnames)))
            self._say(repr([_constant(part) for part in code.co_consts]))
        steps = [step for code in codes for step in dis.get_instructions(code)]
        self._written |= {step.argval for step in steps if step.opname == "STORE_ATTR"}
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        used = {name: _content(cell) for name, cell in cells}
        if not function.__code__.co_filename.startswith(_LIBRARIES):
            names = {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}
            known = function.__globals__
            used |= {name: known[name] for name in sorted(names & known.keys())}
        self.add({name: value for name, value in used.items() if not _writes(steps, name, value)})
        self.add([function.__defaults__, function.__kwdefaults__])

    def _add_module(self, module: nn.Module) -> None:
        """Adds the structure, the options and the sum of the values of a module; its mode is left out."""
        self._say(structure_of(module))
        self.add(vars(module).get("forward", type(module).forward))
        for part in module.modules():
            self._add_attributes(part)
        if not is_sharded_model(module):  # its values are in the fingerprint of the model
            self._say(checksum_of_model(module))

    def _add_attributes(self, value: Any) -> None:
        is_module = isinstance(value, nn.Module)
        for name, part in getattr(value, "__dict__", {}).items():
            if name in self._written or (is_module and (name == "training" or name[0] == "_")):
                continue
            if isinstance(part, _USED):
                self._say(f"{name}=")
                self.add(part)


def _writes(steps: Sequence[dis.Instruction], name: str, value: Any) -> bool:
    """Whether a function may change a variable of an outer scope, or a list, dict or set that it names."""
    if any(s.opname in ("STORE_DEREF", "STORE_GLOBAL") and s.argval == name for s in steps):
        return True
    if not isinstance(value, list | dict | set):
        return False
    calls_methods = any(
        step.argval == name and after.opname in ("LOAD_ATTR", "LOAD_METHOD")
        for step, after in pairwise(steps)
    )
    return calls_methods or any(step.opname == "STORE_SUBSCR" for step in steps)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yields the code of a function and of all functions within it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _codes(part)


def _constant(value: Any) -> Any:
    """Returns what is the same in every process: sets have no order, and code has an address."""
    if isinstance(value, CodeType):
        return value.co_qualname
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
