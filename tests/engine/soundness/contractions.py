"""Class 3: products and other functions that combine the rows of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.engine.soundness.judge import Cases

__all__ = ["CASES"]

CASES = Cases()
A = torch.randn(4, 4, dtype=torch.float64)


@CASES.refused()
def sparse_mm(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.sparse.mm(A.to_sparse(), m.a(x)))


@CASES.refused()
def tensordot(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.tensordot(A, m.a(x), 1))


@CASES.refused()
def matmul(m: Any, x: Tensor) -> Tensor:
    return m.b(A @ m.a(x))


@CASES.refused()
def einsum(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.einsum("ij,jk->ik", A, m.a(x)))


@CASES.refused()
def multi_dot(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.linalg.multi_dot([A, m.a(x)]))


@CASES.refused()
def solve(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.linalg.solve(A, m.a(x)))


@CASES.refused()
def solve_triangular(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.linalg.solve_triangular(A.triu() + 4 * torch.eye(4), m.a(x), upper=True))


@CASES.refused()
def addmm(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.addmm(x, A, m.a(x)))


@CASES.refused()
def inner(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.inner(A, m.a(x).T))


@CASES.exact()
def kron(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.kron(torch.ones(1, 1), m.a(x)))


@CASES.refused()
def fft(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.fft.fft(m.a(x), dim=0).real)


@CASES.refused()
def covariance(m: Any, x: Tensor) -> Tensor:
    return x + m.b(m.a(x)) * torch.cov(m.a(x)).sum()


@CASES.refused()
def distances(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.cdist(m.a(x), m.a(x)) @ x)


@CASES.refused()
def conv_over_batch(m: Any, x: Tensor) -> Tensor:
    return m.b(F.conv1d(m.a(x).T[:, None], torch.ones(1, 1, 3), padding=1)[:, 0].T)


@CASES.refused()
def linear_of_transposed(m: Any, x: Tensor) -> Tensor:
    return m.b(F.linear(m.a(x).T, A).T)


@CASES.refused()
def bilinear(m: Any, x: Tensor) -> Tensor:
    return x + F.bilinear(m.a(x).T.contiguous(), A[:3], torch.randn(3, 4, 4)).T.mean(0) * m.b(x)


@CASES.refused()
def mean_across_samples_cut_apart(m: Any, x: Tensor) -> Tensor:
    return x + m.b(x) * m.a(x).view(6, 2).mean(0).square().sum()


@CASES.refused()
def cut_apart_and_joined(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x).view(6, 2).view(4, 3))
