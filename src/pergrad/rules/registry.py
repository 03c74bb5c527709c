"""Registers rules: the per-sample gradients of torch functions.

A rule sees one call of the function. `grad_output` and every argument that carries samples have a leading
sample axis: the slice of sample n is the argument of a call with that sample alone, batch dimension
included. For `F.linear(x, w)` with x of shape (B, T, i), the rule's `input` is (B, 1, T, i). Arguments
without samples are passed unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pergrad.factors import Factor

__all__ = [
    "DECLARING",
    "DECOMPOSITIONS",
    "RULES",
    "Rule",
    "ShapeOnly",
    "by_shape",
    "decomposes",
    "implements_per_sample_grads",
]

Gradient: TypeAlias = Factor | Tensor
Gradients: TypeAlias = Mapping[str, Gradient | Callable[[], Gradient]]


@dataclass(frozen=True)
class Rule:
    """Holds a gradient rule and the options that the engine needs to call it."""

    gradients: Callable[..., Gradients]
    names: tuple[str, ...]  # the function's arguments, in order
    weights: Mapping[str, tuple[str, ...]] | None  # argument -> the arguments its gradient needs
    check: Callable[[Mapping[str, Any], Mapping[str, int]], bool | None] | None
    casts_under_autocast: bool
    symmetric: bool
    merges_rows: bool
    results: Mapping[str, str]

    @property
    def checks_shapes(self) -> bool:
        """Whether its check passes for all calls of a signature if it passes for one."""
        return self.check is None or self.check in _BY_SHAPE

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self.names, args, strict=False)), **kwargs}

    def saves(self, recorded: Iterable[str]) -> set[str] | None:
        """Returns the arguments to keep for the backward, given the recorded ones; None means all."""
        if self.weights is None:
            return None
        return {need for name in recorded for need in self.weights[name]}


class ShapeOnly(NamedTuple):
    """Stands for a weight of which a rule needs the shape only."""

    shape: torch.Size


Check: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, int]], bool | None]
RULES: dict[Callable[..., Any], Rule] = {}
_BY_SHAPE: set[Check] = set()


def by_shape(check: Check) -> Check:
    """Marks the check of a rule: it reads shapes, dtypes and plain arguments, and no values of tensors.

    It runs once for each signature; other checks run for every call.
    """
    _BY_SHAPE.add(check)
    return check


DECOMPOSITIONS: dict[Callable[..., Any], Callable[..., Any]] = {}
DECLARING: set[Callable[..., Any]] = set()


def implements_per_sample_grads(
    *functions: Callable[..., Any],
    weights: Mapping[str, tuple[str, ...]] | None = None,
    check: Callable[[Mapping[str, Any], Mapping[str, int]], bool | None] | None = None,
    casts_under_autocast: bool = False,
    symmetric: bool = False,
    merges_rows: bool = False,
    results: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., Gradients]], Callable[..., Gradients]]:
    """Registers a rule: the decorated function computes the per-sample gradients of `functions`.

    The rule takes `grad_output` and then the function's own arguments, by name. An argument that was not
    given has its default. One that was not kept is None or, if it is a weight, has only its `shape`. The
    rule returns a dict from argument name to gradients, (n, *shape): a tensor, a `Factor`, or a function
    without arguments that returns one and is called only if that argument is recorded. `grad_output` and
    the arguments that carry samples have a leading sample axis; the slice of sample n is the argument of
    a call with that sample alone.

    Args:
        functions: torch functions, or your own functions that dispatch by `__torch_function__`.
        weights: for each argument that may be a weight, the arguments that its gradient needs (kept for
            the backward). Default: any argument may be a weight, and all are kept.
        check: called before the function, with its arguments and the dimension of the samples by
            argument name. It raises if there are no per-sample gradients, and returns False if this
            rule does not cover the call (the engine then uses a general method).
        casts_under_autocast: whether autocast runs the function in its lower precision.
        symmetric: whether an argument that may be a weight may also carry samples.
        merges_rows: whether the rule treats the rows of a sample as positions. The engine may then leave
            out the sample's own batch dimension, of size 1, if there are more than two dimensions.
        results: further arguments of the rule, for intermediate results of the forward: maps each to the
            attribute of the function's autograd node. They are passed as saved there, or left out.

    Your own function, with its rule:

    >>> import torch, pergrad
    >>> from torch.overrides import handle_torch_function, has_torch_function
    >>> def scale(x, weight):
    ...     if has_torch_function((x, weight)):
    ...         return handle_torch_function(scale, (x, weight), x, weight)
    ...     return x * weight
    >>> @pergrad.implements_per_sample_grads(scale)
    ... def scale_rule(grad_output, x, weight):  # both (n, 1, features)
    ...     return {"weight": (grad_output * x).sum(1)}
    >>> class Scale(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.weight = torch.nn.Parameter(torch.ones(3))
    ...
    ...     def forward(self, x):
    ...         return scale(x, self.weight)
    >>> model, x = Scale(), torch.arange(6.0).view(2, 3)
    >>> pergrad.call_for_per_sample_grads(model)(x).sum().backward()
    >>> model.weight.grad_sample
    tensor([[0., 1., 2.],
            [3., 4., 5.]])
    """

    def register(gradients: Callable[..., Gradients]) -> Callable[..., Gradients]:
        names = tuple(inspect.signature(gradients).parameters)
        if names[:1] != ("grad_output",):
            raise TypeError(
                f"a rule's first argument must be `grad_output`, but {gradients.__qualname__} takes {names}"
            )
        rule = Rule(
            gradients,
            tuple(name for name in names[1:] if name not in (results or {})),
            weights,
            check,
            casts_under_autocast,
            symmetric,
            merges_rows,
            results or {},
        )
        for function in functions:
            RULES[function] = rule
        return gradients

    return register


def decomposes(
    *functions: Callable[..., Any], declares_samples: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a replacement of `functions`, written in terms of functions that have rules.

    With `declares_samples`, it is used even if no argument is known to carry samples.
    """

    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            DECOMPOSITIONS[function] = replacement
            if declares_samples:
                DECLARING.add(function)
        return replacement

    return register
