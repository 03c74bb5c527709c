"""Derives weights from weights: results of functions of weights and constants only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.distributed.placing import is_sharded
from pergrad.engine.collecting.kept_gradients import attached_results
from pergrad.engine.intercepting.weights import (
    Derived,
    Transformed,
    Weight,
    carriers_of,
    graph_of_its_own,
)
from pergrad.engine.samples.propagation import name_of
from pergrad.errors import PergradError
from pergrad.factors import Dense, Factor, Rearranged, RowSum, Scaled, sums_by_row
from pergrad.runtime import internals, wide
from pergrad.runtime.containers import map_parts, parts_of

__all__ = ["attach", "derive", "explicit_cast", "look_up", "mask", "scale", "transform"]

_TRANSPOSES = frozenset("t T mT transpose swapaxes swapdims".split())
_PERMUTATIONS = _TRANSPOSES | frozenset("permute movedim moveaxis".split())
_RESHAPES = frozenset("view reshape flatten unflatten ravel squeeze unsqueeze".split())
_PRODUCTS = frozenset({torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__})
# Functions of a tensor, a mask and a number: the place of the tensor, and whether a true mask keeps it.
_MASKS: dict[Callable[..., Any], tuple[int, bool]] = {
    torch.masked_fill: (0, False),
    Tensor.masked_fill: (0, False),
    torch.where: (1, True),
    Tensor.where: (0, True),
}
_CASTS = frozenset("to type type_as float double half bfloat16 contiguous clone".split())


def transform(func: Callable[..., Any], weight: Weight, args: Any, kwargs: Any) -> Weight | None:
    """Returns the lazily transformed weight of a transpose, a reshape or a cast; None for other functions.

    It is the weight itself if the function returns its own argument, as a cast to its own type does.
    """
    found = _transformed(func, weight, args, kwargs)
    if found is not None and found is not weight and weight.keeps_gradient:
        found.operand = func(weight.operand, *args[1:], **kwargs)
    return found


def _transformed(func: Callable[..., Any], weight: Weight, args: Any, kwargs: Any) -> Weight | None:
    name, of = name_of(func), weight.value
    if is_sharded(of) and name not in _CASTS:
        return None  # shards of views are not views of shards
    if name in _PERMUTATIONS:
        value = func(of, *args[1:], **kwargs)
        if _is_mt(value, of):
            return Transformed(weight, value, _transposed)
        return Transformed(weight, value, partial(_permuted, _order(func, of, args, kwargs)))
    if name in _RESHAPES:
        value = func(of, *args[1:], **kwargs)
        if value.numel() != of.numel() or value.dtype != of.dtype:
            return None
        return Transformed(weight, value, partial(_reshaped, tuple(of.shape)))
    if name in _CASTS:
        value = func(of, *args[1:], **kwargs)
        if value is of:
            return weight
        is_same = value.device == of.device and value.is_complex() == of.is_complex()
        return Transformed(weight, value, _unchanged) if is_same else None
    return None


def attach(
    lazy: Weight,
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
    weight_of: Callable[[Tensor], Weight | None],
) -> Weight:
    """Lets autograd compute the ordinary gradients of the weights behind a lazy one, if they keep theirs."""
    weights = (weight_of(t) for t in parts_of((args, kwargs)) if isinstance(t, Tensor))
    if not any(weight is not None and weight.keeps_gradient for weight in weights):
        return lazy

    def operand(t: Any) -> Any:
        weight = weight_of(t) if isinstance(t, Tensor) else None
        return t if weight is None else weight.operand

    args, kwargs = map_parts(operand, (args, kwargs))
    lazy.operand = func(*args, **kwargs)
    return lazy


def look_up(
    func: Callable[..., Any], args: Any, kwargs: Any, weight_of: Callable[[Tensor], Weight | None]
) -> Weight | None:
    """Returns rows of a table, chosen by a constant index, as a lazy weight; None for any other call."""
    found = _table_and_index(func, args, kwargs)
    if found is None or not all(isinstance(t, Tensor) for t in found):
        return None
    table, index = found
    weight = weight_of(table)
    is_index = index.dtype in (torch.int32, torch.int64) and weight_of(index) is None
    if weight is None or not is_index or not table.dim() or is_sharded(table):
        return None
    rows = index.long()
    rows = torch.where(rows < 0, rows + table.shape[0], rows).flatten()
    rows = rows.to(table.device, non_blocking=True)  # torch takes an index on the CPU
    value = weight.value.index_select(0, rows).view(*index.shape, *table.shape[1:])
    return Transformed(weight, value, partial(_looked_up, rows, tuple(table.shape)))


def _table_and_index(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    if func is F.embedding:
        return _of_embedding(*args, **kwargs)
    if func is Tensor.__getitem__:
        table, index = args
        return table, index
    if func in (torch.index_select, Tensor.index_select) and len(args) == 3 and args[1] == 0:
        return args[0], args[2]
    return None


def _of_embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> tuple[Tensor, Tensor] | None:
    is_plain = padding_idx is None and max_norm is None and not scale_grad_by_freq
    return (weight, input) if is_plain else None


def _looked_up(index: Tensor, sizes: tuple[int, ...], factor: Factor) -> Factor:
    """Σ_t G_n[t] [index[t] = r], the gradient of a table of `sizes`."""
    rows, width, samples = sizes[0], prod(sizes[1:]), factor.shape[0]
    found: Factor
    if rows <= len(index):  # repeated rows: the sum is smaller than its terms
        dtype = wide(factor.dtype)
        g = factor.materialize(dtype).reshape(samples, len(index), width)
        found = Dense(sums_by_row(index, g, rows, dtype))
    else:
        g = factor.materialize().reshape(samples, len(index), width)
        found = RowSum(index.repeat(samples, 1), g, rows)
    return found if len(sizes) == 2 else Rearranged(found, sizes=sizes)


def scale(
    func: Callable[..., Any], args: Any, kwargs: Any, weight_of: Callable[[Tensor], Weight | None]
) -> Weight | None:
    """Returns a weight times a constant of at most its shape, lazily; None for any other call."""
    if func not in _PRODUCTS or kwargs or len(args) != 2:
        return None
    by_place = [weight_of(t) if isinstance(t, Tensor) else None for t in args]
    found = [weight for weight in by_place if weight is not None]
    if len(found) != 1:
        return None
    (weight,) = found
    of, constant = weight.value, args[1] if by_place[0] is not None else args[0]
    if not isinstance(constant, Tensor):
        if type(constant) not in (int, float, bool):
            return None
        constant = torch.tensor(constant, dtype=of.dtype, device=of.device)
    is_fit = not (constant.requires_grad or constant.is_inference() or constant.is_complex())
    if not is_fit or of.is_complex() or is_sharded(of) or constant.device != of.device:
        return None
    # Not by the constant, which is rounded to the weight's type.
    value = func(*(t if w is None else of for t, w in zip(args, by_place, strict=True)))
    if value.shape != of.shape or value.dtype != of.dtype:
        return None
    return Transformed(weight, value, partial(_times, constant, internals.version_of(constant)))


def _times(constant: Tensor, version: int, factor: Factor) -> Factor:
    _refuse_changes(constant, version, "multiplies", "multiply by")
    return Scaled(factor, constant)


def mask(
    func: Callable[..., Any], args: Any, kwargs: Any, weight_of: Callable[[Tensor], Weight | None]
) -> Weight | None:
    """Returns a weight of which a constant replaces entries by a number, lazily; None for other calls."""
    if func not in _MASKS or kwargs or len(args) != 3 or isinstance(args[2], Tensor):
        return None
    at, keeps = _MASKS[func]
    masked, constant = args[at], args[1 - at]
    if not all(isinstance(t, Tensor) for t in (masked, constant)):
        return None
    weight = weight_of(masked)
    is_fit = constant.dtype is torch.bool and not constant.is_inference()
    if weight is None or not is_fit or is_sharded(weight.value):
        return None
    given = weight.value, constant
    value = func(given[at], given[1 - at], args[2])
    if value.shape != masked.shape or value.dtype != masked.dtype:
        return None
    version = internals.version_of(constant)
    return Transformed(weight, value, partial(_unmasked, constant, version, keeps))


def _unmasked(constant: Tensor, version: int, keeps: bool, factor: Factor) -> Factor:
    _refuse_changes(constant, version, "masks", "mask by")
    g = factor.materialize(wide(factor.dtype))
    # Not a product: replaced entries get zero even where the gradient is not finite.
    return Dense(g.where(constant, 0) if keeps else g.masked_fill(constant, 0))


def _refuse_changes(constant: Tensor, version: int, does: str, instead: str) -> None:
    if internals.version_of(constant) != version:
        raise PergradError(
            f"a constant of shape {tuple(constant.shape)} that {does} a weight was changed in place "
            f"before the backward pass: {instead} a copy of it"
        )


def _is_mt(value: Tensor, of: Tensor) -> bool:
    """Whether `value` is `of.mT`."""
    if of.dim() < 2 or value.stride() == of.stride():
        return False
    return value.shape == of.mT.shape and value.stride() == of.mT.stride()


def _order(func: Callable[..., Any], of: Tensor, args: Any, kwargs: Any) -> tuple[int, ...]:
    """Returns where each dimension of a tensor is after a permutation, read off from strides."""
    strides = range(1, of.dim() + 1)
    marked = torch.empty_strided(of.shape, tuple(strides), device="meta")
    return tuple(func(marked, *args[1:], **kwargs).stride().index(k) for k in strides)


def _permuted(order: tuple[int, ...], factor: Factor) -> Factor:
    return Rearranged(factor, order)


def _reshaped(sizes: tuple[int, ...], factor: Factor) -> Factor:
    return Rearranged(factor, sizes=sizes)


def _transposed(factor: Factor) -> Factor:
    return factor.transposed()


def _unchanged(factor: Factor) -> Factor:
    """Returns the factor: its receiver casts the gradient to its own dtype."""
    return factor


def explicit_cast(func: Callable[..., Any], args: Any, kwargs: Any) -> Callable[[], Tensor] | None:
    """Returns `w.to(x)` as a call of `w.to(x.device, x.dtype)`, without x's samples; None for other calls."""
    if name_of(func) not in ("to", "type_as"):
        return None
    t, *given = args
    rest = dict(kwargs)
    other = given.pop(0) if given else rest.pop("tensor", rest.pop("other", None))
    if not isinstance(other, Tensor):
        return None
    return lambda: t.to(other.device, other.dtype, *given, **rest)


def derive(
    func: Callable[..., Any], args: Any, kwargs: Any, weight_of: Callable[[Tensor], Weight | None]
) -> tuple[Any, Mapping[int, Weight]]:
    """Runs the function under autograd; returns its result, and its tensors' weights by id."""
    leaves: dict[int, Tensor] = {}
    parents: list[Weight] = []
    others: dict[int, tuple[Tensor, Tensor]] = {}  # tensors that are no weights, and their leaves

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        weight = weight_of(value)
        if weight is None:
            if not value.requires_grad:
                return value
            if id(value) not in others:
                others[id(value)] = value, value.detach().requires_grad_()
            return others[id(value)][1]
        if id(value) not in leaves:
            leaves[id(value)] = weight.value.detach().requires_grad_()
            parents.append(weight)
        return leaves[id(value)]

    args, kwargs = map_parts(leaf, (args, kwargs))
    with torch.enable_grad(), graph_of_its_own():
        result = func(*args, **kwargs)
    own = [t for t in parts_of(result) if isinstance(t, Tensor) and t.requires_grad]
    by_leaf = {id(leaf): parent for leaf, parent in zip(leaves.values(), parents, strict=True)}
    found: dict[int, Weight] = {id(t): by_leaf[id(t)] for t in own if id(t) in by_leaf}
    new = [t for t in own if id(t) not in found]
    if new:
        roots = tuple(dict.fromkeys(root for p in parents for root in p.roots))
        first = parents[0]
        values = [*leaves.values(), *(own for _, own in others.values())]
        carriers = carriers_of(new, values, parents, [given for given, _ in others.values()])
        for t, carrier in zip(new, carriers, strict=True):
            weight = Derived(first.scope, roots, t, first.uses, first.sink, carrier)
            base = internals.base_of(t)
            if base is not None and id(base) in by_leaf:
                weight.view(by_leaf[id(base)])
            elif base is not None and sum(internals.base_of(other) is base for other in new) > 1:
                weight.view(first)  # several results share a tensor that nobody else has
            found[id(t)] = weight
        if any(p.keeps_gradient for p in parents):
            operands = attached_results(new, list(leaves.values()), [p.operand for p in parents])
            for t, operand in zip(new, operands, strict=True):
                found[id(t)].operand = operand
    return result, found
