"""Follows the samples: which layout every tensor of a recorded region has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.engine.inplace import writes_in_place
from pergrad.engine.layouts import Layout, Samples, Scope
from pergrad.engine.propagation import Call, handler_of, layouts_of_outputs, tensors_in
from pergrad.engine.propagation.elementwise import aligned
from pergrad.engine.propagation.indexing import layout_after_write
from pergrad.engine.sizes import BatchSize
from pergrad.engine.weights import Root, Weight

__all__ = ["Tracker"]

TAG = "_pergrad_layout"  # the attribute that a tensor carries its layout, or the weight that it is, in


class Tracker:
    """The layouts of one scope, whose inputs have their samples in dimension `batch_dim`."""

    def __init__(self, scope: Scope, batch_dim: int, module: nn.Module | None = None) -> None:
        self.scope = scope
        self.batch_dim = batch_dim
        self.constant = scope.constant()
        self.strangers_are_constant = False  # while the module's own forward runs
        self.roots: dict[int, Root] = {}  # by id
        self._module = module
        self._model_ids: set[int] | None = None

    # -- reading

    def tag(self, t: Tensor) -> Layout | Weight:
        """What the tensor is here: a weight, or something with a layout."""
        root = self.roots.get(id(t))
        if root is not None:
            return root
        tag: Layout | Weight | None = getattr(t, TAG, None)
        if tag is not None and tag.scope is self.scope:
            return tag
        return self._tag_of_stranger(t)

    def _tag_of_stranger(self, t: Tensor) -> Layout:
        """A tensor made out of sight: the model's own is constant, others are as their shape shows."""
        if self.strangers_are_constant or self._belongs_to_model(t):
            return self.constant
        return self.by_shape(t, self.batch_dim)

    def _belongs_to_model(self, t: Tensor) -> bool:
        if self._model_ids is None:
            module = self._module
            own = [] if module is None else [*module.parameters(), *module.buffers()]
            self._model_ids = {id(p) for p in own}
        return id(t) in self._model_ids

    def weight_of(self, t: Tensor) -> Weight | None:
        tag = self.tag(t)
        return tag if tag.is_weight else None  # type: ignore[return-value]

    def layout(self, t: Tensor) -> Layout:
        tag = self.tag(t)
        return self.constant if tag.is_weight else tag  # type: ignore[return-value]

    def knows(self, t: Tensor) -> bool:
        tag: Layout | Weight | None = getattr(t, TAG, None)
        return tag is not None and tag.scope is self.scope

    def by_shape(self, t: Tensor, dim: int) -> Layout:
        """The layout that the shape of an input shows."""
        if t.dim() > dim and t.shape[dim] == self.scope.count:
            return self.scope.samples(dim)
        return self.constant

    def tagged(self, t: Tensor, shape: torch.Size) -> torch.Size:
        """The shape, with the size of the samples' dimension remembering what it counts."""
        tag = self.tag(t)
        if not isinstance(tag, Samples):
            return shape
        sizes = list(shape)
        sizes[tag.dim] = BatchSize(sizes[tag.dim])
        return torch.Size(sizes)

    # -- writing

    def mark(self, t: Tensor, tag: Layout | Weight) -> None:
        setattr(t, TAG, tag)

    @staticmethod
    def unmark(t: Tensor) -> None:
        if hasattr(t, TAG):
            delattr(t, TAG)

    def propagate(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        flows: bool | None = None,
    ) -> None:
        """Give the outputs of a call their layouts; `flows` says whether a gradient is going to."""
        tensors = tensors_in(*args, *kwargs.values())
        layouts = [self.layout(t) for t in tensors]
        self.propagate_from(func, args, kwargs, output, tensors, layouts, flows)

    def propagate_from(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        tensors: list[Tensor],
        layouts: list[Layout],
        flows: bool | None = None,
    ) -> None:
        """The same, where the tensors among the arguments and their layouts are known already."""
        if isinstance(output, Tensor):
            is_unary = len(tensors) == 1 and layouts[0].carries and handler_of(func) is aligned
            if is_unary and output.shape == tensors[0].shape:  # most calls by far
                setattr(output, TAG, layouts[0])
                return
            outputs = [output]
        elif output is None:
            if func is Tensor.__setitem__ and isinstance(args[2], Tensor):
                call = Call(self.scope, func, args, kwargs, [args[0]], tensors, layouts)
                before = self.layout(args[0])
                self.mark(args[0], layout_after_write(call))
                self._after_write(call, args[0], before)
            return
        else:
            outputs = tensors_in(output)
            if not outputs:
                return
        call = Call(self.scope, func, args, kwargs, outputs, tensors, layouts, flows)
        for t, layout in zip(outputs, layouts_of_outputs(call), strict=True):
            setattr(t, TAG, layout)
        if tensors and outputs[0] is tensors[0] and writes_in_place(func):
            self._after_write(call, outputs[0], layouts[0])

    def _after_write(self, call: Call, t: Tensor, before: Layout) -> None:
        """What was written in place through a view is in the tensor behind it too."""
        base = t._base
        if base is not None and t.requires_grad and self.layout(t) != before:
            self.mark(base, call.mixed("writes samples through a view"))
