"""The table of rules: for a torch function, what each sample's gradient is.

A rule sees one call of the function. `grad_output` and every argument that carries samples come with
a leading sample axis: the slice of sample n is the argument as the function would have got it for
that sample alone, its own batch dimension included. So for `F.linear(x, w)` with x of shape
(B, T, i), the rule's `input` is (B, 1, T, i). Arguments without samples come as they were given.
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
    "decomposes",
    "implements_per_sample_grads",
]

Gradient: TypeAlias = Factor | Tensor
Gradients: TypeAlias = Mapping[str, Gradient | Callable[[], Gradient]]


@dataclass(frozen=True)
class Rule:
    """A gradient rule together with what the engine must know to call it."""

    gradients: Callable[..., Gradients]
    names: tuple[str, ...]  # the function's arguments, in order
    weights: Mapping[str, tuple[str, ...]] | None  # argument -> the arguments its gradient needs
    check: Callable[[Mapping[str, Any], Mapping[str, int]], bool | None] | None
    casts_under_autocast: bool
    symmetric: bool
    merges_rows: bool
    results: Mapping[str, str]

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self.names, args, strict=False)), **kwargs}

    def saves(self, recorded: Iterable[str]) -> set[str] | None:
        """The arguments to keep for the backward, given which ones are recorded; None means all."""
        if self.weights is None:
            return None
        return {need for name in recorded for need in self.weights[name]}


class ShapeOnly(NamedTuple):
    """A weight whose values a rule does not need: its shape."""

    shape: torch.Size


RULES: dict[Callable[..., Any], Rule] = {}
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
    """Registers a rule: the decorated function gives the per-sample gradients of `functions`.

    The rule takes `grad_output` and then the function's own arguments, by their names; an argument
    that was not given is its default, one that was not kept is None, or, if it is a weight, has nothing
    but its `shape`. It returns a dict from argument name to the
    gradients, (n, *shape): a tensor, a `Factor`, or a function without arguments that gives one and is
    called only when that argument is recorded. `grad_output` and the arguments that carry samples have
    a leading sample axis; the slice of sample n is what the function gets for that sample alone.

    Args:
        functions: torch functions, or your own that dispatch by `__torch_function__`.
        weights: for each argument that may be a weight, the arguments that its gradient needs (kept for
            the backward). Default: any argument may be one, and all are kept.
        check: called before the function with its arguments and, by argument name, the dimension of
            the samples; raises when there is no gradient, and returns False when there is one but this
            rule does not give it (a general one is used then).
        casts_under_autocast: whether autocast runs the function in its lower precision.
        symmetric: whether an argument that may be a weight may also carry samples.
        merges_rows: whether a sample's rows are just more positions to the rule: the batch dimension, of
            size 1, may then be left out where others stand between it and the last.
        results: further arguments of the rule, for what the function has found on its way to its output: for
            each the attribute of its node in torch's graph. Given as they lie there, or not at all.

    A function of one's own, with its rule:

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
                f"a rule's first argument must be `grad_output`, but {gradients.__qualname__} has {names}"
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
    """Registers a replacement: `functions` written in terms of others that have rules.

    With `declares_samples` it is used even where no argument is known to carry samples.
    """

    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            DECOMPOSITIONS[function] = replacement
            if declares_samples:
                DECLARING.add(function)
        return replacement

    return register
