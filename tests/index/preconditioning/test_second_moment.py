"""The second moment is that of the rows; its damping does not depend on their length."""

from __future__ import annotations

import pytest
import torch

from pergrad.errors import IndexingError
from pergrad.index.preconditioning.base import Damping
from pergrad.index.preconditioning.second_moment import SecondMoment, lengths_of, moments_of
from pergrad.testing import assert_near
from tests.index.cases import built, data, flat_gradients, network

X, Y = data().tensors


def test_moments_are_those_of_the_rows_that_are_kept() -> None:
    model, early = network(), network(seed=1)
    index = built(model=model, checkpoints=[early])
    index.delete([0, 7])
    kept = [n for n in range(40) if n not in (0, 7)]
    for moment, own in zip(moments_of(index._store), (early, model), strict=True):
        rows = flat_gradients(own, X, Y)[kept]
        assert_near(moment, rows.T @ rows / 38)


def test_rows_that_are_not_finite_do_not_count() -> None:
    x = X.clone()
    x[5] = torch.nan
    index = built(dataset=torch.utils.data.TensorDataset(x, Y))
    rows = flat_gradients(network(), torch.cat([X[:5], X[6:]]), torch.cat([Y[:5], Y[6:]]))
    assert_near(moments_of(index._store)[0], rows.T @ rows / 39)


def test_applying_it_is_the_damped_inverse() -> None:
    rows = torch.randn(20, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moment = rows.T @ rows / 20
    own = SecondMoment(moment, Damping(2.0, ridge=0.1))
    added = 2.0 * float(moment.trace()) / 512 + 0.1
    assert own.damping == pytest.approx(added)
    inverse = torch.linalg.inv(moment + added * torch.eye(6, dtype=torch.float64))
    assert_near(own.applied(rows), rows @ inverse)
    assert_near(own.lengths(rows), torch.einsum("ni,ij,nj->n", rows, inverse, rows).sqrt())
    assert own.applied(rows.float()).dtype == torch.float32


def test_the_damping_is_that_of_the_mean_squared_norm_whatever_the_length() -> None:
    """Padding rows with zeros changes no score."""
    rows = torch.randn(20, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    long = torch.nn.functional.pad(rows, (0, 10))
    short_one, long_one = (SecondMoment(r.T @ r / 20, Damping(1.0)) for r in (rows, long))
    assert_near(long_one.applied(long)[:, :6], short_one.applied(rows))


def test_lengths_are_plain_without_a_preconditioner() -> None:
    index = built()
    exact = flat_gradients(network(), X, Y).norm(dim=1)
    assert_near(lengths_of(index._store, None)[:, 0], exact)


def test_fewer_rows_than_numbers_need_damping() -> None:
    row = torch.ones(1, 3, dtype=torch.float64)
    with pytest.raises(IndexingError, match="the second moment of the rows is singular"):
        SecondMoment(row.T @ row, Damping(0.0))
