"""A case: a model of a library, tiny and random, the batch that it is given, and the loss of each sample."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pergrad.engine.recording.arguments import leaves, map_leaves

__all__ = ["BATCHES", "Case", "Library", "Subject", "images", "noise", "of", "prepared", "words"]

BATCHES = (3, 4)  # four is also a number of heads, of channels and of groups in many of the models

LossFn: TypeAlias = Callable[..., Tensor]


@dataclass(frozen=True)
class Subject:
    """A model, a loss function that returns the (B,) losses, and the arguments of it."""

    model: nn.Module
    loss_fn: LossFn
    batch: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)  # of pergrad, as batch_first
    alone: Callable[[int], tuple[Any, ...]] | None = None  # a sample's arguments, where not slices


@dataclass(frozen=True)
class Case:
    """A builder of a subject for a batch size, and what is known of it beforehand."""

    library: str
    name: str
    build: Callable[[int], Subject]
    meets: str = ""  # why its samples meet; then a refusal is the right answer
    is_timed: bool = False
    dtype: torch.dtype = torch.float64


@dataclass
class Library:
    """A library by the name of its distribution; imported when a builder asks for a part of it."""

    distribution: str
    module: str = ""
    cases: list[Case] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.module = self.module or re.sub("-", "_", self.distribution)

    def __call__(self, path: str = "") -> Any:
        """The part of the library at a dotted path below its module."""
        found = importlib.import_module(self.module)
        where = self.module
        for name in path.split(".") if path else ():
            where = f"{where}.{name}"
            found = getattr(found, name) if hasattr(found, name) else importlib.import_module(where)
        return found

    def add(self, name: str, build: Callable[[int], Subject], **facts: Any) -> None:
        self.cases.append(Case(self.distribution, name, build, **facts))

    def add_timed(self, name: str, build: Callable[[int], Subject], **facts: Any) -> None:
        """Adds a case that is only timed: its configuration is larger."""
        self.add(name, build, is_timed=True, **facts)


def prepared(model: nn.Module, *, train: bool = False, moved: float = 0.02) -> nn.Module:
    """The model in the default dtype, each parameter moved off its initial value: none stays zero or one."""
    dtype = torch.get_default_dtype()
    model.train(train)
    for module in model.modules():  # only the parts that are real: complex ones keep their dtype
        for p in module.parameters(recurse=False):
            wanted = torch.complex(torch.zeros((), dtype=dtype), torch.zeros((), dtype=dtype)).dtype
            p.data = p.data.to(wanted if p.is_complex() else dtype)
            if p.requires_grad and moved:
                p.data.add_(torch.randn_like(p), alpha=moved)
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
    return model


def of(
    model: nn.Module,
    *inputs: Any,
    call: Callable[..., Any] | None = None,
    options: dict[str, Any] | None = None,
    train: bool = False,
    moved: float = 0.02,
    dim: int = 0,
    **kwargs: Any,
) -> Subject:
    """A subject whose loss is a random linear function of all that the model returns for a sample.

    `call(model, *inputs, **kwargs)` stands for a plain call; `dim` is where outputs have samples.
    """
    model = prepared(model, train=train, moved=moved)
    size = next(t for t in leaves(inputs) if isinstance(t, Tensor)).shape[dim]

    def outputs(model: nn.Module, inputs: Any, kwargs: Any) -> list[Tensor]:
        found = model(*inputs, **kwargs) if call is None else call(model, *inputs, **kwargs)
        return [
            t for t in leaves(found) if isinstance(t, Tensor) and t.dim() > dim and _is_inexact(t)
        ]

    with torch.no_grad():
        shapes = outputs(model, inputs, kwargs)
    kept = [k for k, t in enumerate(shapes) if t.shape[dim] == size]
    if not kept:
        raise ValueError(f"no output has {size} samples: {[tuple(t.shape) for t in shapes]}")
    cotangents = [torch.randn_like(shapes[k]) for k in kept]

    def loss_fn(model: nn.Module, inputs: Any, kwargs: Any, cotangents: Sequence[Tensor]) -> Tensor:
        found = outputs(model, inputs, kwargs)
        terms = zip([found[k] for k in kept], cotangents, strict=True)
        return sum(_real(o * c).movedim(dim, 0).flatten(1).sum(1) for o, c in terms)

    return Subject(model, loss_fn, (inputs, kwargs, cotangents), options or {})


def _is_inexact(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _real(t: Tensor) -> Tensor:
    return (t.real + t.imag if t.is_complex() else t).unsqueeze(-1)


def images(batch: int, size: int = 32, channels: int = 3, dims: int = 2) -> Tensor:
    return torch.randn(batch, channels, *[size] * dims)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape)


def words(batch: int, length: int = 8, vocabulary: int = 32) -> Tensor:
    return torch.randint(1, vocabulary, (batch, length))


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """The argument with its floating tensors in a dtype."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return map_leaves(cast, value)
