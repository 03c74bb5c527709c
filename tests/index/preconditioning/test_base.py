"""Damping is a share of the mean size plus a ridge; singular matrices are refused."""

from __future__ import annotations

import pytest
import torch

from pergrad.errors import IndexingError
from pergrad.index.preconditioning.base import Damping, factorized
from pergrad.testing import assert_near


def test_damping_is_relative_to_the_mean_plus_a_ridge() -> None:
    assert Damping(0.5).of(4.0) == 2.0
    assert Damping(0.5, ridge=3.0).of(4.0) == 5.0
    assert Damping(0.0).of(4.0) == 0.0


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "1"])
def test_numbers_that_are_no_damping_are_refused(value: float) -> None:
    with pytest.raises(IndexingError, match="damping must be a finite number"):
        Damping(value)
    with pytest.raises(IndexingError, match="ridge must be a finite number"):
        Damping(1.0, ridge=value)


def test_the_factor_is_that_of_the_damped_matrix() -> None:
    root = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = root @ root.T
    factor = factorized(matrix, 0.5, "it")
    assert_near(factor @ factor.T, matrix + 0.5 * torch.eye(4, dtype=torch.float64))


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_a_singular_matrix_is_refused_at_any_scale(size: float) -> None:
    matrix = size * torch.ones(3, 3, dtype=torch.float64)
    with pytest.raises(IndexingError, match="the thing is singular with a damping of 0"):
        factorized(matrix, 0.0, "the thing")
    assert factorized(matrix, 0.1 * size, "the thing").isfinite().all()
