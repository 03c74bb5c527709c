"""Guards a graph: notes the Python values that its step could read, and tells when one has changed."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.engine.compiling.guarding.reads import Reads
from pergrad.engine.recording.modules import submodules
from pergrad.runtime import internals
from pergrad.runtime.containers import ATOMS

__all__ = ["Guards"]

_MISSING: Any = object()
_MOST_ENTRIES = 10_000  # of a container whose contents are compared one by one
_MOST_NUMBERS = 1_000  # of a tensor or array that is compared by value
_OF_STATE = (
    "training",
    "_parameters",
    "_buffers",
)  # of modules: guarded by the signature of a step
_CLOSED = (*ATOMS, Tensor, types.ModuleType, torch.Generator, types.BuiltinFunctionType)
_UNREAD = (
    "builtins",
    "abc",
    "typing",
    "pergrad",
)  # packages whose classes have no state of the step
_FUNCTIONS = (types.FunctionType, types.MethodType, partial)
_of_class = types.MappingProxyType.get


class Guards:
    """Holds the Python values that a traced step could read, as they were then.

    Starting from the model, the loss function and the arguments that are no tensors, follows the attributes,
    keys, variables of enclosing functions and globals that the code names (`Reads`). Parameters, buffers and
    the tensors of a batch are inputs of the graph. A tensor that the graph holds must stay the same object;
    its values may change. Any other tensor must keep its values, if it has few, and its shape.
    """

    def __init__(
        self,
        reads: Reads,
        model: nn.Module,
        roots: Iterable[Any],
        *,
        constants: Iterable[Tensor] = (),
        assigned: Iterable[tuple[Mapping[str, Any], str]] = (),
    ) -> None:
        self._reads = reads
        self.has_generators = False  # of random numbers, among what is reached
        self._constants = {id(t) for t in constants}
        self._assigned = {(id(of), key) for of, key in assigned}  # by the graph, in each call
        self._seen: dict[int, Any] = {}
        self._pending: deque[Any] = deque()
        self._titles: dict[int, str] = {}  # of dictionaries
        # Entries of dictionaries and of classes, and kinds of objects: compared by a `map` for each.
        self._dicts: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._classes: list[Any] = []
        self._class_keys: list[str] = []
        self._class_values: list[Any] = []
        self._objects: list[Any] = []
        self._kinds: list[type] = []
        self._empty: list[Any] = []  # containers
        self._others: list[
            tuple[Callable[[], Any], Any, str]
        ] = []  # how to read, the value, its title
        self._state: dict[int, list[tuple[dict[str, Any], str]]] = {}  # where its tensors belong
        self._held: set[int] = set()  # tensors of the state that are held elsewhere too
        names: list[str] = []
        modules = submodules(model, names)
        self._modules = {id(module) for module in modules}
        for module, name in zip(modules, names, strict=True):
            self._titles[id(vars(module))] = f"module {name!r}" if name else "the module"
            self._pending.append(module)
            for of in (internals.parameters_of(module), internals.buffers_of(module)):
                for key, t in of.items():
                    if t is not None:
                        self._state.setdefault(id(t), []).append((of, key))
        self._pending += roots
        for scope, code in reads.scopes:
            self._add_scope(scope, code.co_names)
        while self._pending:
            self._look_into(self._pending.popleft())

    def changed(self) -> str | None:
        """Says what has changed; None if all is as it was."""
        if (
            all(map(is_, map(dict.get, self._dicts, self._keys, repeat(_MISSING)), self._values))
            and all(map(is_, map(_of_class, self._classes, self._class_keys), self._class_values))
            and all(map(is_, map(type, self._objects), self._kinds))
            and not any(self._empty)
            and all(_is_equal(read(), value) for read, value, _ in self._others)
        ):
            return None
        return self._first_change()

    def _first_change(self) -> str | None:
        for of, key, value in zip(self._dicts, self._keys, self._values, strict=True):
            if not _is_equal(of.get(key, _MISSING), value):
                if isinstance(value, Tensor):
                    return f"the tensor {key!r} of {self._title(of)} was replaced by another"
                return f"{key!r} of {self._title(of)} has changed"
        for of, key, value in zip(self._classes, self._class_keys, self._class_values, strict=True):
            if not _is_equal(of.get(key), value):
                return f"the attribute {key!r} of a class has changed"
        for value, kind in zip(self._objects, self._kinds, strict=True):
            if type(value) is not kind:
                return f"an object of {kind.__name__} has another class"
        if any(self._empty):
            return "an empty container, such as one of hooks, was filled"
        for read, value, title in self._others:
            if not _is_equal(read(), value):
                return f"{title} has changed"
        return None

    def _title(self, of: Any) -> str:
        return self._titles.get(id(of), "an object")

    # -- collecting

    def _add_scope(self, scope: dict[str, Any], names: Iterable[str], depth: int = 0) -> None:
        """Adds the globals that a function names, and what it names of the Python modules among them."""
        self._titles.setdefault(id(scope), f"the module {scope.get('__name__')!r}")
        is_of_torch = str(scope.get("__name__")).partition(".")[0] == "torch"
        for name in names:
            if name in scope and not name.startswith("__"):
                value = scope[name]
                if is_of_torch and not _is_set_by_users(value):
                    continue
                self._add_entry(scope, name, value)
                if isinstance(value, types.ModuleType) and depth < 3:
                    self._add_scope(vars(value), names, depth + 1)

    def _add_entry(self, of: dict[Any, Any], key: Any, value: Any) -> None:
        if (id(of), key) in self._assigned:
            return
        if isinstance(value, Tensor):
            self._add_tensor(
                partial(of.get, key), value, f"the tensor {key!r} of {self._title(of)}"
            )
            if id(value) not in self._constants:
                return
        self._dicts.append(of)
        self._keys.append(key)
        self._values.append(value)
        self._pending.append(value)

    def _add_other(self, read: Callable[[], Any], value: Any, title: str) -> None:
        if isinstance(value, Tensor):
            self._add_tensor(read, value, title)
            if id(value) not in self._constants:
                return
        self._others.append((read, value, title))
        self._pending.append(value)

    def _add_tensor(self, read: Callable[[], Any], value: Tensor, title: str) -> None:
        if id(value) in self._state:  # both must stay the same object
            self._others.append((read, value, title))
            for of, key in () if id(value) in self._held else self._state[id(value)]:
                self._dicts.append(of)
                self._keys.append(key)
                self._values.append(value)
            self._held.add(id(value))
        elif id(value) not in self._constants:
            content = _content(value)
            if isinstance(content, _Numbers):
                content = _Numbers(content.t.clone())
            self._others.append((lambda: _content(read()), content, title))

    def _look_into(self, value: Any) -> None:
        if isinstance(value, _CLOSED) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, _FUNCTIONS):
            self._add_function(value)
        elif isinstance(value, dict):
            self._add_dict(value)
        elif isinstance(value, list | deque | set):
            self._add_parts(value)
        elif isinstance(value, tuple | frozenset):
            self._pending += value
        elif isinstance(value, property | staticmethod | classmethod):
            self._pending += [getattr(value, name, None) for name in ("fget", "__func__")]
        elif isinstance(value, ContextVar):
            self._add_other(partial(value.get, None), value.get(None), "a context variable")
        elif isinstance(value, type):
            self._add_class(value)
        elif type(value).__name__ == "ndarray":
            if value.size <= _MOST_NUMBERS:
                self._others.append((value.tobytes, value.tobytes(), "an array of numpy"))
        else:
            self._add_object(value)

    def _add_dict(self, of: dict[Any, Any]) -> None:
        if not of:
            self._empty.append(of)
        elif len(of) > _MOST_ENTRIES:
            self._others.append((partial(len, of), len(of), "the length of a dictionary"))
        else:
            self._others.append((partial(tuple, of), tuple(of), "a dictionary"))
            for key, value in of.items():
                self._add_entry(of, key, value)

    def _add_parts(self, of: Any) -> None:
        if not of:
            self._empty.append(of)
            return
        self._others.append((partial(len, of), len(of), "the length of a list"))
        if isinstance(of, set):
            self._others.append((of.copy, of.copy(), "a set"))
        elif len(of) <= _MOST_ENTRIES:
            atoms = [value if isinstance(value, ATOMS) else None for value in of]
            self._others.append((partial(_atoms, of), atoms, "a list"))
            for k, value in enumerate(of):
                if not isinstance(value, ATOMS):
                    self._add_other(partial(_item, of, k), value, "an entry of a list")

    def _add_class(self, kind: type) -> None:
        if kind.__module__.partition(".")[0] in _UNREAD:
            return
        entries = vars(kind)
        is_of_torch = kind.__module__.partition(".")[0] == "torch"
        for key in self._reads.names.intersection(entries):
            if is_of_torch and not _is_set_by_users(entries[key]):
                continue
            self._classes.append(entries)
            self._class_keys.append(key)
            self._class_values.append(entries[key])
            self._pending.append(entries[key])

    def _add_hiding_classes(self, kind: type, key: str) -> None:
        """Adds that the classes in front of the one that defines a name do not have it."""
        for base in kind.__mro__:
            if key in vars(base):
                return
            self._classes.append(vars(base))
            self._class_keys.append(key)
            self._class_values.append(None)

    def _add_object(self, value: Any) -> None:
        kind, entries = type(value), getattr(value, "__dict__", None)
        if (
            kind.__module__.partition(".")[0] in _UNREAD
        ):  # functions of the user in one of pergrad's
            held = (entries or {}).values()
            self._pending += [part for part in held if isinstance(part, (*_FUNCTIONS, nn.Module))]
            return
        self._objects.append(value)
        self._kinds.append(kind)
        self._pending += kind.__mro__
        names, is_module = self._reads.names, id(value) in self._modules
        if type(entries) is dict:
            self._titles.setdefault(id(entries), f"an object of {kind.__name__}")
            for key in names.intersection(entries):
                if not (is_module and key in _OF_STATE):
                    self._add_entry(entries, key, entries[key])
            for key in names.intersection(_own_names(kind)).difference(entries):
                self._add_entry(entries, key, _MISSING)  # it would hide that of the class
                self._add_hiding_classes(kind, key)
        for key in names.intersection(_slots(kind)):
            read = partial(getattr, value, key, _MISSING)
            self._add_other(read, read(), f"{key!r} of an object of {kind.__name__}")
        for of in (
            (internals.parameters_of(value), internals.buffers_of(value)) if is_module else ()
        ):
            if of:
                read = partial(_names_of_state, of)
                self._others.append((read, read(), "the names of parameters or buffers"))
            else:
                self._empty.append(of)

    def _add_function(self, value: Any) -> None:
        if isinstance(value, partial):
            self._pending += [value.func, value.args, value.keywords]
        elif isinstance(value, types.MethodType):
            self._pending += [value.__self__, value.__func__]
        elif id(value.__code__) in self._reads.codes or str(value.__module__).startswith(
            "pergrad."
        ):
            title = f"the function `{value.__name__}`"
            read = partial(_parts_of_function, value)
            self._others.append((read, read(), title))
            self._pending += [value.__defaults__, value.__kwdefaults__]
            for cell in value.__closure__ or ():
                inside = partial(_contents, cell)
                self._add_other(inside, inside(), f"a variable of {title}")
                if isinstance(inside(), types.ModuleType):
                    self._add_scope(vars(inside()), value.__code__.co_names)


def _is_set_by_users(value: Any) -> bool:
    """Whether torch leaves such a value of its own alone: functions and hooks, but no counters."""
    if isinstance(value, types.ModuleType):
        return value.__name__.startswith("torch")
    if isinstance(value, type):
        return False
    return callable(value) or isinstance(value, dict | property | staticmethod)


class _Numbers:
    """Compares a tensor by shape and values."""

    def __init__(self, t: Tensor) -> None:
        self.t = t.detach()


def _content(value: Any) -> Any:
    """Returns what a trace may have read of a tensor that its graph does not hold."""
    if not isinstance(value, Tensor):
        return value
    is_small = value.layout == torch.strided and value.device.type == "cpu"
    if is_small and value.numel() <= _MOST_NUMBERS:
        return _Numbers(value)
    return value.shape, value.dtype, value.device, value.requires_grad


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two values are the same object, or equal numbers and the like, also in sequences."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, float | complex):
        return repr(a) == repr(b)  # -0.0 is not 0.0, and NaN is NaN
    if isinstance(a, ATOMS):
        return bool(a == b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and (all(map(is_, a, b)) or all(map(_is_equal, a, b)))
    if isinstance(a, _Numbers):
        a, b = a.t, b.t
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and bool(((a == b) | (a != a) & (b != b)).all())
        )
    return isinstance(a, set) and {*map(id, a)} == {*map(id, b)}


def _atoms(of: Iterable[Any]) -> list[Any]:
    return [value if isinstance(value, ATOMS) else None for value in of]


def _item(of: Sequence[Any], k: int) -> Any:
    return of[k] if k < len(of) else _MISSING


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned
        return _MISSING


def _parts_of_function(function: types.FunctionType) -> list[Any]:
    return [function.__code__, function.__defaults__, function.__kwdefaults__]


def _names_of_state(of: Mapping[str, Tensor | None]) -> list[Any]:
    return [*of, *[t is None for t in of.values()]]


def _own_names(kind: type) -> set[str]:
    """Returns the names that the classes of an object define, but for those of Python and torch."""
    found = {"forward"} if issubclass(kind, nn.Module) else set()
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in ("torch", *_UNREAD):
            found.update(name for name in vars(base) if not name.startswith("__"))
    return found


def _slots(kind: type) -> set[str]:
    found: set[str] = set()
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        found.update([slots] if isinstance(slots, str) else slots)
    return found
