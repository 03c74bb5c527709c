"""Puts the tensors of a trace in the place of a model's own, and undoes whatever the traced step changed.

A step may set attributes of modules, fill their lists, and write to variables of the loss function. In a
trace all these would keep tensors without values.
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.engine.compiling.guarding.draws import UnrepeatableError, is_generator
from pergrad.engine.recording.modules import submodules
from pergrad.runtime import internals, is_traced
from pergrad.runtime.containers import ATOMS, holds_traced, is_same, skeleton

__all__ = ["Rebinding", "Surroundings", "UnrepeatableError"]

_MOST = 100_000  # containers to look at
_MISSING: Any = object()
_CALLABLES = (types.FunctionType, types.MethodType, partial)
_CLOSED = (type, types.ModuleType, types.BuiltinFunctionType, Tensor)  # not looked into


@dataclass(frozen=True)
class Rebinding:
    """A tensor, or a container of some, that the forward assigns to an attribute or buffer of a module."""

    of: dict[str, Any]
    key: str
    old: Any
    new: Any


class _Holder:
    """One container and its contents before the trace."""

    def __init__(self, container: Any, name: str, of_module: str | None) -> None:
        self.container = container
        self.name = name
        self.of_module = of_module  # None: of another object, which others may change meanwhile
        self.before = self.staged = self.read()

    def read(self) -> Any:
        return self.container.copy()

    def write(self, contents: Any) -> None:
        self.container.clear()
        (self.container.extend if isinstance(contents, list | deque) else self.container.update)(
            contents
        )

    def put(self, stand_ins: Mapping[int, Tensor]) -> None:
        def standing_in(value: Any) -> Any:
            return stand_ins.get(id(value), value) if isinstance(value, Tensor) else value

        if isinstance(self.before, dict):
            self.staged = self.before.copy()
            for key, value in self.before.items():
                self.staged[key] = standing_in(value)
        elif isinstance(self.before, list):
            self.staged = list(map(standing_in, self.before))
        if not is_same(self.staged, self.before):
            self.write(self.staged)


class _Cell(_Holder):
    """A variable of an enclosing function."""

    def read(self) -> list[Any]:
        try:
            return [self.container.cell_contents]
        except ValueError:  # not assigned yet
            return []

    def write(self, contents: list[Any]) -> None:
        if contents:
            self.container.cell_contents = contents[0]
        else:
            del self.container.cell_contents


class _Globals(_Holder):
    """The global variables that a function names."""

    def __init__(self, function: types.FunctionType) -> None:
        self._names = [n for n in function.__code__.co_names if n in function.__globals__]
        super().__init__(function.__globals__, f"a global of `{function.__name__}`", None)

    def read(self) -> dict[str, Any]:
        return {name: self.container.get(name) for name in self._names}

    def write(self, contents: Mapping[str, Any]) -> None:
        self.container.update(contents)


class Surroundings:
    """Remembers what modules, a loss function and quantities hold, to undo the changes of a trace."""

    def __init__(self, model: nn.Module, others: Iterable[Any]) -> None:
        self._holders: list[_Holder] = []
        self.generators: list[Any] = []  # of random numbers, that they hold
        self._seen: set[int] = set()
        self._pending: deque[tuple[Any, str, str | None]] = deque()
        names: list[str] = []
        modules = submodules(model, names)
        self._seen.update(map(id, modules))
        self._entries: dict[int, str] = {}  # what modules have attributes and buffers in
        for module, name in zip(modules, names, strict=True):
            title = f"module {name!r}" if name else "the module"
            for entries in (vars(module), internals.buffers_of(module)):
                self._entries[id(entries)] = title
            self._pending.append((vars(module), title, title))
        for other in others:
            self._pending.append((other, getattr(other, "__name__", type(other).__name__), None))
        while self._pending and len(self._holders) < _MOST:
            self._look_into(*self._pending.popleft())

    def _look_into(self, value: Any, name: str, of_module: str | None) -> None:
        if isinstance(value, (*ATOMS, *_CLOSED)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        parts: Iterable[Any] = ()
        if isinstance(value, torch.Generator) or is_generator(value):
            self.generators.append(value)
        elif isinstance(value, dict | list | deque | set):
            self._holders.append(_Holder(value, name, of_module))
            parts = dict.values(value) if isinstance(value, dict) else tuple(value)
        elif isinstance(value, tuple):
            parts = value
        elif isinstance(value, types.CellType):
            cell = _Cell(value, name, None)
            self._holders.append(cell)
            parts = cell.before
        elif isinstance(value, _CALLABLES):
            of_module = None
            parts = self._parts_of(value)
        else:
            of_module = None
            parts = [getattr(value, "__dict__", None)]
        for part in parts:
            if not isinstance(part, ATOMS):
                self._pending.append((part, name, of_module))

    def _parts_of(self, function: Any) -> list[Any]:
        if isinstance(function, partial):
            return [function.func, function.args, function.keywords]
        if isinstance(function, types.MethodType):
            return [function.__self__, function.__func__]
        parts = [*(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__]
        if not _is_of_torch(function):
            named = _Globals(function)
            self._holders.append(named)
            parts += named.before.values()
        return parts

    def put(self, stand_ins: Mapping[int, Tensor]) -> None:
        """Puts a tensor of the trace in the place of each tensor, by id, wherever it is held."""
        for holder in self._holders:
            holder.put(stand_ins)

    def restore(self) -> list[Rebinding]:
        """Puts everything back; returns what the step assigned to modules, if a graph can repeat it.

        Raises:
            UnrepeatableError: the step has changed something else.
        """
        found: list[Rebinding] = []
        refused: list[str] = []
        for holder in self._holders:
            now = holder.read()
            is_changed = not is_same(holder.staged, now)
            is_left = holder.of_module is None and not (is_changed and holds_traced(now))
            if is_changed and not is_left:
                found += self._rebindings(holder, now, refused)
            if (is_changed and not is_left) or not is_same(holder.staged, holder.before):
                holder.write(holder.before)
        if refused:
            raise UnrepeatableError(refused[0])
        return found

    def _rebindings(self, holder: _Holder, now: Any, refused: list[str]) -> list[Rebinding]:
        title = self._entries.get(id(holder.container))
        if title is None:
            where = f"in {holder.name}" if holder.of_module else f"to `{holder.name}`"
            refused.append(f"the step adds tensors {where}, which a compiled step would not do")
            return []
        found: list[Rebinding] = []
        for key in dict.fromkeys((*holder.staged, *now)):
            old, new = holder.staged.get(key, _MISSING), now.get(key, _MISSING)
            if is_same(old, new) or _are_weak_references(old, new):
                continue
            if _is_repeatable(old, new):
                found.append(Rebinding(holder.container, key, holder.before[key], new))
            else:
                refused.append(
                    f"the forward changes the attribute {key!r} of {title}, which a compiled step "
                    "would not do"
                )
        return found


def _is_repeatable(old: Any, new: Any) -> bool:
    """Whether a step assigns tensors of its own in place of those of the last step."""
    if new is _MISSING or skeleton(old) != skeleton(new):
        return False
    leaves: Sequence[Any] = internals.pytree.tree_leaves(new)
    return any(map(is_traced, filter(_is_tensor, leaves))) and all(map(_is_repeated, leaves))


def _are_weak_references(old: Any, new: Any) -> bool:
    """Whether two containers hold nothing but weak references, as recurrent layers do to their weights."""
    leaves: Sequence[Any] = internals.pytree.tree_leaves(new)
    are_weak = [isinstance(value, weakref.ref) for value in leaves]
    return bool(leaves) and all(are_weak) and skeleton(old) == skeleton(new)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _is_repeated(value: Any) -> bool:
    return is_traced(value) if isinstance(value, Tensor) else isinstance(value, ATOMS)


def _is_of_torch(function: types.FunctionType) -> bool:
    """Whether torch defines the function: its globals are the compiler's own, which a trace changes."""
    return str(function.__globals__.get("__name__")).partition(".")[0] == "torch"
