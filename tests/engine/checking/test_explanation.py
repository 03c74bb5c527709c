"""`pergrad.explain`: a row for every parameter, on the rung that it was computed on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import pergrad
from pergrad.engine.checking.explanation import Explanation
from pergrad.engine.collecting.journal import RUNGS
from pergrad.errors import PergradError
from tests.engine.exactness import Formula, numbers, of, state_of, total

SIZE, D, OUT = 5, 4, 3


class Product(torch.autograd.Function):
    """y = x Wᵀ, as a user writes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


def loss(model: Callable[..., Any], *batch: Any) -> Tensor:
    return total(model(*batch))


def explained(function: Callable[..., Any], **shapes: tuple[int, ...]) -> Explanation:
    model = Formula(function, **{name: numbers(*shape) for name, shape in shapes.items()})
    (row,) = pergrad.explain(model, loss, *of((D,))(SIZE)).rows
    return row


# By rung: the function of the input and the weight, the weight's shape, a function that must be named,
# the kinds of factors, and a part of the cost.
ON_RUNG: dict[str, tuple[Callable[..., Any], tuple[int, ...], str, set[str], str]] = {
    "rule": (
        lambda m, x: F.linear(x, m.w),
        (OUT, D),
        "torch.nn.functional.linear",
        {"OuterProduct"},
        "as the ordinary gradient",
    ),
    "derived": (lambda m, x: F.linear(x, m.w.exp()), (OUT, D), "exp", {"Dense"}, "pull-back"),
    "broadcast": (
        lambda m, x: torch.maximum(x, m.w),
        (D,),
        "maximum",
        {"Dense"},
        "as the ordinary gradient",
    ),
    "expanded": (
        lambda m, x: torch.cat([x, m.w.expand(x.shape[0], -1)], 1),
        (1, D),
        "expand",
        {"Dense"},
        "as the ordinary gradient",
    ),
    "vmap": (
        lambda m, x: torch.cdist(x[:, None], m.w),
        (OUT, D),
        "cdist",
        {"Dense"},
        "three times",
    ),
    "masked VJP": (
        lambda m, x: Product.apply(x, m.w),
        (OUT, D),
        "Product",
        {"Dense"},
        f"{SIZE} backward passes",
    ),
}


def test_every_rung_has_a_case() -> None:
    assert ON_RUNG.keys() == set(RUNGS) - {"loop"}  # which `explain` does not take


@pytest.mark.parametrize("rung", ON_RUNG)
def test_row_says_functions_rung_factors_cost_and_memory(rung: str) -> None:
    function, shape, named, factors, cost = ON_RUNG[rung]
    row = explained(function, w=shape)
    assert (row.name, row.shape, row.rung) == ("w", shape, rung)
    assert any(named in function for function in row.functions)
    assert set(row.factors) == factors
    assert cost in row.cost
    assert row.memory == SIZE * torch.Size(shape).numel() * 8


def test_parameter_stands_on_the_slowest_rung_that_uses_it() -> None:
    row = explained(lambda m, x: F.linear(x, m.w) + torch.cdist(x[:, None], m.w)[:, 0], w=(OUT, D))
    assert row.rung == "vmap"
    assert {"torch.nn.functional.linear", "torch.cdist"} <= {*row.functions}
    assert set(row.factors) == {"OuterProduct", "Dense"}


def test_functions_are_named_once_however_often_they_are_called() -> None:
    row = explained(lambda m, x: F.linear(F.linear(x, m.w), m.w), w=(D, D))
    assert row.functions == ("torch.nn.functional.linear",)


def a_model() -> nn.Module:
    """Rules, a derived weight, a tied weight and a frozen one."""
    model = nn.Sequential(nn.Linear(D, D), weight_norm(nn.Linear(D, D)), nn.Linear(D, D)).double()
    model[2].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    return model


def test_rows_are_the_trainable_parameters_in_order() -> None:
    model = a_model()
    report = pergrad.explain(model, loss, *of((D,))(SIZE))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert [row.name for row in report.rows] == names
    assert report.batch_size == SIZE


def test_parameters_that_the_loss_does_not_reach_cost_nothing() -> None:
    model = Formula(
        lambda m, x: (m.used(x), m.dropped(x))[0],
        **{name: nn.Linear(D, OUT) for name in ("used", "dropped", "uncalled")},
    ).double()
    report = pergrad.explain(model, loss, *of((D,))(SIZE))
    rows = {row.name: row for row in report.rows}
    assert rows["used.weight"].rung == "rule"
    for name in ("dropped.weight", "uncalled.weight"):
        assert rows[name].rung is None
        assert rows[name].factors == ()
        assert "does not reach" in rows[name].cost
    assert rows["uncalled.weight"].functions == ()


def test_memory_counts_bytes_of_the_dtype() -> None:
    model = nn.Linear(D, OUT, dtype=torch.bfloat16)
    report = pergrad.explain(model, loss, torch.randn(SIZE, D, dtype=torch.bfloat16))
    assert [row.memory for row in report.rows] == [SIZE * OUT * D * 2, SIZE * OUT * 2]


def test_printed_table_has_a_header_a_row_per_parameter_and_a_total() -> None:
    report = pergrad.explain(a_model(), loss, *of((D,))(SIZE))
    header, *rows, total_line = str(report).splitlines()
    assert header.split() == "parameter shape functions rung factors cost memory".split()
    assert [line.split()[0] for line in rows] == [row.name for row in report.rows]
    assert total_line.startswith(f"{len(report.rows)} parameters")
    assert total_line.endswith(f"{SIZE} samples")


@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
def test_reduction_and_layout_of_the_batch_change_no_row(loss_reduction: Any) -> None:
    model = nn.Linear(D, OUT).double()
    x = numbers(SIZE, 2, D)
    first = pergrad.explain(model, loss, x)
    second = pergrad.explain(
        model, loss, x.transpose(0, 1), batch_first=False, loss_reduction=loss_reduction
    )
    assert first == second


def test_model_and_gradients_are_left_as_they_were() -> None:
    model = a_model()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = [str(part) for part in state_of(model)]
    values = [t.clone() for t in model.state_dict().values()]
    pergrad.explain(model, loss, *of((D,))(SIZE))
    assert [str(part) for part in state_of(model)] == before
    torch.testing.assert_close(list(model.state_dict().values()), values, rtol=0, atol=0)


def test_what_has_no_per_sample_gradient_is_refused() -> None:
    model = nn.Sequential(nn.Linear(D, OUT), nn.BatchNorm1d(OUT)).double()
    with pytest.raises(PergradError, match="BatchNorm in training mode"):
        pergrad.explain(model, loss, *of((D,))(SIZE))
