"""Runs `torch.vmap` over the samples: each sample gets its own copy of the weights that are used inside.

The copies are one tensor (n, *shape) without storage of its own. Its gradient is the per-sample gradient of
the weight. What else the mapped function does is plain autograd, transforms of `torch.func` included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pergrad.engine.intercepting.ladder import expanded
from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.intercepting.weights import Weight
from pergrad.engine.samples.layouts import Constant, Samples
from pergrad.engine.samples.propagation import tensors_in
from pergrad.engine.samples.tags import TAG
from pergrad.runtime import internals
from pergrad.runtime.containers import map_parts, parts_of, refilled

__all__ = ["mapped_over_samples", "mapped_over_weights"]


def mapped_over_samples(
    tracker: Tracker, func: Callable[..., Any], in_dims: Any, args: Sequence[Any], kwargs: Any
) -> tuple[Callable[..., Any], Any, list[Any]] | None:
    """Returns the function, `in_dims` and the arguments to map instead; None if it maps no samples."""
    dims = _dims_of(in_dims, len(args))
    if dims is None or not torch.is_grad_enabled():
        return None
    if any(isinstance(tracker.tag(t), Samples) for t in tensors_in(kwargs)):
        return None
    has_samples = False
    given: list[Any] = []
    for value, dim in zip(args, dims, strict=True):
        for t in tensors_in(value):
            if internals.is_transformed(t):
                return None
            tag = tracker.tag(t)
            if isinstance(tag, Weight):
                if dim is not None and t.shape[dim] != tracker.scope.count:
                    return None
            elif isinstance(tag, Samples):
                if dim is None or tag.key != (dim % t.dim(), 1, 1):
                    return None
                has_samples = True
            elif not isinstance(tag, Constant):
                return None
        given.append(value if dim is None else _own_rows(tracker, value, dim))
    return (_Mapped(func, tracker), tuple(dims), given) if has_samples else None


def mapped_over_weights(
    tracker: Tracker, func: Callable[..., Any], in_dims: Any, out_dims: Any, args: Sequence[Any]
) -> Callable[..., Any] | None:
    """Returns a loop that does what `torch.vmap` does over slices of a weight; None if it maps no weight.

    Each slice is a weight of its own: an ensemble's members, for example.
    """
    dims = _dims_of(in_dims, len(args))
    if dims is None or not isinstance(out_dims, int) or not torch.is_grad_enabled():
        return None
    mapped = [(t, d) for value, d in zip(args, dims, strict=True) for t in tensors_in(value)]
    if any(internals.is_transformed(t) for t, _ in mapped):
        return None
    sizes = {t.shape[d] for t, d in mapped if d is not None}
    if len(sizes) != 1 or not any(d is not None and tracker.weight_of(t) for t, d in mapped):
        return None

    def sliced(value: Any, dim: int | None, index: int) -> Any:
        return map_parts(
            lambda t: t if dim is None or not isinstance(t, Tensor) else t.select(dim, index), value
        )

    def loop(**kwargs: Any) -> Any:
        found = [
            func(*(sliced(value, dim, k) for value, dim in zip(args, dims, strict=True)), **kwargs)
            for k in range(*sizes)
        ]
        steps = zip(*map(parts_of, found), strict=True)
        return refilled(found[0], [torch.stack(parts, out_dims) for parts in steps])

    return loop


def _dims_of(in_dims: Any, count: int) -> list[int | None] | None:
    """Returns one dimension for each argument; None if they differ inside of an argument."""
    dims = [in_dims] * count if isinstance(in_dims, int) else list(in_dims)
    return dims if all(d is None or isinstance(d, int) for d in dims) else None


def _own_rows(tracker: Tracker, value: Any, dim: int) -> Any:
    """Replaces weights that are mapped over: sample n has index n of its own copy."""

    def replaced(t: Any) -> Any:
        weight = tracker.weight_of(t) if isinstance(t, Tensor) else None
        if weight is None:
            return t
        return expanded(weight).diagonal(0, 0, 1 + dim % t.dim()).movedim(-1, dim)

    return internals.pytree.tree_map(replaced, value)


class _Mapped(TorchFunctionMode):
    """Calls the mapped function; the functions inside get copies of the weights."""

    def __init__(self, func: Callable[..., Any], tracker: Tracker) -> None:
        super().__init__()
        self._func = func
        self._tracker = tracker
        self._level = 0
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by id, with what keeps the id valid
        self.__name__ = getattr(func, "__name__", "mapped")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._level = internals.level_of_transform()
        try:
            with self:
                return self._func(*args, **kwargs)
        finally:
            self._copies.clear()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given, named = internals.pytree.tree_map(self._copy, (args, kwargs or {}))
        return func(*given, **named)

    def _copy(self, t: Any) -> Any:
        """Returns the copies of a weight, mapped over the samples; anything else as it is."""
        if not isinstance(t, Tensor):
            return t
        weight: Any = self._tracker.roots.get(id(t)) or getattr(t, TAG, None)
        if weight is None or weight.scope is not self._tracker.scope or not weight.is_weight:
            return t
        if id(t) not in self._copies:
            with ExitStack() as outside:
                for _ in range(internals.level_of_transform()):
                    outside.enter_context(internals.outside_of_transform())
                copies = expanded(weight)
            self._copies[id(t)] = t, internals.add_mapped_dim(copies, 0, self._level)
        return self._copies[id(t)][1]
