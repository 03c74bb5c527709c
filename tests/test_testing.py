"""The oracle and the checkers: they find what is wrong, and pass what is right."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

import pergrad
from pergrad.rules import RULES
from pergrad.testing import assert_near, check_rule, loop_grads


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# -- loop_grads


def test_loop_is_one_backward_a_sample() -> None:
    model, x = nn.Linear(3, 2).double(), data(4, 3)
    found = loop_grads(model, lambda m, x: m(x).sum(), x)
    assert_near(found["weight"], x[:, None].expand(4, 2, 3))
    assert_near(found["bias"], torch.ones(4, 2, dtype=torch.float64))


def test_loop_slices_what_has_the_batch_size_and_no_more() -> None:
    model, seen = nn.Linear(3, 2).double(), []

    def loss(model: nn.Module, batch: dict[str, Any], table: Tensor) -> Tensor:
        seen.append((batch["x"].shape, batch["more"][0].shape, table.shape))
        return model(batch["x"]).sum()

    batch = {"x": data(4, 3), "more": [data(4), "text"]}
    loop_grads(model, loss, batch, data(7, 4))
    assert seen == [((1, 3), (1,), (7, 4))] * 4


def test_loop_reads_the_batch_dimension_it_is_told() -> None:
    model, x = nn.Linear(3, 2).double(), data(5, 4, 3)
    found = loop_grads(model, lambda m, x: m(x).sum(), x, batch_dim=1)
    assert_near(found["weight"], x.sum(0)[:, None].expand(4, 2, 3))


def test_loop_gives_zeros_for_what_is_not_reached_and_leaves_out_the_frozen() -> None:
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]).double()
    model[0].bias.requires_grad_(False)
    found = loop_grads(model, lambda m, x: m[0](x).sum(), data(4, 3))
    assert list(found) == ["0.weight", "1.weight", "1.bias"]
    assert not found["1.weight"].any()
    assert found["1.weight"].shape == (4, 2, 3)


def test_loop_makes_sparse_gradients_dense() -> None:
    model = nn.Embedding(5, 2, sparse=True).double()
    found = loop_grads(model, lambda m, x: m(x).sum(), torch.tensor([[1], [3]]))["weight"]
    assert not found.is_sparse
    assert found.sum((1, 2)).tolist() == [2.0, 2.0]


def test_loop_leaves_the_model_alone() -> None:
    model = nn.Linear(3, 2).double()
    loop_grads(model, lambda m, x: m(x).sum(), data(4, 3))
    assert all(p.grad is None and not vars(p) for p in model.parameters())


def test_loop_without_a_tensor_asks_for_the_batch_size() -> None:
    model = nn.Linear(3, 2).double()
    with pytest.raises(pergrad.PergradError, match="pass batch_size"):
        loop_grads(model, lambda m, x: m.bias.sum(), 3)
    found = loop_grads(model, lambda m, x: m.bias.sum(), 3, batch_size=2)
    assert found["bias"].shape == (2, 2)


# -- check_rule, on rules that are wrong in one way each


def scale(x: Tensor, weight: Tensor, shift: Tensor | None = None) -> Tensor:
    if has_torch_function((x, weight, shift)):
        return handle_torch_function(scale, (x, weight, shift), x, weight, shift)
    return x * weight if shift is None else x * weight + shift


def right(grad_output: Tensor, x: Tensor, weight: Tensor, shift: Tensor | None = None) -> Any:
    gradients = grad_output * x, grad_output
    return dict(zip(("weight", "shift"), (g.flatten(1, -2).sum(1) for g in gradients), strict=True))


def of_another_sample(grad_output: Tensor, x: Tensor, weight: Tensor, shift: Any = None) -> Any:
    return {"weight": (grad_output * x.flip(0)).sum(1), "shift": grad_output.sum(1)}


def summed(grad_output: Tensor, x: Tensor, weight: Tensor, shift: Any = None) -> Any:
    gradient = (grad_output * x).sum(1)
    return {"weight": gradient.sum(0).expand(gradient.shape), "shift": grad_output.sum(1)}


def wrong_by_little(grad_output: Tensor, x: Tensor, weight: Tensor, shift: Any = None) -> Any:
    return {"weight": (grad_output * x).sum(1) * (1 + 1e-7), "shift": grad_output.sum(1)}


def wrong_shift(grad_output: Tensor, x: Tensor, weight: Tensor, shift: Any = None) -> Any:
    return {"weight": (grad_output * x).sum(1), "shift": grad_output.sum(1) * 2}


def wrong_shape(grad_output: Tensor, x: Tensor, weight: Tensor, shift: Any = None) -> Any:
    return {"weight": grad_output * x, "shift": grad_output}


@pytest.fixture
def _forget_rule() -> Iterator[None]:
    yield
    RULES.pop(scale, None)


@pytest.mark.usefixtures("_forget_rule")
def test_right_rule_passes() -> None:
    pergrad.implements_per_sample_grads(scale)(right)
    weight, shift = data(3).requires_grad_(), data(3).requires_grad_()
    check_rule(scale, data(4, 3), weight, shift)
    check_rule(scale, data(4, 3), weight, shift, dtype=torch.float32)
    check_rule(scale, data(4, 3), shift=shift, weight=weight)
    check_rule(scale, data(2, 4, 3), weight, batch_dim=1)


@pytest.mark.usefixtures("_forget_rule")
@pytest.mark.parametrize(
    "rule", [of_another_sample, summed, wrong_by_little, wrong_shift, wrong_shape]
)
def test_wrong_rule_fails(rule: Any) -> None:
    pergrad.implements_per_sample_grads(scale)(rule)
    with pytest.raises(AssertionError):
        check_rule(scale, data(4, 3), data(3).requires_grad_(), data(3).requires_grad_())


def test_check_needs_a_weight() -> None:
    with pytest.raises(pergrad.PergradError, match="requires grad"):
        check_rule(F.linear, data(4, 3), data(2, 3))


# -- assert_near


@pytest.mark.parametrize(
    ("actual", "expected", "is_near"),
    [
        (data(3), None, True),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 1e-5]), True),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.01]), False),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]).double(), False),
        (torch.ones(2, 1), torch.ones(1, 2), False),
        (torch.ones(2), torch.ones(1), False),
        (None, torch.ones(1), False),
        (torch.tensor([float("nan")]), torch.ones(1), False),
        (torch.tensor([0.0, 1e-6]).double(), torch.tensor([0.0, 0.0]).double(), False),
        (torch.empty(0), torch.empty(0), True),
        # Small beside the largest element: the order of summation may be another.
        (torch.tensor([1e6, 1e-9]).double(), torch.tensor([1e6, 0.0]).double(), True),
    ],
)
def test_nearness(actual: Tensor | None, expected: Tensor | None, is_near: bool) -> None:
    expected = actual if expected is None else expected
    assert expected is not None
    if is_near:
        assert_near(actual, expected)
        return
    with pytest.raises(AssertionError, match="this one"):
        assert_near(actual, expected, "this one")
