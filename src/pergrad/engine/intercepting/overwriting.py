"""Writes to weights in place: the new value is a weight of its own, and views of the old one follow it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pergrad.engine.intercepting.rule_calls import unsupported
from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.intercepting.weights import LateView, Weight
from pergrad.engine.samples.propagation.in_place import only_moves, out_of_place
from pergrad.runtime import internals

__all__ = ["Overwriting"]

Run = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def _nothing() -> None:
    return None


class _Through:
    """Runs an in-place function on a view of a copy of its first argument, and returns the copy."""

    __name__ = "written_through_view"

    def __init__(self, func: Callable[..., Any], view: Tensor, offset: int) -> None:
        self._func = func
        self._geometry = view.shape, view.stride(), offset

    def __eq__(self, other: object) -> bool:  # one entry in a cache for all that do the same
        return isinstance(other, _Through) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        return self._func, self._geometry

    def __call__(self, t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = t.clone()
        self._func(out.as_strided(*self._geometry), *args, **kwargs)
        return out


class Overwriting:
    """Handles in-place functions for one recorder.

    `run`, which computes a function of weights, is passed to each call: kept here, it would make a cycle.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self.has_written = False
        # The tensor that a view was taken from, and where the view begins in it, by the view's weight.
        self._bases: weakref.WeakKeyDictionary[Weight, tuple[weakref.ref[Tensor], int]] = (
            weakref.WeakKeyDictionary()
        )

    def note_view(self, base: Tensor, weight: Weight) -> None:
        """Notes that the value of a weight is a view of a tensor, which is a weight."""
        behind = self._tracker.weight_of(base)
        assert behind is not None
        offset = int(weight.value.storage_offset()) - int(behind.value.storage_offset())
        self._bases[weight] = weakref.ref(base), offset

    def write(
        self, run: Run, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Computes the new value of the first argument out of place, then gives it to that argument."""
        target, pure, tracker = args[0], out_of_place(func), self._tracker
        assert pure is not None
        self.has_written = True
        old = tracker.weight_of(target)
        if old is not None and only_moves(func):
            return self._move(run, func, old, args, kwargs)
        if old is not None and old.is_view and not self._is_alone(old):
            return self._write_through(run, func, old, args, kwargs)
        before = target
        if old is None:  # the backward may need the overwritten value
            before = target.clone()
            tracker.mark(before, tracker.layout(target))
        result = run(pure, (before, *args[1:]), kwargs)
        weight = tracker.weight_of(result)
        if weight is None:
            layout = tracker.layout(result)
            if old is not None and target.is_leaf and target.requires_grad:
                # The leaf that stands for the old weight cannot take a graph.
                raise unsupported(func, [old], "the function writes samples into it in place")
            target.copy_(result)
            tracker.mark(target, layout)
            return target
        if id(target) in tracker.roots or internals.base_of(target) is not None:
            where = "a parameter" if id(target) in tracker.roots else "a view"
            raise unsupported(pure, [weight], f"the function changes {where} in place")
        if old is None:
            with torch.no_grad():
                target.copy_(weight.value)
        else:  # graphs that use its old value have saved that memory
            target.data = weight.value.to(target.dtype)
            old.write()
        tracker.mark(target, weight)
        return target

    def _move(
        self,
        run: Run,
        func: Callable[..., Any],
        old: Weight,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Gives a weight another shape and other strides; it remains a view of what it is a view of."""
        target, pure, tracker = args[0], out_of_place(func), self._tracker
        assert pure is not None
        fresh = None if id(target) in tracker.roots else run(pure, args, kwargs)
        weight = None if fresh is None else tracker.weight_of(fresh)
        if weight is None or not weight.is_view:
            raise unsupported(func, [old], "the function changes the shape of a weight in place")
        if old.is_view:
            reference, offset = self._bases.get(old, (None, 0))
            if reference is not None:
                moved = weight.value.storage_offset() - old.value.storage_offset()
                self._bases[weight] = reference, offset + int(moved)
        else:  # other views stay where they are in memory, if the copy has its elements there
            copy = run(Tensor.clone, (fresh,), {})
            whole = tracker.weight_of(copy)
            assert whole is not None
            is_same_memory = whole.value.stride() == weight.value.stride()
            if not is_same_memory or whole.value.numel() != old.value.numel():
                raise unsupported(
                    func, [old], "the function leaves out elements of a weight in place"
                )
            weight = whole
            old.write()
        target.data = weight.value
        tracker.mark(target, weight)
        return target

    def _is_alone(self, view: Weight) -> bool:
        """Whether the tensor behind a view is gone; other views of it become stale for good."""
        reference, _ = self._bases.get(view, (None, 0))
        return reference is not None and reference() is None and not view.views_parameter

    def _write_through(
        self,
        run: Run,
        func: Callable[..., Any],
        old: Weight,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Writes to a view of a weight: the weight behind it gets a new value, and the view follows."""
        view = args[0]
        base, offset = self._base_of(run, func, old)
        result = run(_Through(func, view, offset), (base, *args[1:]), kwargs)
        if self._tracker.weight_of(result) is None:
            raise unsupported(func, [old], "the function writes samples through a view of it")
        self.write(run, Tensor.copy_, (base, result), {})
        self._follow(run, view, base, offset)
        return view

    def refresh(self, run: Run, func: Callable[..., Any], view: Tensor, old: Weight) -> None:
        """Gives a view the value that the weight behind it has now."""
        if isinstance(old, LateView):
            behind = internals.base_of(view)
            self._bases[old] = weakref.ref(behind), view.storage_offset() - behind.storage_offset()
        base, offset = self._base_of(run, func, old)
        self._follow(run, view, base, offset)

    def _base_of(self, run: Run, func: Callable[..., Any], old: Weight) -> tuple[Tensor, int]:
        """Returns the tensor behind a view, up to date, and where the view begins in it."""
        reference, offset = self._bases.get(old, (_nothing, 0))
        base = reference()
        weight = None if base is None else self._tracker.weight_of(base)
        if base is None or weight is None or id(base) in self._tracker.roots:
            raise unsupported(func, [old], "the function changes a view of it in place")
        if weight.is_stale:
            self.refresh(run, func, base, weight)
            weight = self._tracker.weight_of(base)
            assert weight is not None
        value = weight.value
        if value.clone().stride() != value.stride() or value.stride() != base.stride():
            raise unsupported(func, [old], "the function changes a view of it in place")
        return base, offset

    def _follow(self, run: Run, view: Tensor, base: Tensor, offset: int) -> None:
        start = self._tracker.weight_of(base)
        assert start is not None
        place = int(start.value.storage_offset()) + offset
        fresh = run(Tensor.as_strided, (base, view.shape, view.stride(), place), {})
        weight = self._tracker.weight_of(fresh)
        assert weight is not None
        view.data = weight.value
        self._tracker.mark(view, weight)
