"""Follows the samples: which layout every tensor of a recorded region has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pergrad.engine.layouts import Constant, Layout, Samples, Scope
from pergrad.engine.propagation import Call, layouts_of_outputs, tensors_in
from pergrad.engine.propagation.indexing import layout_after_write
from pergrad.engine.sizes import BatchSize
from pergrad.engine.weights import Weight

__all__ = ["Tracker"]

TAG = "_pergrad_layout"  # the attribute that a tensor carries its layout, or the weight that it is, in


class Tracker:
    """The layouts of one scope, whose inputs have their samples in dimension `batch_dim`."""

    def __init__(self, scope: Scope, batch_dim: int, constants: Iterable[Tensor] = ()) -> None:
        self.scope = scope
        self.batch_dim = batch_dim
        self.strangers_are_constant = False  # while the module's own forward runs
        self.constant = scope.constant()
        self._constants = {id(t): t for t in constants}  # what belongs to the model

    def knows(self, t: Tensor) -> bool:
        tag: Layout | None = getattr(t, TAG, None)
        return tag is not None and tag.scope is self.scope

    def weight_of(self, t: Tensor) -> Weight | None:
        tag = getattr(t, TAG, None)
        return tag if isinstance(tag, Weight) and tag.scope is self.scope else None

    def mark_weight(self, t: Tensor, weight: Weight) -> None:
        setattr(t, TAG, weight)

    def is_constant(self, t: Tensor) -> bool:
        return isinstance(self.layout(t), Constant)

    def layout(self, t: Tensor) -> Layout:
        tag: Layout | Weight | None = getattr(t, TAG, None)
        if tag is not None and tag.scope is self.scope:
            return self.constant if isinstance(tag, Weight) else tag
        if self.strangers_are_constant or id(t) in self._constants:
            return self.constant
        return self.by_shape(t, self.batch_dim)

    def mark(self, t: Tensor, layout: Layout) -> None:
        setattr(t, TAG, layout)

    @staticmethod
    def unmark(t: Tensor) -> None:
        if hasattr(t, TAG):
            delattr(t, TAG)

    def by_shape(self, t: Tensor, dim: int) -> Layout:
        """The layout that the shape of an input shows."""
        if t.dim() > dim and t.shape[dim] == self.scope.count:
            return self.scope.samples(dim)
        return self.constant

    def propagate(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Give the outputs of a call their layouts."""
        if output is None:
            if func is Tensor.__setitem__ and isinstance(args[2], Tensor):
                call = Call(self.scope, func, args, kwargs, [args[0]], self.layout)
                self.mark(args[0], layout_after_write(call))
            return
        outputs = [output] if isinstance(output, Tensor) else list(tensors_in(output))
        if not outputs:
            return
        call = Call(self.scope, func, args, kwargs, outputs, self.layout)
        for t, layout in zip(outputs, layouts_of_outputs(call), strict=True):
            self.mark(t, layout)

    def tagged(self, t: Tensor, shape: torch.Size) -> torch.Size:
        """The shape, with the size of the samples' dimension remembering what it counts."""
        layout = self.layout(t)
        if not isinstance(layout, Samples):
            return shape
        sizes = list(shape)
        sizes[layout.dim] = BatchSize(sizes[layout.dim])
        return torch.Size(sizes)
