"""`ClippedSum`: bounds that hold, the ways to weight, and the two ways to use memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import pergrad
from pergrad.errors import PergradError
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import Formula, numbers
from tests.quantities.oracle import flat, losses

D = 5


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def net() -> nn.Module:
    return Formula(
        lambda m, x: m.head(m.body(x).tanh()), body=nn.Linear(D, 4), head=nn.Linear(4, 3)
    ).double()


def clipped(model: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> pergrad.ClippedSum:
    with pergrad.record(model, pergrad.ClippedSum(*args, **kwargs)) as found:
        losses(model, x).sum().backward()
    return found


def assert_sums(
    found: pergrad.ClippedSum, grads: dict[str, Tensor], weights: Callable[[str], Tensor]
) -> None:
    assert list(found.result) == list(grads)
    for name, rows in grads.items():
        assert_near(found.result[name], torch.tensordot(weights(name), rows, 1), name)


USES = ("kept", "low", "high")
all_uses = pytest.mark.parametrize("memory", USES)


@all_uses
def test_each_pattern_is_clipped_by_its_own_norm(memory: Any) -> None:
    model, x = net(), numbers(6, 2, D)
    grads = loop_grads(model, losses, x)
    bounds = {"head.weight": 0.3, "head.*": 0.2, "*": 5.0}
    groups = {
        "head.weight": ["head.weight"],
        "head.*": ["head.bias"],
        "*": ["body.weight", "body.bias"],
    }
    weights = {}
    for pattern, names in groups.items():
        norms = flat({name: grads[name] for name in names}).norm(dim=1)
        weights.update(dict.fromkeys(names, (bounds[pattern] / norms).clamp(max=1)))
    found = clipped(model, x, bounds, memory=memory)
    assert_sums(found, grads, weights.__getitem__)
    assert_near(found.norms, flat(grads).norm(dim=1))


def test_parameter_without_a_bound_is_named() -> None:
    model = net()
    with pytest.raises(PergradError, match=r"no bound for parameter 'head.weight'.*'body.\*'"):
        clipped(model, numbers(3, D), {"body.*": 1.0})


@all_uses
def test_normalizing_gives_every_sample_nearly_the_bound(memory: Any) -> None:
    model, x = net(), numbers(6, 2, D)
    grads = loop_grads(model, losses, x)
    norms = flat(grads).norm(dim=1)
    found = clipped(model, x, 2.0, weighting="normalize", stability=0.1, memory=memory)
    assert_sums(found, grads, lambda _: 2 / (norms + 0.1))


@all_uses
def test_weights_may_be_any_function_of_the_norms(memory: Any) -> None:
    model, x = net(), numbers(6, 2, D)
    grads = loop_grads(model, losses, x)
    norms = flat(grads).norm(dim=1)
    found = clipped(model, x, weighting=lambda n: (-n).exp() * (n < n.median()), memory=memory)
    assert_sums(found, grads, lambda _: (-norms).exp() * (norms < norms.median()))


@all_uses
@pytest.mark.parametrize(
    ("weighting", "got"),
    [
        (lambda n: n[:, None], r"each of 4 samples, got shape \(4, 1\)"),
        (lambda n: n.mean(), r"got shape \(\)"),
        (lambda n: 0.5, "got float"),
    ],
    ids=["matrix", "scalar", "number"],
)
def test_weights_of_the_wrong_shape_are_refused(memory: Any, weighting: Any, got: str) -> None:
    with pytest.raises(PergradError, match=got):
        clipped(net(), numbers(4, D), weighting=weighting, memory=memory)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "max_norm must be a positive number, got None"),
        ({"max_norm": 0.0}, "got 0.0"),
        ({"max_norm": float("nan")}, "got nan"),
        ({"max_norm": {"a": 1.0, "b": -1.0}}, "got -1.0 for 'b'"),
        ({"max_norm": 1.0, "weighting": "clamp"}, r"\('clip', 'normalize'\)"),
        ({"max_norm": 1.0, "memory": "none"}, r"\('kept', 'low', 'high'\)"),
        ({"max_norm": 1.0, "total": 0}, "total must be a positive number of samples, got 0"),
        ({"max_norm": 1.0, "total": 2.5}, "got 2.5"),
        ({"max_norm": 1.0, "stability": -1.0}, "stability must not be negative"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PergradError, match=message):
        pergrad.ClippedSum(**options)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    st.integers(1, 6),
    st.floats(1e-4, 1e4),
    st.floats(1e-3, 1e3),
    st.booleans(),
)
def test_norm_of_a_clipped_gradient_never_exceeds_the_bound(
    dtype: torch.dtype, t: int, bound: float, size: float, low: bool
) -> None:
    """Of a single sample, computed from factors in `dtype`; the sum is looked at before rounding."""
    model = nn.Linear(7, 6).to(dtype)
    x = (numbers(1, t, 7) * size).to(dtype)
    found = pergrad.ClippedSum(bound, memory="low" if low else "kept")
    with pergrad.record(model, found, batch_size=1):
        model(x).backward(numbers(1, t, 6).to(dtype))
    sums = found._of_ended(found._result)[0]
    norm = float(torch.cat([t.double().flatten() for t in sums.values()]).norm())
    assert norm <= bound
    whole = float(found.norms[0])
    assert norm == pytest.approx(min(whole, bound), rel=1e-5, abs=1e-30)


def test_positions_that_cancel_do_not_carry_a_gradient_over_its_bound() -> None:
    a, x = torch.randn(1, 4, 32), torch.randn(1, 4, 64)
    model = nn.Linear(64, 32, bias=False)
    with pergrad.record(model, pergrad.ClippedSum(1e-4), batch_size=1) as found:
        model(torch.cat([x, x], 1)).backward(torch.cat([a, -a * (1 + 1e-5)], 1))
    assert found.norms > 1e-4
    assert found.result["weight"].double().norm() <= 1e-4 * (1 + 1e-3)


@all_uses
@pytest.mark.parametrize(
    "options",
    [
        {"max_norm": 1.0},
        {"max_norm": 1.0, "weighting": "normalize", "stability": 0.0},
        {"weighting": lambda n: 1 / n},
    ],
    ids=["clip", "normalize", "own"],
)
def test_zero_gradients_add_zero(memory: Any, options: dict[str, Any]) -> None:
    model, x = net(), numbers(3, D)
    with pergrad.record(model, pergrad.ClippedSum(**options, memory=memory)) as found:
        (losses(model, x) * torch.tensor([1.0, 0.0, 0.0])).sum().backward()
    assert all(t.isfinite().all() and t.any() for t in found.result.values())
    found.reset()
    with pergrad.record(model, found):
        (losses(model, x) * 0).sum().backward()
    assert not any(t.any() for t in found.result.values())
    assert not found.norms.any()


@all_uses
def test_samples_that_are_not_finite_add_nothing(memory: Any) -> None:
    model, x = net(), numbers(4, 2, D)
    grads = loop_grads(model, losses, x)
    norms = flat(grads).norm(dim=1)
    weights = (0.7 / norms).clamp(max=1) * torch.tensor([1, 0, 1, 0])
    for bad in (float("nan"), float("inf"), -float("inf")):
        with pergrad.record(model, pergrad.ClippedSum(0.7, memory=memory)) as found:
            (losses(model, x) * torch.tensor([1, bad, 1, bad])).sum().backward()
        assert_sums(found, grads, lambda _: weights)
        assert found.norms.isfinite().tolist() == [True, False, True, False]
    bad_input = x.clone()
    bad_input[1] = float("nan")
    bad_input[3] = float("inf")
    assert_sums(clipped(model, bad_input, 0.7, memory=memory), grads, lambda _: weights)


# Memory


def test_all_uses_of_memory_give_the_same() -> None:
    model, x = net(), numbers(6, 3, D)
    kept, *others = (clipped(model, x, 0.7, memory=memory) for memory in USES)
    for other in others:
        assert_close(other.result, kept.result, rtol=1e-12, atol=1e-14)
        assert_close(other.norms, kept.norms, rtol=1e-12, atol=0)


def test_other_leaves_get_their_gradient_once() -> None:
    """An input, and a tensor of the caller's own that is no parameter of the module."""
    model = net()
    x, shift = numbers(4, 3, D).requires_grad_(), numbers(3).requires_grad_()

    def loss() -> Tensor:
        return ((model(x) + shift) ** 2).sum()

    expected = torch.autograd.grad(loss(), [x, shift])
    for memory in USES:
        x.grad = shift.grad = None
        with pergrad.record(model, pergrad.ClippedSum(0.7, memory=memory)):
            loss().backward()
        assert_close([x.grad, shift.grad], list(expected), rtol=1e-12, atol=1e-14)


def test_parameters_that_are_not_recorded_get_theirs_once() -> None:
    """Outside of the module; within it, those left out count as frozen."""
    model, other = net(), nn.Linear(D, D).double()
    x = numbers(4, D)
    expected = torch.autograd.grad(losses(model, other(x)).sum(), list(other.parameters()))
    for memory in USES:
        other.zero_grad()
        with pergrad.record(model, pergrad.ClippedSum(0.7, memory=memory)):
            losses(model, other(x)).sum().backward()
        grads = [p.grad for p in other.parameters()]
        assert_close(grads, list(expected), rtol=1e-12, atol=1e-14)


def test_low_memory_goes_with_checkpoints_that_are_not_reentrant() -> None:
    model = Formula(
        lambda m, x: m.head(checkpoint(lambda x: m.body(m.body(x)).tanh(), x, use_reentrant=False)),
        body=nn.Linear(D, D),
        head=nn.Linear(D, 3),
    ).double()
    x = numbers(4, 2, D)
    grads = loop_grads(model, losses, x)
    weights = (0.7 / flat(grads).norm(dim=1)).clamp(max=1)
    assert_sums(clipped(model, x, 0.7, memory="low"), grads, lambda _: weights)


def test_low_memory_beside_quantities_of_one_pass() -> None:
    model, x = net(), numbers(4, 2, D)
    grads = loop_grads(model, losses, x)
    norms = flat(grads).norm(dim=1)
    asked = (pergrad.Norms(), pergrad.ClippedSum(0.7, memory="low"), pergrad.Grads())
    with pergrad.record(model, *asked, loss_reduction="mean"):
        losses(model, x).mean().backward()
    assert_near(asked[0].result, norms)
    assert_sums(asked[1], grads, lambda _: (0.7 / norms).clamp(max=1))
    for name, rows in grads.items():
        assert_near(asked[2].result[name], rows)


# What is done with the result


def test_assigning_writes_the_gradients_of_the_parameters() -> None:
    model, x = net(), numbers(4, 2, D)
    model.idle = nn.Parameter(torch.ones(2, dtype=torch.float64))
    model.head.bias.requires_grad_(False)
    found = clipped(model, x, 0.7)
    before = {name: t.clone() for name, t in found.result.items()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    found.assign()
    for name, p in model.named_parameters():
        if name == "head.bias":
            assert (p.grad == 1).all()
            continue
        assert torch.equal(p.grad, before[name])
        assert p.grad.dtype == p.dtype
        p.grad.add_(1)  # noise, for instance
    for name, total in found.result.items():
        assert torch.equal(total, before[name])


def test_result_of_halves_is_in_float32_and_assigned_in_the_type_of_the_parameters() -> None:
    model = nn.Linear(D, 3).bfloat16()
    found = clipped(model, torch.randn(4, D).bfloat16(), 0.7)
    assert {t.dtype for t in found.result.values()} == {torch.float32}
    assert found.norms.dtype == torch.float32
    found.assign()
    assert model.weight.grad.dtype == torch.bfloat16


def test_small_gradients_of_micro_batches_are_not_rounded_before_they_are_added() -> None:
    """In bfloat16, 1 + 1/512 is 1: sums are kept in float32."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    total = pergrad.ClippedSum(10.0)
    for value in [1.0] + [2**-9] * 64:
        total += clipped_linear(model, value)
    assert total.result["weight"].item() == 1.125


def clipped_linear(model: nn.Module, value: float) -> pergrad.ClippedSum:
    with pergrad.record(model, pergrad.ClippedSum(10.0)) as found:
        model(torch.tensor([[value]]).bfloat16()).sum().backward()
    return found


def test_it_shows_a_weighting_only_if_it_is_not_the_usual_one() -> None:
    assert "weighting" not in repr(pergrad.ClippedSum(1.0))
    assert "weighting='normalize'" in repr(pergrad.ClippedSum(1.0, weighting="normalize"))
