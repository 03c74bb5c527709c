"""Computes the coefficients of banded matrix factorization (BandMF, Choquette-Choo et al., 2023)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pergrad.runtime.caches import cached

__all__ = ["coefficients", "error_of"]

_ITERATIONS = 200
_LONGEST = 4096  # steps over which coefficients are optimised


@cached("coefficients of banded matrices, by bands and steps", most=64)
def coefficients(bands: int, steps: int) -> tuple[float, ...]:
    """Returns the diagonals of the lower triangular Toeplitz matrix C, of unit columns.

    They minimise the error of all partial sums of the noise, |A C⁻¹|, starting from the banded square root
    of the matrix A of partial sums.
    """
    length = min(steps, _LONGEST)
    start = [1.0]
    for k in range(1, bands):
        start.append(start[-1] * (2 * k - 1) / (2 * k))  # of (1 - x)^(-1/2)
    free = torch.tensor(start, dtype=torch.float64)
    free.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [free], max_iter=_ITERATIONS, line_search_fn="strong_wolfe", tolerance_change=1e-12
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = _error(free / free.norm(), length).log()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    best = free.detach() / free.detach().norm()
    plain = torch.tensor(start, dtype=torch.float64)
    plain /= plain.norm()
    if not best.isfinite().all() or _error(best, length) > _error(plain, length):
        best = plain
    return tuple(best.tolist())


def _error(c: Tensor, steps: int) -> Tensor:
    """Returns |A C⁻¹|²: the noise of all partial sums, added up, for unit noise."""
    size = 1 << (2 * steps).bit_length()
    padded = torch.zeros(size, dtype=c.dtype)
    padded = torch.cat([c, padded[len(c) :]])
    row = _reciprocal(padded[:steps])  # of C⁻¹
    sums = row.cumsum(0)  # of A C⁻¹
    weights = torch.arange(steps, 0, -1, dtype=c.dtype)
    return (sums.square() * weights).sum()


def _reciprocal(c: Tensor) -> Tensor:
    """Returns the power series 1 / c, by Newton's iteration."""
    steps = len(c)
    inverse = (1 / c[:1]).clone()
    while len(inverse) < steps:
        length = min(2 * len(inverse), steps)
        product = _product(c[:length], inverse, length)
        two = torch.zeros(length, dtype=c.dtype)
        two[0] = 2
        inverse = _product(two - product, inverse, length)
    return inverse


def _product(a: Tensor, b: Tensor, length: int) -> Tensor:
    size = 1 << (len(a) + len(b)).bit_length()
    product: Tensor = torch.fft.irfft(torch.fft.rfft(a, size) * torch.fft.rfft(b, size), size)
    return product[:length]


def error_of(c: tuple[float, ...], steps: int) -> float:
    """Returns the root mean square noise of a partial sum over `steps` steps, for unit noise."""
    return math.sqrt(float(_error(torch.tensor(c, dtype=torch.float64), steps)) / steps)
