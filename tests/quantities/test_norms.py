"""`Norms`: their precision, and what they are of."""

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import numbers
from tests.quantities.oracle import flat, losses


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def norms_of(model: nn.Module, loss: Tensor | None, x: Tensor) -> pergrad.Norms:
    with pergrad.record(model, pergrad.Norms()) as norms:
        (losses(model, x) if loss is None else loss).sum().backward()
    return norms


def test_function_gives_what_the_quantity_gives() -> None:
    model, x = nn.Linear(3, 2).double(), numbers(4, 5, 3)
    expected = flat(loop_grads(model, losses, x)).norm(dim=1)
    assert_near(pergrad.norms(model, losses, x), expected)
    assert_near(pergrad.norms(model, losses, x, loss_reduction="mean", max_bytes=1), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norms_of_a_low_precision_model_come_in_float32(dtype: torch.dtype) -> None:
    model, x = nn.Linear(3, 2).to(dtype), numbers(4, 5, 3).to(dtype)
    norms = norms_of(model, None, x)
    assert norms.result.dtype == torch.float32
    assert {t.dtype for t in norms.per_param.values()} == {torch.float32}
    expected = flat(loop_grads(model, losses, x)).double().norm(dim=1)
    torch.testing.assert_close(norms.result.double(), expected, rtol=3e-2, atol=0)


def test_positions_that_cancel_in_bfloat16_leave_norms_exact() -> None:
    """Gram matrices in bfloat16 were wrong by hundreds of per cent here."""
    model = nn.Linear(64, 32, bias=False).bfloat16()
    x = torch.randn(4, 4, 64).bfloat16()
    a = torch.randn(4, 4, 32)
    g = torch.cat([a, -a * (1 + 0.01 * torch.randn_like(a))], 1).bfloat16()
    with pergrad.record(model, pergrad.Norms()) as norms:
        model(torch.cat([x, x], 1)).backward(g)
    exact = (g.double().mT @ torch.cat([x, x], 1).double()).flatten(1).norm(dim=1)
    torch.testing.assert_close(norms.result.double(), exact, rtol=1e-3, atol=0)


def test_norms_do_not_depend_on_whether_gradients_are_asked_for_too() -> None:
    """In float16 the gradients overflow; the norms do not."""
    model = nn.Linear(8, 4).half()
    x = torch.full((3, 5, 8), 200.0).half()
    with pergrad.record(model, pergrad.Grads(), pergrad.Norms()) as (grads, norms):
        model(x).backward(torch.full((3, 5, 4), 100.0).half())
    assert grads.result["weight"].isinf().all()
    exact = torch.full((3,), (32 * (5 * 200 * 100.0) ** 2 + 4 * 500.0**2) ** 0.5)
    torch.testing.assert_close(norms.result, exact)


def test_norms_of_zero_gradients_are_zero() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
    norms = norms_of(model, None, torch.randn(4, 3))
    assert (norms.result > 0).all()
    with pergrad.record(model, pergrad.Norms()) as norms:
        (model(torch.randn(4, 3)) * 0).sum().backward()
    assert not norms.result.any()
    assert not any(t.any() for t in norms.per_param.values())


@pytest.mark.parametrize("positions", [1, 2, 40])
def test_norms_of_huge_gradients_are_infinite_and_never_nan(positions: int) -> None:
    model = nn.Linear(6, 5)
    x = torch.randn(3, positions, 6)
    for size in (1e15, 1e22, 1e36):
        with pergrad.record(model, pergrad.Norms()) as norms:
            (model(x) * size).sum().backward()
        assert not norms.result.isnan().any()
        assert (norms.result > 1e15).all()


def test_per_parameter_norms_make_up_the_whole() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    norms = norms_of(model, None, numbers(4, 3))
    assert_near(torch.stack(list(norms.per_param.values())).norm(dim=0), norms.result)
