"""`Dots` and `Gram`: names, shapes, and what is left out."""

from typing import Any

import pytest
import torch
from torch import nn

import pergrad
from pergrad.errors import PergradError
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import numbers
from tests.quantities.oracle import flat, losses


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def test_parameters_that_are_not_named_count_as_zero() -> None:
    model, x = net(), numbers(5, 2, 4)
    grads = loop_grads(model, losses, x)
    direction, stored = numbers(2, 3), numbers(6, 2, 3)
    with pergrad.record(
        model, pergrad.Dots({"2.weight": direction}), pergrad.Gram(against={"2.weight": stored})
    ) as (dots, gram):
        losses(model, x).sum().backward()
    weight = grads["2.weight"].flatten(1)
    assert_near(dots.result, weight @ direction.flatten())
    assert_near(gram.result, weight @ stored.flatten(1).T)


def test_directions_may_be_of_another_type() -> None:
    model, x = net(), numbers(5, 2, 4)
    direction = numbers(2, 3).float()
    with pergrad.record(model, pergrad.Dots({"2.weight": direction})) as dots:
        losses(model, x).sum().backward()
    assert dots.result.dtype == torch.float64
    weight = loop_grads(model, losses, x)["2.weight"].flatten(1)
    assert_near(dots.result, weight @ direction.double().flatten())


WRONG: dict[str, tuple[Any, str]] = {
    "unknown name": (lambda: pergrad.Dots({"3.weight": numbers(2, 3)}), "direction names"),
    "wrong shape": (lambda: pergrad.Dots({"2.weight": numbers(3, 2)}), r"has shape \(3, 2\)"),
    "stored, unknown name": (
        lambda: pergrad.Gram(against={"3.weight": numbers(5, 2, 3)}),
        "against names",
    ),
    "stored, wrong shape": (
        lambda: pergrad.Gram(against={"2.weight": numbers(5, 3, 2)}),
        r"expected \(5, 2, 3\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_directions_that_do_not_fit_are_refused_and_the_model_is_free(name: str) -> None:
    model, x = net(), numbers(5, 4)
    build, message = WRONG[name]
    with pytest.raises(PergradError, match=message), pergrad.record(model, build()):
        losses(model, x).sum().backward()
    with pergrad.record(model, pergrad.Norms()) as norms:
        losses(model, x).sum().backward()
    assert_near(norms.result, flat(loop_grads(model, losses, x)).norm(dim=1))


@pytest.mark.parametrize(
    "against", [{}, {"a": numbers(3, 2), "b": numbers(4, 2)}], ids=["none", "two sizes"]
)
def test_stored_gradients_must_be_of_the_same_samples(against: Any) -> None:
    with pytest.raises(PergradError, match="every parameter must have the same number of samples"):
        pergrad.Gram(against=against)


def test_gram_is_symmetric_with_the_squared_norms_on_its_diagonal() -> None:
    model, x = net(), numbers(5, 2, 4)
    with pergrad.record(model, pergrad.Gram(), pergrad.Norms()) as (gram, norms):
        losses(model, x).sum().backward()
    assert_near(gram.result, gram.result.T)
    assert_near(gram.result.diagonal(), norms.result.square())


def test_gram_of_a_low_precision_model_comes_in_float32() -> None:
    model, x = net().bfloat16(), numbers(5, 2, 4).bfloat16()
    with pergrad.record(model, pergrad.Gram()) as gram:
        losses(model, x).sum().backward()
    assert gram.result.dtype == torch.float32
    g = flat(loop_grads(model, losses, x)).double()
    assert (gram.result - g @ g.T).abs().max() < 0.03 * (g @ g.T).abs().max()


def test_reports_of_a_sample_are_the_inner_products_of_its_gradient() -> None:
    model, x = net(), numbers(5, 2, 4)
    grads = loop_grads(model, losses, x)
    stored = {"2.weight": numbers(6, 2, 3), "0.bias": numbers(6, 3).float()}
    with pergrad.record(model, pergrad.Gram(against=stored)) as gram:
        losses(model, x).sum().backward()
    for n in (0, 4):
        own = {name: g[n] for name, g in grads.items()}
        report = gram.sample_report(n, own)
        assert report.expected.shape == (6,)
        assert_near(report.found, gram.result[n])
        assert_near(report.expected, gram.result[n])
        bound = sum(
            float(stored[name].double().flatten(1).norm(dim=1).max() * own[name].norm())
            for name in stored
        )
        assert report.scale == pytest.approx(bound)
        only = gram.sample_report(n, {"0.bias": own["0.bias"]})
        assert_near(only.expected, stored["0.bias"].double() @ own["0.bias"])
