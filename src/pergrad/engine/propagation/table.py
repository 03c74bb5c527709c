"""How a torch function moves the samples: a table from function name to the layout of its output."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from pergrad.engine.layouts import Layout, Lost, Owners, Samples, Scope
from pergrad.errors import MixedSamplesError

__all__ = [
    "HANDLERS",
    "Call",
    "Handler",
    "moves_samples",
    "name_of",
    "tensors_in",
]

MISSING: Any = object()
_ARITHMETIC = frozenset(
    [
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "matmul",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
    ]
)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among a function's arguments or results, also inside lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


@functools.cache
def name_of(func: Callable[..., Any]) -> str:
    """One name for the function, method, operator, property and in-place forms of an operation."""
    name: str = func.__name__
    if name == "__get__":
        return str(func.__self__.__name__)  # type: ignore[attr-defined]
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        return name[1:] if name[0] in "ir" and name[1:] in _ARITHMETIC else name
    return name[:-1] if name.endswith("_") else name


@dataclass(slots=True)
class Call:
    """One call of a torch function, and how to read the layouts of its tensors."""

    scope: Scope
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]
    layout: Callable[[Tensor], Layout]

    @property
    def name(self) -> str:
        return name_of(self.func)

    @property
    def output(self) -> Tensor:
        return self.outputs[0]

    def tensors(self) -> Iterator[Tensor]:
        yield from tensors_in(self.args)
        yield from tensors_in(self.kwargs)

    def carriers(self) -> list[tuple[Tensor, Samples | Owners]]:
        """The arguments that carry samples, with their layouts."""
        found = []
        for t in self.tensors():
            layout = self.layout(t)
            if isinstance(layout, Samples | Owners):
                found.append((t, layout))
        return found

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        return self.args[position] if len(self.args) > position else default

    def lost(self, reason: str) -> Lost:
        return self.scope.lost(f"`{self.name}` {reason}")

    def mixed(self) -> Layout:
        """Several samples act on one another: fatal where a gradient flows, a constant elsewhere."""
        for t in self.outputs:
            if t.requires_grad:
                t.register_hook(functools.partial(_refuse, self.name))
        if any(t.requires_grad for t in self.outputs):
            return self.lost("mixes the samples")
        return self.scope.constant()

    def total(self) -> Layout:
        """A sum over the samples, as a loss is: each still has its own gradient."""
        if any(t.requires_grad for t in self.outputs):
            return self.scope.lost(f"`{self.name}` adds up the samples", is_total=True)
        return self.scope.constant()


def _refuse(name: str, _: Tensor) -> None:
    raise MixedSamplesError(
        f"`{name}` mixes the samples of the batch and the loss depends on its result, so that a sample "
        "has no gradient of its own; take the loss from a part of the model in which samples do not "
        "meet (or leave that part out with torch.no_grad)"
    )


Handler: TypeAlias = Callable[[Call], Layout | Sequence[Layout] | None]
H = TypeVar("H", bound=Handler)
HANDLERS: dict[str, Handler] = {}


def moves_samples(*names: str) -> Callable[[H], H]:
    """Registers how the named operations move samples; None from a handler means that it cannot tell."""

    def register(handler: H) -> H:
        for name in names:
            HANDLERS[name] = handler
        return handler

    return register
