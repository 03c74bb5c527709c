"""Calls with a rule: the first by the rule, the next by its plan, both with the numbers of the loop."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

import pergrad
from pergrad.engine.intercepting import rule_calls
from pergrad.engine.intercepting.rule_calls import cached_plan, qualified_name, unsupported
from pergrad.errors import PergradError, UnsupportedFunctionError
from pergrad.rules import DECOMPOSITIONS, RULES
from pergrad.rules.registry import by_shape
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import Formula, numbers
from tests.engine.samples.propagation.calls import named

D = 4


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1)  # type: ignore[no-any-return]


def assert_as_the_loop(model: nn.Module, x: Tensor) -> None:
    found, expected = pergrad.grads(model, squares, x), loop_grads(model, squares, x)
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        assert_near(found[name], rows, name)


@pytest.fixture
def times() -> Iterator[Callable[..., Tensor]]:
    """A function that nothing is known of yet."""

    def times(x: Tensor, w: Tensor, power: int = 1, *, scale: float = 1.0) -> Tensor:
        if has_torch_function((x, w)):
            return handle_torch_function(times, (x, w), x, w, power, scale=scale)  # type: ignore[no-any-return]
        return x**power * w * scale

    yield times
    RULES.pop(times, None)
    DECOMPOSITIONS.pop(times, None)


def registered(
    function: Callable[..., Any], seen: list[Any] | None = None, **options: Any
) -> Callable[..., Any]:
    """The rule of `times`, which writes down that it ran."""

    def rule(
        grad_output: Tensor, x: Tensor, w: Tensor, power: int = 1, scale: float = 1.0
    ) -> dict[str, Tensor]:
        if seen is not None:
            seen.append((x.dtype, power, scale))
        return {"w": (grad_output * x**power * scale).flatten(1, -2).sum(1)}

    return pergrad.implements_per_sample_grads(function, **options)(rule)


@pytest.fixture
def plans_made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans that are worked out, in place of being known."""
    found: list[Any] = []
    work_out = rule_calls.plan_of

    def watched(*args: Any) -> Any:
        found.append(work_out(*args))
        return found[-1]

    monkeypatch.setattr(rule_calls, "plan_of", watched)
    return found


@pytest.mark.parametrize("shape", [(D, D), (3, D), (1, D), (D, D, D), (2, 3, D)], ids=str)
def test_a_plan_is_worked_out_once_and_gives_the_same(
    times: Any, plans_made: list[Any], shape: tuple[int, ...]
) -> None:
    registered(times)
    model = Formula(lambda m, x: times(x, m.w, 2, scale=0.5), w=numbers(D))
    for _ in range(3):
        assert_as_the_loop(model, numbers(*shape))
    assert len(plans_made) == 1


def test_other_plain_arguments_and_shapes_have_plans_of_their_own(
    times: Any, plans_made: list[Any]
) -> None:
    registered(times)
    for power, scale, size in [(1, 1.0, 3), (2, 1.0, 3), (2, 2.0, 3), (2, 2.0, 2)] * 2:
        model = Formula(lambda m, x, p=power, s=scale: times(x, m.w, p, scale=s), w=numbers(D))
        assert_as_the_loop(model, numbers(size, D))
    assert len(plans_made) == 4


def test_a_plan_is_forgotten_when_its_function_has_another_rule_none_or_a_decomposition(
    times: Any,
) -> None:
    model, x = Formula(lambda m, x: times(x, m.w), w=numbers(D)), numbers(3, D)
    first: list[Any] = []
    second: list[Any] = []
    registered(times, first)
    pergrad.grads(model, squares, x)
    registered(times, second)
    for _ in range(2):
        assert_as_the_loop(model, x)
    assert (len(first), len(second)) == (1, 2)
    DECOMPOSITIONS[times] = lambda x, w, power=1, scale=1.0: x * w
    assert_as_the_loop(model, x)
    del DECOMPOSITIONS[times]
    assert len(second) == 2
    del RULES[times]
    assert_as_the_loop(model, x)
    assert len(second) == 2


def test_a_call_without_a_signature_has_no_plan() -> None:
    assert cached_plan(None) is None
    assert cached_plan((F.linear, "never seen")) is None


def test_a_plan_holds_the_layout_of_its_output_once_that_is_known(
    times: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(rule_calls._PLANS, "put", lambda _, plan: kept.append(plan))
    registered(times, merges_rows=True, weights={"w": ("x",)})
    pergrad.grads(Formula(lambda m, x: times(x, m.w), w=numbers(D)), squares, numbers(3, 2, D))
    assert [plan.output for plan in kept] == [(0, 1, 1)]
    assert kept[0].is_all_in_front


# -- the rule's own check


def test_the_check_is_asked_in_every_call_and_sees_arguments_and_dimensions(times: Any) -> None:
    seen: list[Any] = []

    def check(arguments: Any, dims: Any) -> None:
        assert not arguments["w"].requires_grad
        seen.append((sorted(arguments), dict(dims), arguments["power"], arguments["scale"]))

    registered(times, check=check)
    model = Formula(
        lambda m, x: times(x.transpose(0, 1), m.w, 3, scale=2.0).transpose(0, 1), w=numbers(D)
    )
    for _ in range(2):
        assert_as_the_loop(model, numbers(3, 2, D))
    assert seen == [(["power", "scale", "w", "x"], {"x": 1}, 3, 2.0)] * 2


def test_a_check_of_shapes_is_asked_once_for_each_signature(times: Any) -> None:
    seen: list[Any] = []

    @by_shape
    def check(arguments: Any, dims: Any) -> None:
        seen.append((arguments["x"].shape[0], arguments["power"]))

    registered(times, check=check)
    model = Formula(lambda m, x: times(x, m.w, m.power), w=numbers(D))
    for model.power, count in ((1, 3), (1, 3), (2, 3), (2, 5), (1, 3), (2, 5)):
        assert_as_the_loop(model, numbers(count, D))
    assert seen == [(3, 1), (3, 2), (5, 2)]


def test_a_check_of_shapes_is_asked_in_every_call_under_autocast(times: Any) -> None:
    seen: list[torch.dtype] = []
    check = by_shape(lambda arguments, dims: seen.append(arguments["x"].dtype))
    registered(times, check=check, casts_under_autocast=True)
    model = Formula(lambda m, x: times(x, m.w.to(x.dtype)), w=numbers(D).float())
    x = numbers(3, D).float()
    for is_on in (True, True, False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            pergrad.norms(model, squares, x)
    half, single = torch.bfloat16, torch.float32
    assert seen == [half, half, single, half, single]  # its first plan was made under autocast


def test_a_check_that_says_no_to_a_known_plan_leaves_the_call_to_a_general_way(times: Any) -> None:
    ran: list[Any] = []
    answer: list[bool | None] = [None]
    registered(times, ran, check=lambda *_: answer[0])
    model, x = Formula(lambda m, x: times(x, m.w), w=numbers(D)), numbers(3, D)
    counts = []
    for answer[0] in (None, True, False, None):
        assert_as_the_loop(model, x)
        counts.append(len(ran))
    assert counts == [1, 2, 2, 3]


def test_a_check_that_says_no_every_time_gives_the_gradients_without_the_rule(times: Any) -> None:
    ran: list[Any] = []
    registered(times, ran, check=lambda *_: False)
    model, x = Formula(lambda m, x: times(x, m.w), w=numbers(D)), numbers(3, D)
    for _ in range(2):
        assert_as_the_loop(model, x)
    assert not ran


def test_an_error_of_the_check_is_the_callers(times: Any) -> None:
    def check(arguments: Any, dims: Any) -> None:
        raise PergradError("not like this")

    registered(times, check=check)
    with pytest.raises(PergradError, match="not like this"):
        pergrad.grads(Formula(lambda m, x: times(x, m.w), w=numbers(D)), squares, numbers(3, D))


# -- autocast


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_what_autocast_casts_is_kept_as_the_function_got_it(
    times: Any, casts: bool, given: torch.dtype, kept: torch.dtype
) -> None:
    seen: list[Any] = []
    registered(times, seen, casts_under_autocast=casts)
    model = Formula(lambda m, x: times(x, m.w.to(x.dtype)), w=numbers(D)).to(given)
    x = numbers(3, D).to(given)
    for is_on in (False, True, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            pergrad.grads(model, squares, x)
    assert [dtype for dtype, *_ in seen] == [given, *[kept if casts else given] * 2]


def test_integers_are_not_cast_and_another_devices_autocast_changes_nothing() -> None:
    model = nn.Sequential(nn.Embedding(5, D), nn.Linear(D, D))
    tokens = torch.randint(5, (3, 2))
    with torch.autocast("cpu", torch.bfloat16):
        found = pergrad.grads(model, squares, tokens)
    assert found["0.weight"].dtype is torch.float32

    x = torch.randn(3, D)
    linear = nn.Linear(D, D)
    plain = pergrad.grads(linear, squares, x)
    with (
        torch.autocast("cuda", torch.bfloat16, enabled=True)
        if torch.cuda.is_available()
        else (torch.autocast("cpu", torch.bfloat16, enabled=False))
    ):
        assert torch.equal(pergrad.grads(linear, squares, x)["weight"], plain["weight"])


# -- outputs


def test_several_outputs_stay_what_they_were() -> None:
    def pair(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        if has_torch_function((x, w)):
            return handle_torch_function(pair, (x, w), x, w)  # type: ignore[no-any-return]
        return x * w, x + w

    def rule(grad_output: Any, x: Tensor, w: Tensor) -> dict[str, Tensor]:
        first, second = grad_output
        return {"w": (first * x + second).sum(1)}

    pergrad.implements_per_sample_grads(pair)(rule)
    kinds: list[type] = []

    def forward(m: Any, x: Tensor) -> Tensor:
        result = pair(x, m.w)
        kinds.append(type(result))
        return result[0] * result[1]

    try:
        model = Formula(forward, w=numbers(D))
        for _ in range(2):
            assert_as_the_loop(model, numbers(D, D))
        assert set(kinds) == {tuple}
    finally:
        RULES.pop(pair)


def test_an_output_that_lost_its_samples_is_refused_with_the_reason() -> None:
    def mixes(x: Tensor, w: Tensor) -> Tensor:
        if has_torch_function((x, w)):
            return handle_torch_function(mixes, (x, w), x, w)  # type: ignore[no-any-return]
        return (x * w).flip(0).cumsum(0)

    pergrad.implements_per_sample_grads(mixes)(lambda grad_output, x, w: {"w": grad_output.sum(1)})
    model = Formula(lambda m, x: mixes(x, m.w), w=numbers(D))
    try:
        for needs_grad in (False, True, False):  # a gradient flows to the weight in any case
            x = numbers(3, D).requires_grad_(needs_grad)
            with pytest.raises(
                UnsupportedFunctionError, match=r"'w'.*mixes or reorders the samples"
            ):
                pergrad.grads(model, squares, x)
    finally:
        RULES.pop(mixes)


def test_arguments_by_name_reach_the_function_and_the_rule(times: Any) -> None:
    registered(times)
    for call in (
        lambda m, x: times(w=m.w, x=x, scale=3.0),
        lambda m, x: times(x, scale=2.0, power=2, w=m.w),
        lambda m, x: F.linear(x, bias=m.w, weight=m.v),
        lambda m, x: F.layer_norm(x, (D,), eps=0.1, bias=m.w, weight=m.w),
    ):
        for _ in range(2):
            assert_as_the_loop(Formula(call, w=numbers(D), v=numbers(D, D)), numbers(3, D))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_parameter_beside_a_derived_weight_keeps_neither_from_its_gradient(
    needs_grad: bool,
) -> None:
    for function in (
        lambda m, x: F.linear(x, m.w, m.v * 2),
        lambda m, x: F.linear(x, m.w.exp(), m.v),
        lambda m, x: F.layer_norm(x, (D,), m.v, m.v.tanh()),
    ):
        model, x = Formula(function, w=numbers(D, D), v=numbers(D)), numbers(D, D)
        found = pergrad.grads(model, squares, x.clone().requires_grad_(needs_grad))
        for name, rows in loop_grads(model, squares, x).items():
            assert_near(found[name], rows, name)


def test_the_output_of_a_known_plan_has_its_samples_where_they_are() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = F.linear(x.transpose(0, 1), m.w)
        return F.linear(F.linear(h, m.w), m.w, m.v).transpose(0, 1)

    for _ in range(3):
        assert_as_the_loop(Formula(forward, w=numbers(D, D), v=numbers(D)), numbers(D, D, D))


# -- names and errors


def test_functions_are_named_as_one_would_write_them(times: Any) -> None:
    assert qualified_name(F.linear) == "torch.nn.functional.linear"
    assert qualified_name(Tensor.add) == "torch.Tensor.add"
    assert qualified_name(torch.add) == "torch.add"
    assert qualified_name(times) == f"{__name__}.{times.__qualname__}"

    def inside() -> None: ...

    inside.__module__ = "torch"  # by itself, a claim
    assert qualified_name(inside) != "torch.inside"
    own = named("inside")
    own.__module__ = "torch"
    assert qualified_name(own) == "torch.inside"


def test_an_unsupported_function_is_named_with_its_parameters_reason_and_remedy() -> None:
    class W:
        def __init__(self, name: str, *shape: int) -> None:
            self.name, self.value = name, numbers(*shape)

    error = unsupported(F.linear, [W("a.w", 2, 3), W("b", 2)], "it is late")  # type: ignore[list-item]
    assert isinstance(error, UnsupportedFunctionError)
    name = "torch.nn.functional.linear"
    assert str(error) == (
        "Expanded Weights encountered but cannot handle function linear: "
        f"`{name}` on parameter 'a.w' (shape (2, 3)) and 'b' (shape (2,)): it is late. "
        f"Register a rule with @pergrad.implements_per_sample_grads({name}), or freeze the parameter."
    )
