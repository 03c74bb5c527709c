"""Every rule against one backward a sample, for every argument of its function."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pergrad
from pergrad.errors import MixedSamplesError
from pergrad.rules import DECOMPOSITIONS, RULES
from pergrad.rules.experts import rows_by_group
from pergrad.testing import check_rule
from tests.rules.cases import CASES, Case, recurrent

# Arguments whose other values no sample can have alone, or the same twice.
REFUSED = {F.batch_norm: {"training"}, F.scaled_dot_product_attention: {"dropout_p"}}
ELSEWHERE = {torch._grouped_mm, rows_by_group}  # there is no float64 of them: in test_experts.py
FUNCTIONS = [
    function
    for function in [*RULES, *DECOMPOSITIONS]
    if function not in ELSEWHERE
    # Not those that users, or the examples in docstrings, have registered in this process.
    and (inspect.getmodule(function) or torch).__name__.partition(".")[0] in ("torch", "pergrad")
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def by_name(case: Case) -> str:
    return case.name


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning")
@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_rule_equals_the_loop(case: Case) -> None:
    for dtype in (torch.float64, torch.float32):
        call = case.call or case.function
        check_rule(call, *case.args, samples=case.samples, dtype=dtype, **case.kwargs)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_every_rule_has_cases(function: Callable[..., Any]) -> None:
    assert any(case.function is function for case in CASES)


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Name the arguments of a function, each with its default or `inspect.Parameter.empty`."""
    rule = RULES.get(function)
    if rule is not None:
        parameters = inspect.signature(rule.gradients).parameters
        return {name: parameters[name].default for name in rule.names}
    if function in (torch.mm, Tensor.mm):  # `matmul` calls it `other`
        return {"input": inspect.Parameter.empty, "mat2": inspect.Parameter.empty}
    if function in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
        return {"input": inspect.Parameter.empty, "other": inspect.Parameter.empty}
    parameters = inspect.signature(DECOMPOSITIONS[function]).parameters
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values()):
        return {"batch_sizes": None, **recurrent.LAYER_DEFAULTS}
    return {name: p.default for name, p in parameters.items()}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_cases_give_every_argument_a_value_of_its_own(function: Callable[..., Any]) -> None:
    defaults = defaults_of(function)
    changed = {
        name
        for case in CASES
        if case.function is function
        for name, value in case.given(defaults).items()
        if isinstance(value, Tensor) or value != defaults[name]
    }
    assert changed | REFUSED.get(function, set()) == set(defaults)


def test_normalising_over_the_samples_is_refused() -> None:
    model = torch.nn.BatchNorm1d(4)
    with pytest.raises(MixedSamplesError, match="training mode"):
        pergrad.call_for_per_sample_grads(model)(torch.randn(5, 4))
