"""Every rule against one backward a sample, for every argument of its function."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

import pergrad
from pergrad.errors import MixedSamplesError, PergradError
from pergrad.factors import Factor
from pergrad.rules import DECOMPOSITIONS, RULES
from pergrad.rules.arithmetic import _weight_is_broadcast
from pergrad.rules.embedding import embedding_bag
from pergrad.rules.experts import rows_by_group
from pergrad.rules.recurrence import linear_over_steps
from pergrad.testing import check_rule, loop_grads
from tests.engine.exactness import Formula, assert_all_near
from tests.rules.cases import CASES, Case, recurrent

# Arguments whose other values no sample can have alone, or the same twice.
REFUSED = {
    F.batch_norm: {"training"},
    F.scaled_dot_product_attention: {"dropout_p"},
    torch.tensordot: {"out"},
}
ELSEWHERE = {torch._grouped_mm, rows_by_group}  # there is no float64 of them: in test_experts.py
FUNCTIONS = [
    function
    for function in [*RULES, *DECOMPOSITIONS]
    if function not in ELSEWHERE
    # Not those that users, or the examples in docstrings, have registered in this process.
    and (inspect.getmodule(function) or torch).__name__.partition(".")[0] in ("torch", "pergrad")
]

WITH_RULES = [function for function in FUNCTIONS if function in RULES]
# Cases that general methods compute.
_PRODUCTS = {
    *("addmm 6 5x4 4x6 alpha=0.5", "addmm 6 5x4 4x6 beta=2.0"),
    *("addmm 1x6 5x4 4x6", "addmm 5x6 5x4 4x6"),
}
_CONTRACTIONS = {  # three operands, a sum of the weight alone, a diagonal
    "einsum bti,t,io->bo 5x3x4 3 4x6",
    "einsum bi,oij->bo 5x4 6x4x2",
    "einsum bii,io->bo 5x4x4 4x6",
}
LEFT_OUT = {
    torch.addmm: _PRODUCTS,
    Tensor.addmm: _PRODUCTS,
    torch.einsum: _CONTRACTIONS,
}
# Elementwise, so that nothing is gained by rounding; and a stand-in whose output is known before.
KEPT_IN_FLOAT32 = {torch.prelu, Tensor.prelu, linear_over_steps}
MERGING = {F.linear, F.layer_norm, F.rms_norm}


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


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("function", WITH_RULES, ids=lambda f: f.__name__)
def test_a_rule_covers_its_cases(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, calls = RULES[function], 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return rule.gradients(*args, **kwargs)

    monkeypatch.setitem(RULES, function, replace(rule, gradients=counted))
    left_out = set()
    for case in CASES:
        if case.function is function:
            calls = 0
            call = case.call or case.function
            check_rule(call, *case.args, samples=case.samples, **case.kwargs)
            if not calls:
                left_out.add(case.name)
    assert left_out == LEFT_OUT.get(function, set())


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("function", WITH_RULES, ids=lambda f: f.__name__)
def test_a_rule_casts_what_autocast_casts(function: Callable[..., Any]) -> None:
    case = next(case for case in CASES if case.function is function)
    given = [a.detach() if isinstance(a, Tensor) else a for a in case.args]
    with torch.autocast("cpu", torch.bfloat16):
        output = (case.call or function)(*given, **case.kwargs)
    is_cast = output.dtype == torch.bfloat16 and function not in KEPT_IN_FLOAT32
    assert RULES[function].casts_under_autocast == is_cast


def test_a_rule_that_casts_reads_what_the_function_multiplied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, w, b = torch.randn(3, 4), torch.randn(4, 2, requires_grad=True), torch.randn(2)
    seen: list[torch.dtype] = []
    rule = RULES[torch.addmm]

    def watched(grad_output: Tensor, **arguments: Any) -> Any:
        seen.extend([grad_output.dtype, arguments["mat1"].dtype])
        return rule.gradients(grad_output, **arguments)

    class Affine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(w.detach())

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(b, x, self.w)

    monkeypatch.setitem(RULES, torch.addmm, replace(rule, gradients=watched))
    model = Affine()
    with torch.autocast("cpu", torch.bfloat16), pergrad.record(model, pergrad.Grads()) as grads:
        model(x).sum().backward()
    assert seen == [torch.bfloat16, torch.bfloat16]
    rounded = x.bfloat16().float()
    torch.testing.assert_close(grads.result["w"], rounded.unsqueeze(2).expand(3, 4, 2))


@pytest.mark.parametrize("function", WITH_RULES, ids=lambda f: f.__name__)
def test_rules_that_merge_rows_give_the_same_without_a_dimension_of_one(
    function: Callable[..., Any],
) -> None:
    rule = RULES[function]
    assert rule.merges_rows == (function in MERGING)
    if not rule.merges_rows:
        return
    g, x = torch.randn(2, 5, 3, 4).unbind()
    others: tuple[Any, ...] = (torch.ones(4, 4),) if function is F.linear else ((4,), torch.ones(4))
    plain, padded = (rule.gradients(g, x, *others) for g, x in ((g, x), (g[:, None], x[:, None])))
    assert plain.keys() == padded.keys()
    for name, found in plain.items():
        first, second = (f() if callable(f) else f for f in (found, padded[name]))
        assert isinstance(first, Factor)
        assert isinstance(second, Factor)
        assert torch.equal(first.materialize(), second.materialize())


@pytest.mark.parametrize("function", WITH_RULES, ids=lambda f: f.__name__)
def test_only_sums_and_products_take_samples_where_they_take_weights(
    function: Callable[..., Any],
) -> None:
    commutes = function.__name__ in ("add", "mul", "einsum")
    assert RULES[function].symmetric == commutes


def test_normalising_over_the_samples_is_refused() -> None:
    model = torch.nn.BatchNorm1d(4)
    with pytest.raises(MixedSamplesError, match="training mode"):
        pergrad.call_for_per_sample_grads(model)(torch.randn(5, 4))


def test_a_rule_takes_the_gradient_of_the_output_first() -> None:
    def gradients(x: Tensor, weight: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

    with pytest.raises(TypeError, match=r"must be `grad_output`, but .*gradients takes \('x', "):
        pergrad.implements_per_sample_grads(torch.sinc)(gradients)  # type: ignore[arg-type]
    assert torch.sinc not in RULES


def exact(model: nn.Module, x: Tensor) -> None:
    assert_all_near(
        pergrad.grads(model, lambda m, x: m(x).square().sum(1), x),
        loop_grads(model, lambda m, x: m(x).square().sum(1), x),
    )


def test_operands_of_einsum_may_be_in_a_list() -> None:
    w, x = torch.randn(4, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    model = Formula(lambda m, x: torch.einsum("oi,ni->no", [m.w, x]), w=w)
    exact(model, x)


def test_a_product_over_dimensions_in_a_tensor_is_computed_without_a_rule() -> None:
    w, x = torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    model = Formula(lambda m, x: torch.tensordot(x, m.w, dims=torch.tensor([[1], [0]])), w=w)
    exact(model, x)


def test_bags_of_one_vector_need_their_offsets() -> None:
    table = nn.Parameter(torch.randn(4, 2))
    with pytest.raises(PergradError, match="a 1-D input needs `offsets`"):
        embedding_bag(torch.tensor([0, 1]), table)


@pytest.mark.parametrize("merges_rows", [None, False, True])
def test_a_rule_gets_rows_without_their_sample_only_if_it_merges_them(
    merges_rows: bool | None,
) -> None:
    def scaled(x: Tensor, weight: Tensor) -> Any:
        if has_torch_function((x, weight)):
            return handle_torch_function(scaled, (x, weight), x, weight)
        return x * weight

    shapes: list[tuple[int, ...]] = []
    options: dict[str, Any] = {} if merges_rows is None else {"merges_rows": merges_rows}
    options["weights"] = {"weight": ("x",)}

    @pergrad.implements_per_sample_grads(scaled, **options)
    def rule(grad_output: Tensor, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
        shapes.append(tuple(grad_output.shape))
        return {"weight": (grad_output * x).flatten(1, -2).sum(1)}

    try:
        exact(Formula(lambda m, x: scaled(x, m.w).sum(1), w=torch.randn(3)).double(), _rows())
    finally:
        del RULES[scaled]
    assert shapes == [(5, 4, 3) if merges_rows else (5, 1, 4, 3)]


def _rows() -> Tensor:
    return torch.randn(5, 4, 3, dtype=torch.float64)


def test_a_broadcast_weight_is_a_tensor_beside_the_only_argument_with_samples() -> None:
    x, weight = torch.ones(5, 4, 3), torch.ones(3)

    def is_broadcast(a: Any, b: Any, *names: str) -> bool | None:
        return _weight_is_broadcast({"input": a, "other": b}, dict.fromkeys(names, 0))

    assert is_broadcast(x, weight, "input")
    assert is_broadcast(weight, x, "other")
    assert is_broadcast(x, torch.ones(1, 4, 3), "input")
    assert not is_broadcast(x, torch.ones(5, 1, 3), "input")
    assert not is_broadcast(x, weight.double(), "input")
    assert not is_broadcast(x, 2.0, "input")
    assert not is_broadcast(2.0, x, "other")
    assert not is_broadcast(x, x, "input", "other")
