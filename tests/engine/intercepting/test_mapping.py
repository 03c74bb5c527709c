"""Weights inside of `torch.vmap` over the samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev
from torch.nn import functional as F

import pergrad
from pergrad.engine.intercepting.mapping import mapped_over_samples
from pergrad.errors import UnsupportedFunctionError
from pergrad.runtime import internals
from pergrad.testing import loop_grads
from tests.engine.exactness import assert_all_near
from tests.engine.soundness.judge import Cases, exact_or_refused
from tests.engine.trackers import N, samples, tracker_of, with_root

CASES = Cases()


@pytest.fixture(autouse=True)
def _float64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@CASES.exact()
def layers(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: m.b(m.a(row).tanh()) * m.w.sum(0))(x)


@CASES.exact()
def weights_as_arguments(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(F.linear, in_dims=(0, None, None))(x, m.w, m.a.bias)


@CASES.exact()
def weights_mapped_with_the_samples(m: Any, x: Tensor) -> Tensor:
    scales = m.w.flatten()[: len(x)] if len(x) <= 9 else m.w
    return torch.vmap(lambda row, scale: m.a(row) * scale)(x, scales)


@CASES.exact()
def samples_in_another_dimension(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(m.a, in_dims=1, out_dims=1)(x.T).T


@CASES.exact()
def in_chunks(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(m.a, chunk_size=2)(x)


@CASES.exact()
def derived_before(m: Any, x: Tensor) -> Tensor:
    w = m.w @ m.w.T
    return torch.vmap(lambda row: row @ w)(m.a(x))


@CASES.exact()
def a_jacobian(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(jacrev(lambda row: m.b(m.a(row).tanh())))(x)


@CASES.exact()
def a_step_of_descent_for_each_sample(m: Any, x: Tensor) -> Tensor:
    def loss(w: Tensor, row: Tensor) -> Tensor:
        return functional_call(m.b, {"weight": w}, (row,)).square().mean()

    own = m.b.weight.expand(len(x), 3, 3)
    steps = torch.vmap(grad(loss))(own, m.a(x))
    return torch.einsum("nij,nj->ni", own - steps, x)


@CASES.exact()
def nothing_but_data(m: Any, x: Tensor) -> Tensor:
    return m.a(torch.vmap(lambda row: row.sin() * row.sum())(x))


@CASES.exact()
def stacked_weights(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda w: x @ w)(torch.stack([m.w, 2 * m.b.weight])).sum(0)


@CASES.exact()
def an_ensemble(m: Any, x: Tensor) -> Tensor:
    members = {"weight": torch.stack([m.w, m.w.T, m.a.weight]), "bias": m.w}

    def run(member: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
        return {"output": functional_call(m.b, member, (rows,)).tanh()}

    return torch.vmap(run, in_dims=(0, None), out_dims=1)(members, m.a(x))["output"].flatten(1)


@CASES.exact()
def rows_of_a_weight_beside_columns(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda w, column: column[:, None] * w, (0, 1), 1)(m.w, m.a(x)).sum(1)


@CASES.refused()
def a_member_that_mixes(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda w: x @ w - (x @ w).mean(0))(m.w[None]).sum(0)


@CASES.refused()
def keys_of_all_samples(m: Any, x: Tensor) -> Tensor:
    keys = m.a(x)
    return torch.vmap(lambda row: (m.b(row) @ keys.T).softmax(-1) @ keys)(x)


@CASES.refused()
def columns(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda column: m.w.sum() * (column - column.mean()), 1, 1)(m.a(x))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_weights_inside_of_vmap_are_exact_or_refused(name: str, size: int) -> None:
    case = CASES[name]
    torch.manual_seed(0)

    def made() -> Any:
        model, _ = case.made()
        torch.manual_seed(1)
        return model, (torch.randn(size, 3),)

    assert exact_or_refused(made, case.loss_fn) == case.verdict


LOSSES: dict[str, Any] = {
    "layers": lambda m, x: torch.vmap(lambda row: m.b(m.a(row).tanh()).square().sum())(x),
    "functional": lambda m, x: torch.vmap(
        lambda row: functional_call(m.a, dict(m.a.named_parameters()), (row,)).square().sum()
    )(x),
    "jacobian": lambda m, x: torch.vmap(jacrev(lambda row: m.a(row).sin()))(x).square().sum((1, 2)),
    "hessian": lambda m, x: (
        torch.vmap(hessian(lambda row: m.b(m.a(row).sin()).sin().sum()))(x).square().sum((1, 2))
    ),
}


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated"
)  # by torch.func.hessian itself
@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_map_parts_of_the_module_are_exact(name: str) -> None:
    """The module itself is never called: the mapped function is the first to use a weight."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model.a, model.b = model["a"], model["b"]
    x = torch.randn(4, 3)
    found = pergrad.grads(model, LOSSES[name], x)
    assert_all_near(found, loop_grads(model, LOSSES[name], x))


def test_vmap_over_another_dimension_says_what_to_do() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(self.a, 1, 1)(x)

    with pytest.raises(UnsupportedFunctionError, match="or map the samples"):
        pergrad.norms(Model(), lambda m, x: m(x).sum((1, 2)), torch.randn(4, 2, 3))


def test_vmap_is_torchs_own_outside_of_recordings() -> None:
    before = internals.transforms.vmap_impl
    model = nn.Sequential(nn.Linear(3, 3))
    pergrad.norms(model, lambda m, x: torch.vmap(lambda h: h * 2)(m(x)).sum(1), torch.randn(4, 3))
    assert internals.transforms.vmap_impl is before

    def fail() -> None:
        with pergrad.record(model, pergrad.Norms()):
            assert internals.transforms.vmap_impl is not before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert internals.transforms.vmap_impl is before


def test_samples_and_constants_are_mapped_and_nothing_else() -> None:
    tracker = tracker_of()
    x, second = samples(tracker, N, 3), samples(tracker, 3, N, dim=1)
    constant, by_owner = torch.ones(3), torch.ones(5)
    tracker.mark(constant, tracker.constant)
    tracker.mark(by_owner, tracker.scope.owned(0, torch.tensor([0, 0, 1, 2, 3])))

    def is_mapped(in_dims: Any, *args: Any, **kwargs: Any) -> bool:
        found = mapped_over_samples(tracker, torch.add, in_dims, args, kwargs)
        if found is not None:
            assert found[1] == (in_dims if isinstance(in_dims, tuple) else (in_dims,) * len(args))
            assert len(found[2]) == len(args)
        return found is not None

    assert is_mapped(0, x)
    assert is_mapped((0, None), x, constant)
    assert is_mapped((0, -1), x, second)
    assert is_mapped(0, [x, x])
    assert not is_mapped((None,), constant)  # no samples
    assert not is_mapped((None, 0), constant, constant)
    assert not is_mapped((0, None), x, x)  # of all samples at once
    assert not is_mapped(1, x)
    assert not is_mapped((0, None), x, by_owner)
    assert not is_mapped((0,), x, other=x)
    with torch.no_grad():
        assert not is_mapped(0, x)


def test_weights_are_mapped_that_have_one_for_each_sample() -> None:
    tracker = tracker_of()
    x = samples(tracker, N, 3)
    for size in (N, N + 1):
        w = with_root(tracker, size, N)
        for dim, fits in ((None, True), (0, size == N), (1, True)):
            found = mapped_over_samples(tracker, torch.add, (0, dim), (x, w), {})
            assert (found is not None) is fits, (size, dim)
