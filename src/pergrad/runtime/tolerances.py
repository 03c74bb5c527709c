"""Defines tolerances per dtype, and the distance between two computations of the same numbers.

Distances are relative to the largest element: sums in another order differ by the rounding of their largest
terms, in every element.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "extremes",
    "largest",
    "largest_difference",
    "largest_differences",
    "largest_of_each",
    "noise_floor",
    "read_extremes",
    "relative_error",
    "tolerance_of_model",
    "tolerance_of_rerun",
    "tolerance_of_rule",
]


class _Tolerances(NamedTuple):
    rule: float  # one function: its rule against one backward per sample
    model: float  # a whole model: a recorded batch against single samples


_TOLERANCES = {
    torch.float64: _Tolerances(rule=1e-9, model=1e-7),
    torch.float32: _Tolerances(rule=1e-4, model=2e-3),
    torch.bfloat16: _Tolerances(rule=3e-2, model=0.1),
    torch.float16: _Tolerances(rule=1e-2, model=0.05),
}
_MODEL_OF_OTHER_TYPES = 1e-2

# A gradient below this many roundings of the model's largest one is noise. That of the bias of attention keys
# is: zero up to rounding, since a softmax ignores shifts. In half precision that would be all gradients.
_NOISE, _MOST_NOISE = 1e4, 0.1


def tolerance_of_rule(dtype: torch.dtype) -> float:
    """Returns the allowed distance of a rule's gradients from those of one backward per sample."""
    return _TOLERANCES[dtype].rule


def tolerance_of_model(*dtypes: torch.dtype) -> float:
    """Returns the allowed distance of a model's recorded gradients, computed in all of these dtypes."""
    return max(
        _TOLERANCES[dtype].model if dtype in _TOLERANCES else _MODEL_OF_OTHER_TYPES
        for dtype in dtypes
    )


def tolerance_of_rerun(dtype: torch.dtype) -> float:
    """Returns √ε, the allowed distance of a function's outputs, plain and under vmap."""
    return torch.finfo(dtype).eps ** 0.5


def largest(t: Tensor) -> float:
    """Returns max |t|, and 0 for a tensor without elements; NaN if any element is."""
    return largest_of_each([t])[0]


def largest_of_each(tensors: Iterable[Tensor]) -> list[float]:
    """Returns max |t| of each tensor; numbers of one device and dtype are read at once."""
    return read_extremes([extremes(t) for t in tensors])


_FEW = 2**15  # elements, of which one pass takes less time than another call
_CACHED = 2**20  # elements, of which a second pass reads most from the processor's cache
_PIECE = 2**16  # elements: their difference stays in the processor's cache


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Returns max |a - b| of two tensors of one shape; NaN if any element is.

    >>> largest_difference(torch.tensor([1.0, 5.0]), torch.tensor([2.0, 3.0]))
    2.0
    """
    return largest_differences([(a, b)])[0]


def largest_differences(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """Returns max |a - b| of each pair; numbers of one device and dtype are read at once.

    Pieces of large tensors on a CPU are compared one after another in the same memory, since a difference of
    full size would be written to fresh memory and read again.
    """
    memory: dict[torch.dtype, Tensor] = {}
    return read_extremes(
        [_extremes_of_difference(a.detach(), b.detach(), memory) for a, b in pairs]
    )


def extremes(t: Tensor) -> list[Tensor]:
    """Returns numbers of which one is max |t|, up to its sign; none if there are no elements."""
    if not t.numel():
        return []
    if t.is_complex():
        return [t.detach().abs().max()]
    t = t.detach()
    if t.is_cpu and _FEW < t.numel() <= _CACHED:
        return [t.amin(), t.amax()]  # two thirds of the time of `aminmax`
    return list(torch.aminmax(t))  # one pass, and nothing is written


def _extremes_of_difference(
    a: Tensor, b: Tensor, memory: dict[torch.dtype, Tensor]
) -> list[Tensor]:
    is_alike = a.dtype is b.dtype and a.is_cpu and b.is_cpu
    if a.numel() <= _PIECE or not is_alike or not (a.is_contiguous() and b.is_contiguous()):
        return extremes(a - b)
    if a.dtype not in memory:
        memory[a.dtype] = a.new_empty(_PIECE)
    pieces = zip(a.view(-1).split(_PIECE), b.view(-1).split(_PIECE), strict=True)
    return [
        number
        for of_a, of_b in pieces
        for number in extremes(torch.sub(of_a, of_b, out=memory[a.dtype][: len(of_a)]))
    ]


def read_extremes(numbers: Sequence[Sequence[Tensor]]) -> list[float]:
    """Returns the largest absolute value of each list, 0 if it is empty; NaN if any is."""
    every = [number for some in numbers for number in some]
    is_one_kind = len({(number.device, number.dtype) for number in every}) == 1
    values = iter(torch.stack(every).tolist() if is_one_kind else [n.item() for n in every])
    found = []
    for some in numbers:
        sizes = [abs(next(values)) for _ in some]
        found.append(sum(sizes) if any(map(isnan, sizes)) else max(sizes, default=0.0))
    return found


def noise_floor(grads: Mapping[str, Tensor]) -> float:
    """Returns the size below which a gradient of this model is rounding noise."""
    precision = max(torch.finfo(g.dtype).eps for g in grads.values())
    share = min(_NOISE * precision, _MOST_NOISE)
    return share * max(largest_of_each(grads.values()), default=0.0)


def relative_error(actual: Tensor, expected: Tensor, floor: float) -> float:
    """Computes max |actual - expected| / max(max |expected|, floor)."""
    scale = max(largest(expected), floor)
    return largest(actual - expected) / scale if scale and expected.numel() else 0.0
