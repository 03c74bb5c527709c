"""Follows the samples: which layout every tensor of a recorded region has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pergrad.engine.inplace import writes_in_place
from pergrad.engine.layouts import Constant, Layout, Samples, Scope
from pergrad.engine.propagation import (
    BY_VALUE,
    Call,
    handler_of,
    layouts_of_outputs,
    name_of,
    tensors_in,
)
from pergrad.engine.propagation.elementwise import aligned
from pergrad.engine.propagation.indexing import layout_after_write
from pergrad.engine.sizes import BatchSize
from pergrad.engine.weights import Root, Weight
from pergrad.rules.samples import are_samples

__all__ = ["TAG", "Tracker"]

TAG = "_pergrad_layout"  # the attribute that a tensor carries its layout, or the weight that it is, in


# What repeats from step to step is not worked out again: the signature of a call, as far as the layout
# of its output can depend on it, to that layout.
_KNOWN: dict[Any, tuple[int, int, int]] = {}
_MOST_KNOWN = 10_000
_ATOMS = frozenset([int, float, bool, str, type(None), torch.dtype, torch.device])


def _signature(
    count: int,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    layouts: list[Layout],
) -> Any:
    """None for a call that may depend on more than shapes and layouts, or that writes in place."""
    if writes_in_place(func) or name_of(func) in BY_VALUE:
        return None
    parts: list[Any] = [func, count]
    given = (*args, *kwargs, *kwargs.values()) if kwargs else args
    return tuple(parts) if _describe(given, iter(layouts), parts) else None


def _describe(values: Iterable[Any], layouts: Iterator[Layout], parts: list[Any]) -> bool:
    """Add to `parts` what a layout may depend on; False where that is more than can be compared."""
    for value in values:
        if isinstance(value, Tensor):
            layout = next(layouts)
            if not value.is_floating_point():
                return False  # indices: their values may matter
            if isinstance(layout, Samples):
                parts.append((layout.dim, layout.pre, layout.post, value.shape))
            elif isinstance(layout, Constant):
                parts.append(value.shape)
            else:
                return False
        elif type(value) is bool:
            parts.append("true" if value else "false")  # not equal to 1 or 0
        elif type(value) in _ATOMS:
            parts.append(value)
        elif type(value) is BatchSize:
            parts.append(("samples", int(value)))
        elif type(value) is slice:
            parts.append(("slice", value.start, value.stop, value.step))
            if isinstance(value.start, Tensor) or isinstance(value.stop, Tensor):
                return False
        elif isinstance(value, list | tuple):
            parts.append(("of", len(value)))
            if not _describe(value, layouts, parts):
                return False
        elif value is Ellipsis:
            parts.append("...")
        else:
            return False
    return True


def _has_sizes(args: tuple[Any, ...]) -> bool:
    """Whether a size that counts samples may be among the arguments."""
    return any(type(a) not in _ATOMS and not isinstance(a, Tensor) for a in args)


class Tracker:
    """The layouts of one scope, whose inputs have their samples in dimension `batch_dim`."""

    def __init__(self, scope: Scope, batch_dim: int, own: Iterable[Tensor] = ()) -> None:
        self.scope = scope
        self.batch_dim = batch_dim
        self.constant = scope.constant()
        self.strangers_are_constant = False  # while the module's own forward runs
        self.roots: dict[int, Root] = {}  # by id
        self._own = {id(t) for t in own}  # what belongs to the model
        self._met: WeakValueDictionary[int, Tensor] = (
            WeakValueDictionary()
        )  # strangers, in its forward

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
        if id(t) in self._own:
            return self.constant
        if self.strangers_are_constant:
            self._met[id(t)] = t
            return self.constant
        is_recomputation = torch._C._current_graph_task_id() != -1
        if is_recomputation and self._met.get(id(t)) is t:
            return self.constant
        return self.by_shape(t, self.batch_dim)

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
            if self._is_of_constants(func, args, kwargs, layouts):
                setattr(output, TAG, self.constant)
                return
            key = _signature(self.scope.count, func, args, kwargs, layouts)
            known = _KNOWN.get(key) if key is not None else None
            if known is not None:
                setattr(output, TAG, self.scope.samples(*known))
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
            key = None
            outputs = tensors_in(output)
            if not outputs:
                return
        call = Call(self.scope, func, args, kwargs, outputs, tensors, layouts, flows)
        for t, layout in zip(outputs, layouts_of_outputs(call), strict=True):
            setattr(t, TAG, layout)
        if isinstance(output, Tensor) and key is not None and isinstance(layout, Samples):
            if len(_KNOWN) >= _MOST_KNOWN:
                _KNOWN.clear()
            _KNOWN[key] = layout.key
        if tensors and outputs[0] is tensors[0] and writes_in_place(func):
            self._after_write(call, outputs[0], layouts[0])

    def _is_of_constants(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        layouts: list[Layout],
    ) -> bool:
        """Whether a result is the same for all samples, as can be seen at once."""
        for layout in layouts:
            if layout is not self.constant:
                return False
        return bool(layouts) and not kwargs and not _has_sizes(args) and func is not are_samples

    def _after_write(self, call: Call, t: Tensor, before: Layout) -> None:
        """What was written in place through a view is in the tensor behind it too."""
        base = t._base
        if base is not None and t.requires_grad and self.layout(t) != before:
            self.mark(base, call.mixed("writes samples through a view"))
