"""A weight wrapped for functional code looks like the weight, and passes its gradient on to it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import pergrad
from pergrad.errors import PergradError, ScopeError, UnsupportedFunctionError


def weight(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64).requires_grad_()


def test_wrapped_weight_looks_like_its_original() -> None:
    w = weight(3, 4)
    wrapped = pergrad.ExpandedWeight(w, 5, "mean")
    assert wrapped.requires_grad
    assert wrapped.is_leaf
    assert wrapped.orig_weight is w
    assert (wrapped.batch_size, wrapped.loss_reduction) == (5, "mean")
    assert (wrapped.shape, wrapped.size(), wrapped.dim(), wrapped.numel()) == (
        (3, 4),
        (3, 4),
        2,
        12,
    )


@pytest.mark.parametrize(("reduction", "factor"), [("sum", 1), ("mean", 5)])
def test_gradients_of_each_sample_reach_the_original(reduction: str, factor: int) -> None:
    w, b, x = weight(3, 4), weight(3), torch.rand(5, 4, dtype=torch.float64)
    wrapped = [pergrad.ExpandedWeight(p, 5, reduction) for p in (w, b)]  # type: ignore[arg-type]
    F.linear(input=x, weight=wrapped[0], bias=wrapped[1]).sum().backward()
    expected = factor * x.unsqueeze(1).expand(5, 3, 4)
    torch.testing.assert_close(w.grad_sample, expected)  # type: ignore[attr-defined]
    torch.testing.assert_close(  # type: ignore[attr-defined]
        b.grad_sample, factor * torch.ones(5, 3, dtype=torch.float64)
    )
    assert w.grad is None
    assert b.grad is None


def test_functions_without_a_rule_are_refused_by_name() -> None:
    wrapped = pergrad.ExpandedWeight(weight(3, 4), 5, "sum")
    with pytest.raises(UnsupportedFunctionError, match="cannot handle function sin"):
        torch.sin(wrapped)


def test_scalar_inputs_are_refused_except_by_linears_own_error() -> None:
    scalar = torch.ones((), dtype=torch.float64)
    with pytest.raises(PergradError, match="but got an input of size 0 in function layer_norm"):
        F.layer_norm(scalar, (3,), pergrad.ExpandedWeight(weight(3), 1, "sum"))


def test_gradients_of_several_calls_add_up_and_stale_ones_are_refused() -> None:
    model = torch.nn.Linear(2, 1, bias=False).double()
    call, x = pergrad.call_for_per_sample_grads(model), torch.rand(3, 2, dtype=torch.float64)
    (call(x).sum() + call(2 * x).sum()).backward()
    torch.testing.assert_close(model.weight.grad_sample, 3 * x.unsqueeze(1))
    with pytest.raises(ScopeError, match=r"grad_sample parameter of weight \(shape \(1, 2\)\)"):
        pergrad.call_for_per_sample_grads(model)
