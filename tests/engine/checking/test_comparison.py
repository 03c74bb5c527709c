"""A comparison finds each error, and accepts rounding."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.engine.checking.comparison import compare, factor_off, spread_out
from pergrad.engine.checking.reports import VerifyReport

SIZE = 5


def recorded(dtype: torch.dtype = torch.float64) -> pergrad.Grads:
    """Gradients of two parameters: that of the bias is a thousand times smaller."""
    torch.manual_seed(0)
    model, grads = nn.Linear(3, 2).to(dtype), pergrad.Grads()
    with pergrad.record(model, grads):
        (model(1000 * torch.randn(SIZE, 3, dtype=dtype)) ** 2 / 1000).sum().backward()
    return grads


def alone(grads: pergrad.Grads, *samples: int) -> dict[int, dict[str, Tensor | None]]:
    return {n: {name: g[n].clone() for name, g in grads.result.items()} for n in samples}


def verdicts(report: VerifyReport) -> dict[str, str]:
    return {row.name: row.verdict for row in report.rows}


def test_equal_gradients_are_ok_and_have_no_error() -> None:
    grads = recorded()
    report = compare(grads, alone(grads, 0, 4), how={"weight": "rule"}.get)
    assert report.ok
    assert report.samples == (0, 4)
    assert [(row.name, row.how, row.shape, row.error) for row in report.rows] == [
        ("weight", "rule", (2, 3), 0.0),
        ("bias", "-", (2,), 0.0),
    ]


@pytest.mark.parametrize("sample", [0, 2])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_one_wrong_sample_of_one_parameter_is_found(name: str, sample: int) -> None:
    grads = recorded()
    expected = alone(grads, 0, 2)
    expected[sample][name] *= 1.01
    report = compare(grads, expected)
    assert not report.ok
    other = "bias" if name == "weight" else "weight"
    assert verdicts(report) == {name: "wrong", other: "ok"}
    assert max(row.error for row in report.rows) == pytest.approx(0.01, rel=0.02)


@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
@pytest.mark.parametrize("is_right", [True, False])
def test_sum_over_the_samples_is_compared_with_the_ordinary_gradient(
    loss_reduction: Any, is_right: bool
) -> None:
    grads = recorded()
    divisor = SIZE if (loss_reduction == "mean") is is_right else 1
    ordinary = {name: g.sum(0) / divisor for name, g in grads.result.items()}
    report = compare(grads, alone(grads, 1), ordinary=ordinary, loss_reduction=loss_reduction)
    assert report.ok is is_right


def test_error_within_the_tolerance_of_the_dtype_is_rounding() -> None:
    for dtype, is_ok in [(torch.float64, False), (torch.float32, True)]:
        grads = recorded(dtype)
        expected = alone(grads, 0)
        expected[0]["weight"] *= 1 + 1e-4
        assert compare(grads, expected).ok is is_ok


def test_none_stands_for_zeros() -> None:
    grads = recorded()
    expected = alone(grads, 0)
    expected[0]["bias"] = None
    assert verdicts(compare(grads, expected)) == {"weight": "ok", "bias": "wrong"}


def test_parameter_without_a_gradient_is_untouched_and_ok() -> None:
    grads = recorded()
    grads.result["bias"].zero_()
    report = compare(grads, alone(grads, 0))
    assert report.ok
    assert report.untouched == ("bias",)


def test_what_is_not_a_number_is_wrong() -> None:
    grads = recorded()
    expected = alone(grads, 0, 1)
    grads.result["weight"][0] = math.nan
    report = compare(grads, expected)
    assert verdicts(report)["weight"] == "wrong"
    assert math.isnan(report.rows[0].error)


def test_problems_and_notes_are_printed() -> None:
    report = VerifyReport((), (0, 3), ("it mixes",), ("in eval mode",))
    assert not report.ok
    lines = str(report).splitlines()
    assert lines[1:] == [
        "problem: it mixes",
        "note: in eval mode",
        "not right: 0 parameters, samples 0, 3",
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("samples", [1, 2, 4, 10])
def test_chosen_samples_are_different_and_reach_from_the_first_to_the_last(
    samples: int, size: int
) -> None:
    chosen = spread_out(samples, size)
    assert len(set(chosen)) == len(chosen) == min(samples, size)
    assert chosen[0] == 0
    if samples > 1:
        assert chosen[-1] == size - 1


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (1 / SIZE, "is the loss a mean?"),
        (SIZE, "is the loss a sum?"),
        (2.5, "factor of 2.5"),
        (-1, "-1"),
    ],
)
def test_a_factor_that_explains_the_difference_is_named(factor: float, said: str) -> None:
    expected = torch.randn(7, dtype=torch.float64)
    assert said in factor_off(factor * expected, expected, SIZE)


@pytest.mark.parametrize(
    "found", [torch.zeros(4), torch.tensor([1.0, 2.0, 3.0, 5.0]), torch.ones(4)]
)
def test_no_factor_is_named_where_none_explains_the_difference(found: Tensor) -> None:
    assert factor_off(found, torch.tensor([1.0, 2.0, 3.0, 4.0]), SIZE) == ""
    assert factor_off(found, torch.zeros(4), SIZE) == ""


def test_gradients_of_another_shape_are_off_by_no_factor() -> None:
    assert factor_off(torch.ones(3), torch.ones(1, 3), size=3) == ""
