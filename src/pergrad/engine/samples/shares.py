"""Finds numbers that the terms of a sum over the samples were divided by before they are added up.

`(losses / B).sum()` is a mean that was written by hand. Autograd's graph knows the factor, even where B is a
plain number. It is walked back from the sum, through functions that keep the terms, to the last uses of
weights or the outputs of the module. A factor on some of the terms is part of the loss; one on all is a
share if it is exactly one over the number of samples, of the terms, or of the terms that a mask keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isclose, prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Counted, Scope
from pergrad.engine.samples.origins import SUM, Origin, untold
from pergrad.engine.samples.proving import is_source, sources_of
from pergrad.runtime import internals, is_traced

__all__ = [
    "AVERAGED",
    "PASSING",
    "Share",
    "divided",
    "metadata_of",
    "note_output",
    "origin_of_one",
    "share_of_weights",
    "shares_of_terms",
]

# Notes in the metadata of an autograd node: the size or the count over the batch that it divides by, and
# whether the module returned its result.
AVERAGED = "pergrad: divided by a number of the batch"
_OUTPUT = "pergrad: an output of the module"

Edge: TypeAlias = tuple[Any, int]  # an autograd node and the number of its output

_QUOTIENT, _PRODUCT = "DivBackward0", "MulBackward0"
_SUMS = frozenset(["SumBackward0", "SumBackward1"])
_MEANS = frozenset(["MeanBackward0", "MeanBackward1"])
_WEIGHTED = frozenset(["BinaryCrossEntropyBackward0", "BinaryCrossEntropyWithLogitsBackward0"])
# Nodes with one or more arguments, whose result is a sum or a choice of elements of them.
_ADDING = frozenset(
    """
    AddBackward0 SubBackward0 RsubBackward1 StackBackward0 CatBackward0 WhereBackward0 IndexAddBackward0
    ScatterAddBackward0 MaximumBackward0 MinimumBackward0
    """.split()
)
# Nodes f of one tensor, and data, with f(c x) = c f(x) for c > 0: a factor on all terms stays one.
_MOVING = frozenset(
    """
    NegBackward0 ToCopyBackward0 ViewBackward0 UnsafeViewBackward0 ReshapeAliasBackward0
    AsStridedBackward0 UnsqueezeBackward0 SqueezeBackward0 SqueezeBackward1 SqueezeBackward2
    SqueezeBackward3 SqueezeBackward4 CloneBackward0 AliasBackward0 TransposeBackward0 PermuteBackward0
    TBackward0 SelectBackward0 SliceBackward0 IndexBackward0 MaskedFillBackward0 NansumBackward0
    ExpandBackward0 RepeatBackward0 FlipBackward0 RollBackward0 UnbindBackward0 SplitBackward0
    SplitWithSizesBackward0 GatherBackward0 IndexSelectBackward0 TakeBackward0 MaskedSelectBackward0
    DiagonalBackward0 TrilBackward0 TriuBackward0 UnfoldBackward0 ConstantPadNdBackward0 CumsumBackward0
    SortBackward0 TopkBackward0 MaxBackward0 MaxBackward1 MinBackward0 MinBackward1 AmaxBackward0
    AminBackward0 MedianBackward0 MedianBackward1 LinalgVectorNormBackward0 AbsBackward0 ReluBackward0
    LeakyReluBackward0 ClampBackward1 ClampMinBackward0 ClampMaxBackward0 MvBackward0 MmBackward0
    BmmBackward0 DotBackward0 VdotBackward0
    """.split()
)
# Autograd nodes that may have factors of terms behind them: the answer for their sum holds for one call only.
PASSING = frozenset([_QUOTIENT, _PRODUCT]) | _SUMS | _MEANS | _WEIGHTED | _ADDING | _MOVING


@dataclass(frozen=True)
class Share:
    """A number that all terms of a sum were divided by."""

    number: float = 1.0
    is_of_weights: bool = False  # whether the terms have weights that add up to one
    counted: Counted | None = None  # the count over the batch that it is
    is_own: bool = (
        False  # whether it is the number of each sample's positions, or an exponent, as well
    )


@dataclass(frozen=True)
class _Term:
    """The way from the sum to a node: the factor so far, and the numbers that are suspicious below it."""

    edge: Edge
    factor: float
    counts: frozenset[int]
    elements: int
    is_averaged: bool = False  # whether the sum is a mean

    def on(self, edge: Edge, number: float = 1.0) -> _Term:
        return replace(self, edge=edge, factor=self.factor * number)


def metadata_of(node: Any) -> dict[str, Any]:
    """Returns the notes of an autograd node."""
    found: dict[str, Any] = node.metadata  # typed as a method
    return found


def note_output(t: Tensor) -> None:
    """Notes that the module has returned a tensor: what it divides by inside is its own matter."""
    node = t.grad_fn
    if type(node).__name__ in PASSING:
        metadata_of(node)[_OUTPUT] = True


def shares_of_terms(t: Tensor, scope: Scope, *, is_averaged: bool = False) -> list[Share]:
    """Returns what the terms of a sum over the elements of `t` were divided by; nothing if one was not.

    Those of a mean may have been divided by a count over the batch, or have weights of mean one.
    """
    start = t.grad_fn, t.output_nr
    if scope.count == 1 or type(start[0]).__name__ not in PASSING or not scope.tells_reduction:
        return []
    may_read = not scope.takes_losses and not is_traced(t) and not _is_packed(t, scope)
    counts = frozenset([] if is_averaged else [scope.count, t.numel()]) - {1}
    todo = [_Term(start, 1.0, counts, t.numel(), is_averaged)]
    seen: set[_Term] = set()
    found: list[Share] = []
    while todo:
        term = todo.pop()
        if term in seen:
            continue
        seen.add(term)
        further = _step(term, scope, may_read=may_read)
        if isinstance(further, Share):
            found.append(further)
        elif not further:
            return []  # a term without a share
        else:
            todo += further
    return found


def origin_of_one(t: Tensor, scope: Scope) -> Origin:
    """Returns the origin of a scalar of one sample as a term of a sum over the samples."""
    shares = shares_of_terms(t, scope)
    if not shares:
        return SUM
    if any(share.counted is not None for share in shares):
        return untold("the loss of each sample is divided by a sum over the batch")
    return divided(shares, "its terms are")


def divided(shares: Sequence[Share], what: str) -> Origin:
    """Returns the origin of a sum of terms that were divided before."""
    number = min((share.number for share in shares if not share.is_own), default=1.0)
    return SUM.divided(number, f"{what} each divided by {number:g} before")


def _is_packed(t: Tensor, scope: Scope) -> bool:
    """Whether reading the tensors that nodes behind `t` have saved would run a checkpoint again."""
    hooks = internals.top_saved_tensors_hooks(False)
    if hooks is not None:  # other hooks may move saved tensors, which can be read
        return bool(hooks[0].__module__ == "torch.utils.checkpoint")
    return sources_of(t, scope)[1]


def _step(term: _Term, scope: Scope, *, may_read: bool) -> Share | list[_Term]:
    """Goes one node back: a share that was found, or the terms behind it; none where the way ends."""
    node, place = term.edge
    kind = type(node).__name__
    if kind not in PASSING:
        return []
    notes = metadata_of(node)
    if _OUTPUT in notes or is_source(node, place, scope):
        return []
    if AVERAGED in notes:
        by = notes[AVERAGED]
        if isinstance(by, Counted):
            return Share(counted=by)
        return Share(float(by))
    behind = [edge for edge in node.next_functions if edge[0] is not None]
    if kind in (_QUOTIENT, _PRODUCT) or kind in _WEIGHTED:
        if len(behind) != 1 or not may_read:
            return [term.on(edge) for edge in behind] if len(behind) == 1 else []
        return _scaled(term, kind, behind[0], scope)
    if kind in _SUMS:
        size = _positions(node)
        counts = (term.counts - {size}) | {term.elements * size}  # a mean of each may be over them
        return [replace(term.on(behind[0]), counts=counts, elements=term.elements * size)]
    if kind in _MEANS:
        return [replace(term.on(behind[0]), elements=term.elements * _positions(node))]
    alpha = getattr(node, internals.ALPHA, 1) if kind in _ADDING else 1
    if alpha == 1 or len(node.next_functions) != 2:
        return [term.on(edge) for edge in behind]
    first, second = node.next_functions  # a + alpha * b
    terms = [term.on(first), term.on(second, alpha)]
    if second[0] is not None and _share(terms[1], alpha, scope) and first[0] is None:
        return Share(1 / abs(alpha))
    return [term for term in terms if term.edge[0] is not None]


def _scaled(term: _Term, kind: str, edge: Edge, scope: Scope) -> Share | list[_Term]:
    """Goes back over a product or a quotient with data."""
    operands = internals.OPERANDS if kind not in _WEIGHTED else (internals.WEIGHT,)
    given = [getattr(term.edge[0], name, None) for name in operands]
    other = next((t for t in reversed(given) if t is not None), None)
    if other is None or is_traced(other):
        return [term.on(edge)] if kind not in _WEIGHTED else []
    number, counts = 1.0, term.counts
    if other.numel() == 1:
        if other.device.type == "cpu":
            number = float(other)
    elif kind != _QUOTIENT:
        weights = share_of_weights(
            other, scope, elements=term.elements, is_averaged=term.is_averaged
        )
        if weights is not None and weights.is_of_weights:
            return weights
        number, kept = _values(other)
        kept = 0 if term.is_averaged else kept
        counts |= {kept * term.elements // max(other.numel(), 1)} - {0, 1}
    if kind == _QUOTIENT:
        number = 1 / number if number else 1.0
    eps = torch.finfo(other.dtype).eps if other.is_floating_point() else 0.0
    further = replace(term.on(edge, number), counts=counts)
    share = _share(further, number, scope, max(4 * eps, 1e-9))
    return share or ([further] if kind not in _WEIGHTED else [])


def _share(term: _Term, number: float, scope: Scope, tolerance: float = 1e-9) -> Share | None:
    """Returns a share if the last factor of a term, or all of them together, are one over a count.

    A sum over as many positions as samples may be divided by them, and x ** 3 by three.
    """
    if term.is_averaged:
        return None  # what each term was divided by is part of it
    inner, exponent = _behind(term.edge)
    for factor in (number, term.factor):
        for count in {*term.counts, scope.count * inner} - {1}:
            if isclose(abs(factor) * count, 1.0, rel_tol=tolerance):
                return Share(float(count), is_own=count in (inner, exponent))
    return None


def _values(weights: Tensor) -> tuple[float, int]:
    """Returns the number that all weights are, or one; and how many of a mask's are set, or none."""
    values = weights.detach()
    first = values.reshape(-1)[0]
    if bool((values == first).all()):
        return float(first), 0
    is_mask = bool(((values == 0) | (values == 1)).all())
    return 1.0, int((values != 0).sum()) if is_mask else 0


def _positions(node: Any) -> int:
    """Returns how many elements each sum of a node adds up."""
    sizes, dims = getattr(node, internals.SIZES, ()), getattr(node, internals.DIMS, ())
    rank = len(sizes)
    # Dimensions are kept as unsigned numbers of 64 bits.
    kept = [d - (1 << 64) if d >= 1 << 63 else d for d in dims]
    return prod(int(sizes[d % rank]) for d in kept or range(rank)) if rank else 1


def _behind(edge: Edge) -> tuple[int, float]:
    """Returns over how many positions the terms behind an edge are sums, and of which power; else one."""
    node, size = edge[0], 1
    while node is not None and type(node).__name__ in _MOVING | _SUMS:
        size *= _positions(node) if type(node).__name__ in _SUMS else 1
        node = node.next_functions[0][0]
    if type(node).__name__ == "MseLossBackward0":
        return size, 2.0
    exponent = getattr(node, internals.EXPONENT, 1)
    return size, float(exponent) if isinstance(exponent, int | float) else 1.0


def share_of_weights(
    weights: Tensor, scope: Scope, *, elements: int | None = None, is_averaged: bool = False
) -> Share | None:
    """Returns the share of terms with such weights: they add up to one, or all are one over a count.

    Those of a mean are one on average, and not all the same.
    """
    count = scope.count
    if count == 1 or not scope.tells_reduction or is_traced(weights) or not weights.numel():
        return None
    values = weights.detach()
    number, kept = _values(values)
    is_full = not kept and values.numel() in (count, elements)  # a mask of one sample makes no mean
    if is_averaged:
        is_one = isclose(float(values.double().mean()), 1.0, rel_tol=1e-6)
        return Share(is_of_weights=True) if is_full and is_one and number != values.max() else None
    if is_full and isclose(float(values.double().sum()), 1.0, rel_tol=1e-6):
        return Share(is_of_weights=True)
    is_share = isclose(abs(number) * count, 1.0, rel_tol=1e-6)
    return Share(float(count)) if is_share else None
