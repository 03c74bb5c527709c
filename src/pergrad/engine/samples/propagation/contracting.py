"""Propagates layouts through matrix products and other contractions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Layout, Owners, Samples
from pergrad.engine.samples.propagation.pairing import attends_to_own, paired
from pergrad.engine.samples.propagation.table import Call, moves_declared, moves_samples
from pergrad.engine.samples.propagation.totals import origin_of_terms
from pergrad.rules.contraction import letters_of, terms_of
from pergrad.rules.samples import RowsTimesWeight

__all__: list[str] = []

SUMMED = -1  # a contracted dimension, which the output does not have


def _combined(call: Call, places: Sequence[tuple[Tensor, int | None]]) -> Layout | None:
    """Returns the output's layout, given the output dimension of each argument's samples.

    The dimension is SUMMED for a contraction over the samples and None if it is unknown.
    """
    seen: list[Samples | Owners] = []
    for t, place in places:
        layout = call.layout(t)
        if not isinstance(layout, Samples | Owners):
            continue
        if place is None:
            return None
        if place == SUMMED:
            is_vector = all(t.dim() == 1 for t in call.tensors)
            return (_total(call) if is_vector and not call.output.dim() else None) or call.mixed()
        seen.append(layout.at(place))
    return call.agreed(seen)


def _total(call: Call) -> Layout | None:
    """Returns the layout of a product that adds up terms of the samples, whose dimension all factors share.

    Each term has factors of one sample, and data: the product is a sum over the samples.
    """
    has_own = all(
        la.has_samples or not t.requires_grad
        for t, la in zip(call.tensors, call.layouts, strict=True)
    )
    is_common = call.agreed([la.at(0) for _, la in call.with_samples]).has_samples
    if not call.flows or not has_own or not is_common:
        return None
    call.reads_values = True  # of weights
    return call.total(origin_of_terms(call, *call.tensors, elements=call.tensors[0].numel()))


def _place(call: Call, t: Tensor) -> int:
    layout = call.layout(t)
    return layout.dim if isinstance(layout, Samples | Owners) else 0


def _matmul_places(call: Call, a: Tensor, b: Tensor) -> list[tuple[Tensor, int | None]]:
    """Returns the output dimension of each argument's samples, for a (..., m, k) times b (..., k, n)."""
    rank = call.output.dim()
    places: list[tuple[Tensor, int | None]] = []
    for t, contracted in ((a, a.dim() - 1), (b, max(b.dim() - 2, 0))):
        dim = _place(call, t)
        if dim == contracted:
            places.append((t, SUMMED))
        elif t is a:
            places.append((t, dim + rank - (a.dim() if b.dim() > 1 else a.dim() - 1)))
        elif dim == b.dim() - 1:
            places.append((t, rank - 1))
        else:
            places.append((t, dim + rank - (b.dim() if a.dim() > 1 else b.dim() - 1)))
    return places


@moves_samples("matmul", "mm", "bmm", "mv", "dot", "vdot", "inner")
def _matmul(call: Call) -> Layout | None:
    a = call.argument(0, "input", "self")
    b = call.argument(1, "other", "mat2", "vec", "tensor")
    if call.func.__name__ == "__rmatmul__":
        a, b = b, a
    if call.name == "inner" and (a.dim() != 1 or b.dim() != 1):
        return None
    pairs = paired(call, a, b)
    if pairs is not None:
        return pairs
    return _combined(call, _matmul_places(call, a, b))


@moves_samples("addmm", "baddbmm", "addmv")
def _addmm(call: Call) -> Layout | None:
    bias = call.argument(0, "input", "self")
    a = call.argument(1, "mat1", "batch1", "mat")
    b = call.argument(2, "mat2", "batch2", "vec")
    shift = call.output.dim() - bias.dim()
    places = _matmul_places(call, a, b)
    return _combined(call, [*places, (bias, _place(call, bias) + shift)])


@moves_samples("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
def _grouped_matmul(call: Call) -> Layout | None:
    """Keeps the rows: each is multiplied by the matrix of its group."""
    x, weight = (
        call.argument(0, "input", "self", "mat_a"),
        call.argument(1, "weight", "mat2", "mat_b"),
    )
    return _rows_stay(call, x, weight)


@moves_declared(RowsTimesWeight)
def _rows_times_weight(declared: RowsTimesWeight, call: Call) -> Layout | None:
    return _rows_stay(call, call.args[declared.input], call.args[declared.weight])


def _rows_stay(call: Call, x: Tensor, weight: Tensor) -> Layout | None:
    places: list[tuple[Tensor, int | None]] = [(x, 0 if _place(call, x) == 0 else SUMMED)]
    return _combined(call, [*places, (weight, SUMMED)])


@moves_samples("linear")
def _linear(call: Call) -> Layout | None:
    x, weight = call.argument(0, "input"), call.argument(1, "weight")
    place: int | None = _place(call, x)
    if place == x.dim() - 1:
        place = SUMMED
    if isinstance(call.layout(weight), Samples | Owners):
        out = call.output.dim() - 1
        return _combined(call, [(x, place), (weight, SUMMED if _place(call, weight) else out)])
    return _combined(call, [(x, place)])


@moves_samples("einsum")
def _einsum(call: Call) -> Layout | None:
    equation, *operands = call.args
    if not isinstance(equation, str):
        return None
    if len(operands) == 1 and isinstance(operands[0], Sequence):
        operands = list(operands[0])
    terms, right = terms_of(equation)
    places: list[tuple[Tensor, int | None]] = []
    output = letters_of(right, call.output.dim())
    of_samples = set()
    for term, t in zip(terms, operands, strict=True):
        letter = letters_of(term, t.dim())[_place(call, t)] if t.dim() else None
        places.append((t, output.index(letter) if letter in output else SUMMED))
        if isinstance(call.layout(t), Samples | Owners):
            of_samples.add(letter)
    if len(of_samples) == 1 and not of_samples & set(output):
        return _total(call) or call.mixed()
    return _combined(call, places)


@moves_samples("tensordot")
def _tensordot(call: Call) -> Layout | None:
    """Adds up terms of the samples, if their dimensions are contracted with each other; else unknown."""
    a, b, dims = call.argument(0, "a"), call.argument(1, "b"), call.argument(2, "dims", default=2)
    if isinstance(dims, int):
        dims = range(a.dim() - dims, a.dim()), range(dims)
    if len(call.args) > 3 and isinstance(call.args[3], Sequence):  # torch's body calls it with both
        dims = dims, call.args[3]
    if isinstance(dims, Tensor):
        return None
    pairs = [(i % a.dim(), k % b.dim()) for i, k in zip(*dims, strict=True)]
    own = {k for t, k in ((a, 0), (b, 1)) if isinstance(call.layout(t), Samples | Owners)}
    wanted = _place(call, a), _place(call, b)
    is_contracted = any(all(pair[k] == wanted[k] for k in own) for pair in pairs)
    return _total(call) if own and is_contracted else None


@moves_samples("scaled_dot_product_attention")
def _attention(call: Call) -> Layout | None:
    """Requires queries, keys and values to agree on a sample dimension before positions and features.

    The samples may be in the positions, too, if a mask keeps them apart.
    """
    packed = _packed_attention(call)
    if packed is not None:
        return packed
    places: list[tuple[Tensor, int | None]] = []
    for k, name in enumerate(("query", "key", "value")):
        t = call.argument(k, name)
        dim = _place(call, t)
        shift = call.output.dim() - t.dim()
        places.append((t, SUMMED if dim >= t.dim() - 2 else dim + shift))
    return _combined(call, places)


def _packed_attention(call: Call) -> Layout | None:
    """Returns the layout of attention over positions of several samples that a mask keeps apart, or None."""
    tensors = [call.argument(k, name) for k, name in enumerate(("query", "key", "value"))]
    layouts = [call.layout(t) for t in tensors]
    for t, layout in zip(tensors, layouts, strict=True):
        if not isinstance(layout, Samples | Owners) or layout.dim != t.dim() - 2:
            return None
    query, key, value = layouts
    assert isinstance(query, Samples | Owners)
    assert isinstance(key, Samples | Owners)
    assert isinstance(value, Samples | Owners)
    device = call.output.device
    if not torch.equal(key.owner_of_each(device), value.owner_of_each(device)):
        return None
    mask = call.argument(3, "attn_mask")
    if not attends_to_own(call, mask, query, key):
        return call.mixed(
            "lets rows attend to rows of other samples, since no mask keeps them apart"
        )
    call.layout(mask)
    return query.at(call.output.dim() - 2)
