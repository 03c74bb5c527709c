"""`Projection`: one map for a seed, whatever the batch, and inner products that it keeps."""

from typing import Any

import pytest
import torch
from torch import nn

import pergrad
from pergrad.errors import PergradError
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import numbers
from tests.quantities.oracle import flat, losses

METHODS = ["count", "two_sided"]
each_method = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Conv1d(2, 3, 3), nn.Linear(4, 2)).double()


def sketches(model: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    options = {k: kwargs.pop(k) for k in ("max_bytes", "params") if k in kwargs}
    with pergrad.record(model, pergrad.Projection(*args, **kwargs), **options) as found:
        losses(model, x).sum().backward()
    return found.result


@each_method
def test_same_seed_same_map_for_any_batch_and_in_any_pieces(method: Any) -> None:
    model, x = net(), numbers(5, 2, 4)
    whole = sketches(model, x, 10, 3, method=method)
    assert whole.shape == (5, 10)
    assert_near(sketches(model, x, 10, 3, method=method, max_bytes=1), whole)
    parts = [sketches(model, part, 10, 3, method=method) for part in x.split([1, 4])]
    assert_near(torch.cat(parts), whole)


@each_method
def test_sketches_of_parameters_add_up(method: Any) -> None:
    model, x = net(), numbers(3, 2, 4)
    whole = sketches(model, x, 10, method=method)
    parts = [sketches(model, x, 10, method=method, params=p) for p in ("0.*", "2.*", "3.*")]
    assert_near(sum(parts), whole)


@each_method
def test_other_seeds_are_other_maps(method: Any) -> None:
    model, x = net(), numbers(3, 2, 4)
    assert not torch.allclose(
        sketches(model, x, 10, 0, method=method), sketches(model, x, 10, 1, method=method)
    )


@each_method
def test_expected_inner_products_are_those_of_the_gradients(method: Any) -> None:
    """Over 150 seeds the mean is off by less than 5 of its standard errors."""
    model, x = nn.Linear(3, 2).double(), numbers(2, 2, 3)
    g = flat(loop_grads(model, losses, x))
    asked = [pergrad.Projection(8, seed, method=method) for seed in range(150)]
    with pergrad.record(model, *asked):
        losses(model, x).sum().backward()
    products = torch.stack([q.result @ q.result.T for q in asked])
    error = products.std(0) / 150**0.5
    assert ((products.mean(0) - g @ g.T).abs() <= 5 * error).all()


@pytest.mark.parametrize("dim", [0, -1, 2.5])
def test_dimensions_that_are_none_are_refused(dim: Any) -> None:
    with pytest.raises(PergradError, match="dim must be a positive integer"):
        pergrad.Projection(dim)


def test_methods_that_are_none_are_refused() -> None:
    with pytest.raises(PergradError, match=r"one of \('count', 'two_sided'\), got 'gauss'"):
        pergrad.Projection(8, method="gauss")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_parameters_without_elements_add_nothing() -> None:
    model, x = nn.Sequential(nn.Linear(3, 0), nn.Linear(0, 2)).double(), numbers(4, 3)
    found = []
    for params in (None, "1.bias"):
        with pergrad.record(model, pergrad.Projection(5), params=params) as projection:
            model(x).sum().backward()
        found.append(projection.result)
    assert_near(*found)
    assert found[0].any()
