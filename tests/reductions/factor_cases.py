"""Factors of one weight, of every kind and several at a time, with their dense gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pergrad.factors import (
    ByOwner,
    Convolution,
    Dense,
    ElementProduct,
    Factor,
    NormalizedProduct,
    OuterProduct,
    PositionSum,
    Rearranged,
    RowSum,
    Scaled,
    Stacked,
    joined,
)

__all__ = [
    "BOUNDS",
    "CASES",
    "EACH",
    "N",
    "cast",
    "data",
    "dense_of",
    "factors_of",
    "with_bad_sample",
]

N = 4  # samples
BOUNDS = [1, 300, 2**20]  # bytes: a row at a time, a few, everything at once

Uses = list[Factor]


def data(*shape: int, seed: int = 0) -> Tensor:
    """Fixed numbers, of about unit size, for a shape."""
    random = torch.Generator().manual_seed(seed + sum(d * 31**k for k, d in enumerate(shape)))
    return torch.randn(shape, generator=random, dtype=torch.float64)


def outer(n: int, t: int, o: int = 6, i: int = 5, seed: int = 0) -> OuterProduct:
    return OuterProduct(data(n, t, o, seed=seed), data(n, t, i, seed=seed + 1))


def rows(n: int, t: int, table: int = 6, width: int = 5, seed: int = 0) -> RowSum:
    """Rows are met repeatedly by the same sample."""
    random = torch.Generator().manual_seed(seed)
    index = torch.randint(table, (n, t), generator=random)
    if t > 2:
        index[:, 2] = index[:, 0]
    return RowSum(index, data(n, t, width, seed=seed), table)


def convolution(
    n: int,
    space: tuple[int, ...],
    taps: tuple[int, ...],
    *,
    rows: int = 1,
    channels: int = 2,
    outputs: int = 3,
    groups: int = 1,
    stride: int = 1,
    padding: tuple[int, int] = (0, 0),
    dilation: int = 1,
    shorter: int = 0,
    seed: int = 0,
) -> Convolution:
    """`channels` and `outputs` are those of a group; `shorter` drops the last outputs."""
    dims = len(space)
    out = [
        (s + sum(padding) - dilation * (k - 1) - 1) // stride + 1 - shorter
        for s, k in zip(space, taps, strict=True)
    ]
    return Convolution(
        data(n, rows, groups * outputs, *out, seed=seed),
        data(n, rows, groups * channels, *space, seed=seed + 1),
        (groups * outputs, channels, *taps),
        (stride,) * dims,
        (padding,) * dims,
        (dilation,) * dims,
        groups,
    )


def normalized(n: int, t: int, *shape: int, groups: int | None = None) -> NormalizedProduct:
    each = (n, t, 1) if groups is None else (n, 1, groups)
    statistics = data(*each, seed=2), data(*each, seed=3)
    return NormalizedProduct(data(n, t, *shape), data(n, t, *shape, seed=1), *statistics)


def by_owner(of: Callable[[int], Factor]) -> Uses:
    """Seven rows of samples 0, 1 and 3, in no order; sample 2 has none."""
    return [ByOwner(of(7), torch.tensor([3, 0, 3, 1, 3, 0, 1]), N)]


_VECTORS: dict[str, Callable[[], Uses]] = {
    "scalar": lambda: [Dense(data(N))],
    "scalar by position": lambda: [PositionSum(data(N, 3))],
    "scalar by element": lambda: [ElementProduct(data(N, 3), data(N, 3, seed=1))],
    "scalar, several": lambda: [Dense(data(N)), PositionSum(data(N, 3))],
    "vector": lambda: [Dense(data(N, 5))],
    "vector by position": lambda: [PositionSum(data(N, 3, 5))],
    "vector by no position": lambda: [PositionSum(data(N, 0, 5))],
    "vector by element": lambda: [ElementProduct(data(N, 3, 5), data(N, 3, 5, seed=1))],
    "vector, normalized": lambda: [normalized(N, 3, 5)],
    "vector, normalized in groups": lambda: [normalized(N, 3, 6, groups=2)],
    "vector, normalized as a whole": lambda: [normalized(N, 3, 5, groups=1)],
    "vector, several": lambda: [
        PositionSum(data(N, 3, 5)),
        ElementProduct(data(N, 2, 5), data(N, 2, 5, seed=1)),
        Dense(data(N, 5)),
    ],
}
_MATRICES: dict[str, Callable[[], Uses]] = {
    "dense": lambda: [Dense(data(N, 6, 5))],
    "one column": lambda: [Dense(data(N, 6, 1))],
    "one row": lambda: [outer(N, 2, 1, 5)],
    "no position": lambda: [outer(N, 0)],
    "one position": lambda: [outer(N, 1)],
    "two positions": lambda: [outer(N, 2)],
    "many positions": lambda: [outer(N, 9)],
    "wide, few positions": lambda: [outer(N, 2, 12, 14)],
    "matrix by position": lambda: [PositionSum(data(N, 2, 6, 5))],
    "matrix by element": lambda: [ElementProduct(data(N, 2, 6, 5), data(N, 2, 6, 5, seed=1))],
    "matrix, normalized": lambda: [normalized(N, 2, 6, 5)],
    "rows": lambda: [rows(N, 5)],
    "one look-up": lambda: [rows(N, 1)],
    "no look-up": lambda: [rows(N, 0)],
    "two uses": lambda: [outer(N, 2), outer(N, 3, seed=5)],
    "one position twice": lambda: [outer(N, 1), outer(N, 1, seed=5)],
    "two tables": lambda: [rows(N, 2), rows(N, 3, seed=5)],
    "tied": lambda: [rows(N, 5), outer(N, 2)],
    "tied, no look-up": lambda: [rows(N, 0), outer(N, 2)],
    "tied, no position": lambda: [outer(N, 0), rows(N, 3)],
    "tied, wide": lambda: [outer(N, 2, 30, 20), rows(N, 3, 30, 20)],
    "tied and dense": lambda: [rows(N, 4), Dense(data(N, 6, 5)), outer(N, 3)],
}
_OWNED: dict[str, Callable[[], Uses]] = {
    "owned scalar": lambda: by_owner(lambda n: Dense(data(n))),
    "owned positions": lambda: by_owner(lambda n: PositionSum(data(n, 2, 5))),
    "owned elements": lambda: by_owner(
        lambda n: ElementProduct(data(n, 2, 6, 5), data(n, 2, 6, 5, seed=1))
    ),
    "owned normalized": lambda: by_owner(lambda n: normalized(n, 2, 6, 5)),
    "owned products": lambda: by_owner(lambda n: outer(n, 2)),
    "owned single products": lambda: by_owner(lambda n: outer(n, 1, 14, 12)),
    "owned rows": lambda: by_owner(lambda n: rows(n, 2)),
    "owned convolution": lambda: by_owner(lambda n: convolution(n, (6,), (3,))),
    "owned and own": lambda: [*by_owner(lambda n: outer(n, 1)), outer(N, 2, seed=5)],
    "tied by owner": lambda: [*by_owner(lambda n: rows(n, 2)), *by_owner(lambda n: outer(n, 2))],
    "no owner": lambda: [ByOwner(outer(0, 2), torch.empty(0, dtype=torch.long), N)],
}


def stack(t: int, count: int = 3, *, is_owned: bool = False) -> Stacked:
    """Rows of the samples' matrices side by side, or in any order."""
    if not is_owned:
        return Stacked(outer(N * count, t), count)
    random = torch.Generator().manual_seed(0)
    owner = torch.randint(N * count, (t,), generator=random)
    return Stacked(ByOwner(outer(t, 1), owner, N * count), count)


_STACKS: dict[str, Callable[[], Uses]] = {
    "stack": lambda: [stack(2)],
    "stack of many positions": lambda: [stack(9)],
    "stack of one": lambda: [stack(2, 1)],
    "owned stack": lambda: [stack(17, is_owned=True)],
    "stack, no row": lambda: [stack(0, is_owned=True)],
    "two stacks": lambda: [stack(2), stack(17, is_owned=True)],
    "stack and dense": lambda: [stack(17, is_owned=True), Dense(data(N, 3, 6, 5))],
}
_CONVOLUTIONS: dict[str, Callable[[], Uses]] = {
    "1d": lambda: [convolution(N, (8,), (3,), stride=2, padding=(1, 1))],
    "1d, few positions": lambda: [convolution(N, (4,), (3,), channels=4, outputs=8)],
    "1d, padded on one side": lambda: [convolution(N, (6,), (2,), padding=(1, 0))],
    "1d, causal in groups": lambda: [
        convolution(N, (6,), (3,), channels=1, outputs=1, groups=4, padding=(2, 0))
    ],
    "2d": lambda: [convolution(N, (5, 4), (3, 2), padding=(1, 1))],
    "2d, dilated": lambda: [convolution(N, (7, 6), (2, 2), dilation=2, stride=2)],
    "2d, not all of the input": lambda: [convolution(N, (8, 7), (2, 3), stride=3)],
    "2d, shorter output": lambda: [convolution(N, (5, 5), (2, 2), shorter=1)],
    "2d, in groups": lambda: [convolution(N, (4, 4), (2, 2), groups=3, outputs=2)],
    "2d, in groups, few positions": lambda: [
        convolution(N, (2, 3), (2, 2), groups=2, channels=4, outputs=8)
    ],
    "2d, depthwise": lambda: [
        convolution(N, (4, 4), (3, 3), groups=4, channels=1, outputs=1, padding=(1, 1))
    ],
    "2d, several rows": lambda: [convolution(N, (4, 4), (2, 2), rows=3)],
    "2d, one tap": lambda: [convolution(N, (3, 3), (1, 1), channels=4, outputs=8)],
    "2d, wide": lambda: [convolution(N, (6, 6), (2, 2), channels=16, outputs=2)],
    "3d": lambda: [convolution(N, (3, 4, 3), (2, 2, 2), stride=2, padding=(1, 1))],
    "two alike": lambda: [
        convolution(N, (5,), (3,)),
        convolution(N, (5,), (3,), seed=5),
    ],
    "two of other sizes": lambda: [
        convolution(N, (5,), (3,)),
        convolution(N, (7,), (3,), stride=2, seed=5),
    ],
    "convolution and dense": lambda: [convolution(N, (5,), (3,)), Dense(data(N, 3, 2, 3))],
}
_REARRANGED: dict[str, Callable[[], Uses]] = {
    "reshaped products": lambda: [Rearranged(outer(N, 3), sizes=(3, 2, 5))],
    "products with another first dimension": lambda: [Rearranged(outer(N, 3), sizes=(6, 5, 1))],
    "flattened products of one position": lambda: [Rearranged(outer(N, 1), sizes=(30,))],
    "reshaped, then permuted": lambda: [
        Rearranged(Rearranged(outer(N, 3), sizes=(3, 2, 5)), (2, 0, 1))
    ],
    "permuted stack": lambda: [Rearranged(stack(2), (1, 2, 0))],
    "reshaped convolution": lambda: [Rearranged(convolution(N, (5, 4), (3, 2)), sizes=(3, 12))],
    "a scalar of a vector": lambda: [Rearranged(PositionSum(data(N, 3, 1)), sizes=())],
    "products times a mask": lambda: [Scaled(outer(N, 3), data(6, 5, seed=7))],
    "a product times a mask": lambda: [Scaled(outer(N, 1), data(6, 5, seed=7))],
    "products times a column": lambda: [Scaled(outer(N, 3), data(6, 1, seed=7))],
    "products times a number": lambda: [Scaled(outer(N, 3), torch.tensor(-1.5))],
    "permuted, times a row": lambda: [Scaled(Rearranged(outer(N, 3), (1, 0)), data(6, seed=7))],
    "owned, permuted": lambda: [
        Rearranged(ByOwner(outer(7, 2), torch.tensor([3, 0, 3, 1, 3, 0, 1]), N), (1, 0))
    ],
    "reshaped alike": lambda: [
        Rearranged(outer(N, 2), sizes=(5, 6)),
        Rearranged(outer(N, 3, seed=5), sizes=(5, 6)),
    ],
    "reshaped from other shapes": lambda: [
        Rearranged(PositionSum(data(N, 3, 5, 1)), sizes=(5,)),
        Rearranged(PositionSum(data(N, 3, 1, 5)), sizes=(5,)),
    ],
    "reshaped and permuted": lambda: [
        Rearranged(outer(N, 2), sizes=(5, 6)),
        Rearranged(outer(N, 3, seed=5), (1, 0)),
        outer(N, 1, 5, 6),
    ],
}
CASES = {**_REARRANGED, **_VECTORS, **_MATRICES, **_OWNED, **_STACKS, **_CONVOLUTIONS}

# One use of each kind, for what is checked factor by factor.
EACH = {
    name: of for name, of in CASES.items() if len(of()) == 1 and not isinstance(of()[0], ByOwner)
}


def factors_of(name: str) -> Uses:
    """The uses as a reduction gets them."""
    return joined(CASES[name]())


def dense_of(factors: Sequence[Factor]) -> Tensor:
    """Their gradients in float64, each factor's by itself: (n, *weight)."""
    exact = [f.materialize(torch.float64) for f in cast(factors, torch.float64)]
    return torch.stack(exact).sum(0)


def cast(factors: Sequence[Factor], dtype: torch.dtype) -> Uses:
    """The same factors in another type."""

    def one(factor: Factor) -> Factor:
        if isinstance(factor, ByOwner):
            return ByOwner(one(factor.each), factor.owner, factor.samples)
        if isinstance(factor, Rearranged):
            return Rearranged(one(factor.each), factor.order, factor.sizes)
        if isinstance(factor, Scaled):
            return Scaled(one(factor.each), factor.constant)
        if isinstance(factor, Stacked):
            return Stacked(one(factor.each), factor.count)
        found: Factor = factor.mapped(lambda t: t.to(dtype) if t.is_floating_point() else t)
        return found

    return [one(f) for f in factors]


def with_bad_sample(factors: Sequence[Factor], sample: int, value: float) -> Uses:
    """The same factors, with `value` in the gradients that flow back to one sample."""

    def one(factor: Factor, samples: Tensor) -> Factor:
        if isinstance(factor, Rearranged):
            return Rearranged(one(factor.each, samples), factor.order, factor.sizes)
        if isinstance(factor, Scaled):
            return Scaled(one(factor.each, samples), factor.constant)
        if isinstance(factor, Stacked):
            of_sample = samples.unsqueeze(1) * factor.count + torch.arange(factor.count)
            return Stacked(one(factor.each, of_sample.flatten()), factor.count)
        if isinstance(factor, ByOwner):
            rows = torch.isin(factor.owner, samples).nonzero().flatten()
            return ByOwner(changed(factor.each, rows), factor.owner, factor.samples)
        return changed(factor, samples)

    def changed(factor: Factor, rows: Tensor) -> Factor:
        name = "gradients" if isinstance(factor, Dense) else "grad_output"
        bad = getattr(factor, name).clone()
        bad[rows] = value
        tensors = factor._tensors()
        new = iter([bad if key == name else t for key, t in tensors.items()])
        found: Factor = factor.mapped(lambda _: next(new))
        return found

    return [one(f, torch.tensor([sample])) for f in factors]
