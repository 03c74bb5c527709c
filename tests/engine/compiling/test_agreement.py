"""A graph is used only if it gives the losses and the results of an uncompiled run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.engine.compiling import agreement
from pergrad.engine.compiling import step as step_module
from pergrad.engine.compiling.agreement import Summary
from pergrad.errors import ScopeError
from pergrad.testing import assert_near, loop_grads

WRONG = 1.02  # by how much results of a faulty compiler are too long


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


def faulty(place: slice, factor: float) -> Callable[..., Any]:
    """Returns a compiler that makes the outputs at some places too long."""
    as_python = step_module.as_python

    def compiled(graph: Any) -> Callable[..., Any]:
        call = as_python(graph)

        def run(*inputs: Tensor) -> list[Any]:
            found = list(call(*inputs))
            found[place] = [t * factor for t in found[place]]
            return found

        return run

    return compiled


@pytest.mark.parametrize(
    "quantity", [pergrad.Grads, pergrad.Norms, lambda: pergrad.ClippedSum(1.0)]
)
@pytest.mark.parametrize(
    ("place", "named"), [(slice(0, 1), "losses"), (slice(1, None), "results of")]
)
def test_a_graph_with_other_numbers_is_not_used(
    place: slice, named: str, quantity: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_module, "as_python", faulty(place, WRONG))
    torch.manual_seed(0)
    model, x, found = nn.Linear(3, 2), torch.randn(4, 3), quantity()
    expected = quantity()
    with pergrad.record(model, expected):
        losses(model, x).sum().backward()
    step = pergrad.compiled(model, losses, found, backend="eager")
    step(x)
    with pytest.warns(UserWarning, match=f"the graph gives other {named}"):
        step(x)
    assert step.graphs == 0
    for _ in range(2):
        for a, b in zip(_tensors(found.result), _tensors(expected.result), strict=True):
            assert_near(a, b)
        step(x)


def _tensors(result: Any) -> list[Tensor]:
    return list(result.values()) if isinstance(result, dict) else [result]


def test_rounding_is_no_other_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "as_python", faulty(slice(None), 1 + 1e-5))
    model, x, norms = nn.Linear(3, 2), torch.randn(4, 3), pergrad.Norms()
    step = pergrad.compiled(model, losses, norms, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x)
        step(x)
    assert step.graphs == 1


def test_a_model_that_draws_is_compiled_without_a_comparison() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    norms, x = pergrad.Norms(), torch.randn(4, 3)
    step = pergrad.compiled(model, losses, norms, backend="eager")
    step(x)
    step(x)
    assert step.graphs == 1


class Late(pergrad.Norms):
    """Norms that are told after more steps than one."""

    @property
    def result(self) -> Tensor:
        raise ScopeError("no result yet")


def test_a_quantity_without_a_result_yet_is_compiled() -> None:
    late, norms, model = Late(), pergrad.Norms(), nn.Linear(3, 2)
    step = pergrad.compiled(model, losses, late, norms, backend="eager")
    for _ in range(2):
        step(torch.randn(4, 3))
    assert step.graphs == 1


def test_of_large_results_the_norms_of_rows_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_MOST", 5)
    model, x, grads = nn.Linear(3, 2), torch.randn(4, 3), pergrad.Grads()
    with pergrad.record(model, grads):
        losses(model, x).sum().backward()
    ((name, kept),) = Summary.of(losses(model, x), [grads]).results
    assert name == "Grads"
    assert [t.shape for t in kept] == [(4,), (4,)]
    wanted = loop_grads(model, losses, x)
    for t, g in zip(kept, wanted.values(), strict=True):
        assert_near(t, g.flatten(1).norm(dim=1))


@pytest.mark.parametrize(
    ("dtype", "is_rough", "error", "named"),
    [
        (torch.float32, False, 1e-4, ""),
        (torch.float32, False, 1e-2, "losses"),
        (torch.float32, True, 1e-2, ""),
        (torch.bfloat16, False, 1e-2, ""),
        (torch.bfloat16, False, 0.5, "losses"),
    ],
)
def test_low_precision_may_differ_by_more(
    dtype: torch.dtype, is_rough: bool, error: float, named: str
) -> None:
    wanted = torch.ones(4, dtype=dtype)
    found = Summary(wanted * (1 + error), [])
    assert found.differs_from(Summary(wanted, []), is_rough=is_rough) == named


def test_a_batch_whose_results_are_not_finite_says_nothing() -> None:
    wanted = Summary(torch.tensor([1.0, float("nan")]), [])
    assert not Summary(torch.zeros(2), []).differs_from(wanted, is_rough=False)


@pytest.mark.parametrize("found", [[], [torch.ones(3)], [torch.ones(2), torch.ones(2)]])
def test_results_of_other_shapes_are_not_alike(found: list[Tensor]) -> None:
    wanted = Summary(torch.ones(2), [("Norms", [torch.ones(2)])])
    assert Summary(torch.ones(2), [("Norms", found)]).differs_from(wanted, is_rough=False)
