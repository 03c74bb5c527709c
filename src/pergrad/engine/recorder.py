"""The recorder: sees every torch function, runs it as it is, and taps those that use a weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from pergrad.engine.composites import is_composite, without_override_check
from pergrad.engine.layouts import Lost, Owners, Samples
from pergrad.engine.ledger import Book
from pergrad.engine.propagation import name_of, tensors_in
from pergrad.engine.tap import Use, tap
from pergrad.engine.tracker import Tracker
from pergrad.errors import UnsupportedFunctionError
from pergrad.rules import DECOMPOSITIONS, RULES, Rule

__all__ = ["Recorder"]

# Attributes that are tensors; reading any other one, or setting one, moves no samples.
_TENSOR_ATTRIBUTES = frozenset(["T", "mT", "H", "mH", "real", "imag", "data"])

# Functions that look at a weight without making a gradient flow to it.
_HARMLESS = frozenset(
    [
        "size",
        "dim",
        "numel",
        "nelement",
        "element_size",
        "stride",
        "storage_offset",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "data_ptr",
        "get_device",
        "len",
        "hash",
        "repr",
        "format",
        "detach",
        "data",
        "requires_grad",
        "register_hook",
        "ndimension",
        "_is_view",
        "is_pinned",
        "untyped_storage",
        "storage",
        "deepcopy",
        "reduce_ex",
        "is_nonzero",
        "retain_grad",
        "register_post_accumulate_grad_hook",
        "is_inference",
        "zeros_like",
        "ones_like",
        "empty_like",
        "rand_like",
        "randn_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
        "new_tensor",
        "result_type",
        "can_cast",
        "is_same_size",
        "_has_compatible_shallow_copy_type",
        "_cudnn_rnn_flatten_weight",
        "is_tensor",
        "allclose",
        "equal",
    ]
)

_BACKWARDS = frozenset([Tensor.backward, torch.autograd.backward, torch.autograd.grad])


class Recorder(TorchFunctionMode):
    """Interception for one scope: `weights` are the recorded tensors by name."""

    tracker: Tracker
    _book: Book
    _scale: int

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._weights = weights  # keeps the ids valid
        self._names = {id(w): name for name, w in weights.items()}
        self._anchor = torch.zeros((), requires_grad=True)
        self._begun = False

    def begin(self, tracker: Tracker, book: Book, scale: int) -> None:
        """Record from now on; until then, functions pass by unless they need a weight's gradient."""
        self.tracker, self._book, self._scale = tracker, book, scale
        self._begun = True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self._begun:
            return func(*args, **kwargs)
        name = func.__name__
        if name == "__get__":
            attribute = name_of(func)
            if attribute == "shape":
                return self._shape(args[0], func(*args))
            if attribute not in _TENSOR_ATTRIBUTES:
                return func(*args)
        elif name == "__set__":
            return func(*args)
        elif name == "size":
            return self._size(func(*args, **kwargs), args, kwargs)
        elif func in _BACKWARDS:
            with self:  # a checkpoint inside recomputes its forward, which must be seen
                return without_override_check(func)(*args, **kwargs)

        recorded = [t for t in tensors_in(args) if id(t) in self._names]
        if kwargs:
            recorded += [t for t in tensors_in(kwargs) if id(t) in self._names]
        if recorded and torch.is_grad_enabled() and name_of(func) not in _HARMLESS:
            return self._call_on_weights(func, args, kwargs)
        output = func(*args, **kwargs)
        self.tracker.propagate(func, args, kwargs, output)
        return output

    def _shape(self, t: Tensor, shape: torch.Size) -> torch.Size:
        return shape if id(t) in self._names else self.tracker.tagged(t, shape)

    def _size(self, size: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(size, int):
            return self._shape(args[0], size)
        dim = args[1] if len(args) > 1 else kwargs["dim"]
        return self._shape(args[0], args[0].shape)[dim]

    # -- functions that use weights

    def _call_on_weights(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        decomposition = DECOMPOSITIONS.get(func)
        if decomposition is not None:
            with self:
                return decomposition(*args, **kwargs)
        rule = RULES.get(func)
        if rule is not None:
            return self._call_with_rule(rule, func, args, kwargs)
        if is_composite(func):
            with self:
                return without_override_check(func)(*args, **kwargs)
        recorded = [self._names[id(t)] for t in tensors_in((args, kwargs)) if id(t) in self._names]
        raise self._unsupported(func, dict(enumerate(recorded)), "it has no rule")

    def _call_with_rule(
        self, rule: Rule, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the function on the weights' values and tap its output for the rule."""
        bound = rule.bind(args, kwargs)
        weights = {
            argument: self._names[id(value)]
            for argument, value in bound.items()
            if isinstance(value, Tensor) and id(value) in self._names
        }
        plain = {
            argument: self._plain(value, rule.casts_under_autocast)
            if isinstance(value, Tensor)
            else value
            for argument, value in bound.items()
        }
        layouts: dict[str, Samples | Owners] = {}
        for argument, value in plain.items():
            if isinstance(value, Tensor) and argument not in weights:
                layout = self.tracker.layout(value)
                if isinstance(layout, Samples | Owners):
                    layouts[argument] = layout
                elif isinstance(layout, Lost):
                    raise self._unsupported(func, weights, layout.reason)
        self._check(rule, func, plain, weights, layouts)

        args = tuple(plain[argument] for argument in rule.names[: len(args)])
        kwargs = {argument: plain[argument] for argument in kwargs}
        output = func(*args, **kwargs)
        self.tracker.propagate(func, args, kwargs, output)
        outputs = tuple(tensors_in(output))
        output_layouts = tuple(self.tracker.layout(t) for t in outputs)
        for layout in output_layouts:
            if isinstance(layout, Lost):
                raise self._unsupported(func, weights, layout.reason)

        saves = rule.saves(list(weights))
        kept: dict[str, Tensor] = {}
        arguments: dict[str, Any] = {}
        for argument, value in plain.items():
            if not isinstance(value, Tensor):
                arguments[argument] = value
            elif saves is None or argument in saves:
                kept[argument] = value.detach()
            else:  # of a weight whose values are not needed, its shape
                arguments[argument] = value.to("meta") if argument in weights else None
        positions = {argument: k for k, argument in enumerate(kept)}
        use = Use(
            rule,
            _written(func),
            arguments,
            positions,
            layouts,
            output_layouts,
            weights,
            self._book,
            self._scale,
        )
        for parameter in weights.values():
            self._book.expect(parameter)
        tapped = tap(use, tuple(kept.values()), self._anchor, outputs)
        for t, layout in zip(tapped, output_layouts, strict=True):
            self.tracker.mark(t, layout)
        return tapped[0] if isinstance(output, Tensor) else type(output)(tapped)

    def _check(
        self,
        rule: Rule,
        func: Callable[..., Any],
        arguments: Mapping[str, Any],
        weights: Mapping[str, str],
        layouts: Mapping[str, Samples | Owners],
    ) -> None:
        """Refuse a call that the rule does not cover."""
        if not layouts:
            raise self._unsupported(func, weights, "none of its arguments carries samples")
        if rule.weights is not None:
            strange = sorted(set(weights) - set(rule.weights))
            if strange:
                raise self._unsupported(func, weights, f"its rule has no gradient for {strange}")
            varying = sorted(set(layouts) & set(rule.weights))
            if varying:
                raise self._unsupported(func, weights, f"{varying} differ between the samples")
        if rule.check is not None:
            rule.check(arguments, {name: layout.dim for name, layout in layouts.items()})

    def _plain(self, t: Tensor, casts: bool) -> Tensor:
        """The tensor to call a function on: a weight's value, cast as autocast is about to."""
        name = self._names.get(id(t))
        layout = self.tracker.layout(t) if name is None else self.tracker.scope.constant()
        if name is not None:
            t = t.detach()
        if casts and t.is_floating_point() and torch.is_autocast_enabled(t.device.type):
            dtype = torch.get_autocast_dtype(t.device.type)
            t = t if t.dtype in (dtype, torch.float64) else t.to(dtype)
        self.tracker.mark(t, layout)
        return t

    def _unsupported(
        self, func: Callable[..., Any], weights: Mapping[Any, str], reason: str
    ) -> UnsupportedFunctionError:
        names = " and ".join(
            f"{name!r} (shape {tuple(self._weights[name].shape)})" for name in weights.values()
        )
        function = _written(func)
        return UnsupportedFunctionError(
            f"Expanded Weights encountered but cannot handle function {func.__name__}: "
            f"`{function}` on parameter {names}: {reason}. Register a rule with "
            f"@pergrad.implements_per_sample_grads({function}), or freeze the parameter."
        )


def _written(func: Callable[..., Any]) -> str:
    return resolve_name(func) or name_of(func)
