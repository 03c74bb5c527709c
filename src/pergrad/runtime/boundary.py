"""Resolves private names of torch and Triton, and replaces missing ones by public functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.errors import PergradError

__all__ = [
    "TESTED",
    "Entry",
    "Hooks",
    "Never",
    "NoConfig",
    "apply_of",
    "batched_gradients",
    "children",
    "copy_each",
    "current_raw_stream",
    "current_stream",
    "exchange_stance",
    "find",
    "hook_forward",
    "is_any_autocast_enabled",
    "none",
    "not_joining",
    "own_buffers",
    "own_parameters",
    "resolver",
    "unchanged",
    "unchanged_callback",
    "vmapped",
    "without_autocast",
    "yes",
]

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


# -- replacements: the same results, only slower or with more memory


class Never:
    """Has no instances, and no graph calls it: every check for it is False."""


def yes(*_: Any) -> bool:
    return True


def is_any_autocast_enabled() -> bool:
    return any(map(torch.is_autocast_enabled, _autocast_devices()))


def _autocast_devices() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def without_autocast() -> AbstractContextManager[object]:
    off = ExitStack()
    for device in _autocast_devices():
        off.enter_context(torch.autocast(device, enabled=False))
    return off


class Hooks:
    """Sets and removes hooks of a tensor by key, as its dictionary of hooks does, by `register_hook`."""

    _handles: dict[tuple[int, int], Any] = {}  # noqa: RUF012  # of all tensors, by id and key

    def __init__(self, t: Tensor) -> None:
        self._tensor = t

    def __setitem__(self, key: int, hook: Callable[[Tensor], None]) -> None:
        self._handles[id(self._tensor), key] = self._tensor.register_hook(hook)

    def __iter__(self) -> Iterator[int]:
        return (key for own, key in self._handles if own == id(self._tensor))

    def pop(self, key: int, default: None) -> None:
        handle = self._handles.pop((id(self._tensor), key), default)
        if handle is not None:
            handle.remove()


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def current_stream(device: int) -> tuple[int, int, int]:
    stream = torch.cuda.current_stream(device)
    return stream.stream_id, stream.device_index, stream.device_type


def current_raw_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    return dict(module.named_children())


def own_parameters(module: nn.Module) -> dict[str, Tensor | None]:
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))


def apply_of(_: None, function: type[torch.autograd.Function]) -> Callable[..., Any]:
    return function.apply


def hook_forward(
    module: nn.Module, before: Callable[..., None], after: Callable[..., None]
) -> Callable[[], None]:
    """Hooks a module: `before` runs first, `after` also after an error; returns what removes both."""
    handles = (
        module.register_forward_hook(after, always_call=True),
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
    )

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def none(_: Any) -> None:
    return None


def unchanged(x: Tensor, _: list[int]) -> Tensor:
    return x


class NoConfig:
    """Has no options to change."""

    @staticmethod
    def patch(**_: Any) -> AbstractContextManager[object]:
        return ExitStack()


def unchanged_callback(_: Any) -> None:
    return None


def exchange_stance(stance: Any = None) -> Any:
    """Sets the stance of the compiler, by default to eager, and returns what sets it back."""
    if stance is not None:
        stance.__exit__(None, None, None)
        return None
    return torch.compiler.set_stance("force_eager")


class _NotJoining:
    """Stands for the configuration of a module that is in no context `Join`."""

    enable = False


def not_joining(_: Any) -> _NotJoining:
    return _NotJoining()


def batched_gradients(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], each: Sequence[Tensor], count: int
) -> list[Tensor | None]:
    found = torch.autograd.grad(
        outputs, leaves, each, is_grads_batched=True, retain_graph=True, allow_unused=True
    )
    return list(found)


def vmapped(
    function: Callable[..., list[Any]],
    tensors: Sequence[Tensor],
    dims: Sequence[int | None],
    count: int,
) -> list[Any]:
    return torch.vmap(function, in_dims=tuple(dims))(*tensors)
