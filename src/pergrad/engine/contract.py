"""Implements PyTorch's contract for per-sample gradients: `call_for_per_sample_grads`, `ExpandedWeight`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from pergrad.engine.collecting.grad_samples import (
    GradSampleSink,
    add_to_grad_sample,
    check_batch_sizes,
)
from pergrad.engine.collecting.ledger import UseCounter
from pergrad.engine.intercepting.recorder import Recorder
from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.recording.gate import run_gated
from pergrad.engine.recording.options import LossReduction, Options
from pergrad.engine.recording.recording import Recording, check_module
from pergrad.engine.samples.layouts import Scope
from pergrad.engine.samples.propagation import tensors_in
from pergrad.errors import BatchSizeError, PergradError, ScopeError, UnsupportedFunctionError
from pergrad.quantities import Batch, Quantity
from pergrad.reductions import SampleGradients
from pergrad.rules import DECOMPOSITIONS, RULES
from pergrad.runtime import internals
from pergrad.runtime.eagerness import uncompiled

__all__ = ["ExpandedWeight", "call_for_per_sample_grads"]


_REDUCTIONS: tuple[LossReduction, ...] = ("sum", "mean")


class _GradSamples(Quantity):
    """Adds full gradients to the `grad_sample` of the parameters at the end of the backward."""

    is_linear = True

    def begin(self, batch: Batch) -> None:
        self._parameters: Mapping[str, Tensor] = batch.parameters
        self._sums: dict[str, Tensor] = {}

    def consume(self, name: str, gradients: SampleGradients) -> None:
        grads = gradients.materialize(self._parameters[name].dtype)
        self._sums[name] = self._sums[name] + grads if name in self._sums else grads

    def end(self) -> None:
        for name, grads in self._sums.items():  # check all before writing any
            check_batch_sizes(getattr(self._parameters[name], "grad_sample", None), grads)
        for name, grads in self._sums.items():
            add_to_grad_sample(self._parameters[name], grads)
        self._sums.clear()


def call_for_per_sample_grads(
    module: nn.Module,
    *,
    batch_size: int | None = None,
    loss_reduction: LossReduction = "sum",
    batch_first: bool = True,
) -> Callable[..., Any]:
    """Returns a callable like `module.forward` whose backward fills `grad_sample` of the parameters.

    After `backward`, every trainable parameter that the loss depends on has `grad_sample`, of shape
    (B, *shape) and the parameter's own dtype; its `.grad` is unchanged. Several calls before one
    backward add up. Clear `grad_sample` before the next step.

    Args:
        module: the module to call; it is not changed.
        batch_size: the number of samples. By default all tensors among the arguments must agree on it.
        loss_reduction: whether the loss is the "sum" or the "mean" over the samples. "mean" undoes the
            division by the batch size, so that grad_sample is the gradient of the sample's own loss.
        batch_first: whether the samples are in the first dimension of the arguments or in the second.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(4, 3)
    >>> pergrad.call_for_per_sample_grads(model)(torch.randn(5, 4)).sum().backward()
    >>> model.weight.grad_sample.shape, model.bias.grad_sample.shape, model.weight.grad
    (torch.Size([5, 3, 4]), torch.Size([5, 3]), None)
    """
    check_module(module)
    if loss_reduction not in _REDUCTIONS:
        raise PergradError(
            f"Expected loss_reduction argument to be {' or '.join(_REDUCTIONS)}, got {loss_reduction}"
        )
    options = Options(batch_size, loss_reduction, batch_first)
    for name, p in module.named_parameters():
        if getattr(p, "grad_sample", None) is not None:
            raise ScopeError(
                "Current Expanded Weights accumulates the gradients, which will be incorrect for multiple "
                f"calls without clearing gradients. Please clear out the grad_sample parameter of {name} "
                f"(shape {tuple(p.shape)}): set it to None before the next call"
            )

    @uncompiled
    @functools.wraps(module.forward, updated=())  # its attributes are marks of a compiler
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        recording = Recording(module, [_GradSamples()], options)
        if batch_size is not None:
            recording.begin(batch_size)
        return run_gated(module, recording, args, kwargs)

    return wrapper


class ExpandedWeight(Tensor):
    """Wraps a weight so that functions called on it give `orig_weight` a `grad_sample` in the backward.

    For functional code; use `call_for_per_sample_grads` for whole modules.

    >>> import torch, pergrad
    >>> import torch.nn.functional as F
    >>> w = torch.randn(3, 4, requires_grad=True)
    >>> F.linear(torch.randn(5, 4), pergrad.ExpandedWeight(w, 5, "sum")).sum().backward()
    >>> w.grad_sample.shape, w.grad
    (torch.Size([5, 3, 4]), None)
    """

    orig_weight: Tensor
    batch_size: int
    loss_reduction: LossReduction

    def __new__(
        cls, orig_weight: Tensor, batch_size: int, loss_reduction: LossReduction
    ) -> ExpandedWeight:
        if not isinstance(orig_weight, Tensor):
            raise PergradError(
                f"Can only make Expanded Weights of Tensors, got {type(orig_weight).__name__}"
            )
        if not orig_weight.requires_grad:
            raise PergradError(
                "Can only build ExpandedWeights objects of tensors that requires_grad"
            )
        with internals.DisableTorchFunctionSubclass():
            made = orig_weight.detach().as_subclass(cls)
            made.requires_grad_()
        return made

    def __init__(self, orig_weight: Tensor, batch_size: int, loss_reduction: LossReduction) -> None:
        self.orig_weight = orig_weight
        self.batch_size = batch_size
        self.loss_reduction = loss_reduction

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in ("__get__", "__set__", "size", "dim", "__repr__", "numel"):
            return super().__torch_function__(func, types, args, kwargs)
        weights = [w for w in tensors_in(args, kwargs) if isinstance(w, ExpandedWeight)]
        is_first = any(args[0] is w for w in weights if args)  # in place of the input
        if func not in RULES and (func not in DECOMPOSITIONS or is_first):
            raise UnsupportedFunctionError(
                f"Expanded Weights encountered but cannot handle function {func.__name__}"
            )
        _check_call(func, args, kwargs, weights)
        scope = Scope(weights[0].batch_size)
        tracker = Tracker(scope, 0)
        tracker.untagged_are_constant = True
        tracker.mark(args[0] if args else kwargs["input"], scope.samples(0))
        scale = scope.count if weights[0].loss_reduction == "mean" else 1
        named = {f"ExpandedWeight {k}": w for k, w in enumerate(weights)}
        recorder = Recorder(named)
        sink = GradSampleSink({name: w.orig_weight for name, w in named.items()}, scale)
        with internals.DisableTorchFunctionSubclass():
            recorder.begin(tracker, UseCounter(), sink)
            try:
                with recorder:
                    return func(*args, **kwargs)
            finally:
                tracker.untag()


def _check_call(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    weights: Sequence[ExpandedWeight],
) -> None:
    """Raises the errors of PyTorch's own ExpandedWeight, with the same messages."""
    input = args[0] if args else kwargs.get("input")
    if isinstance(input, ExpandedWeight):
        raise PergradError(
            "Expanded Weights do not support inputs that are also ExpandedWeights. "
            f"Input must be a Tensor, got {type(input).__name__} in function {func.__name__}"
        )
    if not isinstance(input, Tensor):
        raise PergradError(
            "Expanded Weights requires a Tensor as the first input to get the batch dimension, "
            f"got {type(input).__name__} in function {func.__name__}"
        )
    if input.dim() == 0 and func is not F.linear:  # the rule of F.linear raises its own error
        raise PergradError(
            "Expanded Weights requires a batch dimension but got an input of size 0 "
            f"in function {func.__name__}"
        )
    if input.shape[:1] == (0,):
        raise BatchSizeError(
            "0 is not a valid batch size for Expanded Weights but got input tensor of "
            f"{input} in function {func.__name__}"
        )
    for weight in weights:
        if input.dim() > 0 and weight.batch_size != input.shape[0]:
            raise BatchSizeError(
                "Expected ExpandedWeights to have batch size matching input but got "
                f"input batch size of {input.shape[0]} with ExpandedWeight of batch size {weight.batch_size}"
            )
        if weight.loss_reduction != weights[0].loss_reduction:
            raise PergradError(
                "Expected ExpandedWeights to all have the same loss_reduction argument but got one"
                f"with {weights[0].loss_reduction} and one with {weight.loss_reduction}"
            )
