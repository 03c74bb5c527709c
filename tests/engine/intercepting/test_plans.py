"""Plans: what of a call is kept for its rule, where its weights are, and when the rule does not cover it."""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.engine.collecting.ledger import UseCounter
from pergrad.engine.intercepting.plans import Plan, plan_of
from pergrad.engine.intercepting.weights import Root
from pergrad.engine.samples.layouts import ROWS, Layout, Owners, Scope
from pergrad.factors import Factor
from pergrad.rules import RULES, Rule, ShapeOnly
from pergrad.runtime.queue import Queue
from tests.engine.exactness import numbers

N = 3
SCOPE = Scope(N)


class Nowhere:
    passes = 1
    queue = Queue()

    def expects(self, name: str) -> bool:
        return True

    def add(self, name: str, factor: Factor) -> None: ...


def weight(*shape: int) -> tuple[Tensor, Root]:
    value = numbers(*shape)
    return value, Root(
        SCOPE, "w", value, UseCounter(), Nowhere(), torch.zeros((), requires_grad=True)
    )


def rule_of(
    gradients: Callable[..., Any] = lambda grad_output, x, w, b=None, k=1: {},
    names: tuple[str, ...] = ("x", "w", "b", "k"),
    weights: Any = None,
    **options: Any,
) -> Rule:
    given = {"check": None, "casts_under_autocast": False, "symmetric": False, "merges_rows": False}
    return Rule(gradients, names, weights, **{**given, "results": {}, **options})


def plan(
    rule: Rule, *args: Any, tags: list[Any], func: Callable[..., Any] = F.linear, **kwargs: Any
) -> Plan | None:
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    return plan_of(rule, func, args, kwargs, tensors, tags)


def made(*args: Any, **kwargs: Any) -> Plan:
    found = plan(*args, **kwargs)
    assert found is not None
    return found


ROWS_OF: Layout = SCOPE.samples(0)


# -- what is where


def test_arguments_are_found_by_name_and_place_however_they_are_given() -> None:
    (w, root), x, b = weight(2, 4), numbers(N, 4), numbers(2)
    rule = rule_of(weights={"w": ("x",), "b": ()})
    by_place = made(rule, x, w, b, 7, tags=[ROWS_OF, root, SCOPE.constant()])
    assert by_place.names == ("x", "w", "b", "k")
    assert by_place.tensors == (0, 1, 2)
    assert by_place.weights_at == ((1, 1),)
    assert by_place.weights == ("w",)
    assert dict(by_place.kept) == {"x": 0}
    by_name = made(rule, x, k=7, b=b, w=w, tags=[ROWS_OF, SCOPE.constant(), root])
    assert by_name.names == ("x", "k", "b", "w")
    assert by_name.tensors == (0, 2, 3)
    assert by_name.weights_at == ((2, 3),)
    assert dict(by_name.kept) == {"x": 0}
    assert by_name.rule is rule
    assert by_name.function is F.linear


def test_the_rule_gets_plain_arguments_shapes_of_weights_and_nothing_of_other_tensors() -> None:
    (w, root), x, b = weight(2, 4), numbers(N, 4), numbers(2)
    found = made(rule_of(), x, w, b, 7, tags=[ROWS_OF, root, SCOPE.constant()]).arguments
    assert found == {"x": None, "w": ShapeOnly(torch.Size([2, 4])), "b": None, "k": 7}


def test_a_list_is_copied_and_a_tuple_is_not() -> None:
    (w, root), x = weight(2, 4), numbers(N, 4)
    sizes, pair = [1, 2], (3, 4)
    found = made(rule_of(), x, w, sizes, pair, tags=[ROWS_OF, root]).arguments
    sizes.append(3)
    assert found["b"] == [1, 2]
    assert found["k"] is pair


def test_a_rule_that_names_no_needs_keeps_all_tensors() -> None:
    (w, root), x, b = weight(2, 4), numbers(N, 4), numbers(2)
    found = made(rule_of(), x, w, b, tags=[ROWS_OF, root, SCOPE.constant()])
    assert dict(found.kept) == {"x": 0, "w": 1, "b": 2}


@pytest.mark.parametrize(("recorded", "kept"), [("w", {"x"}), ("b", set()), ("wb", {"x"})])
def test_only_what_the_recorded_weights_need_is_kept(recorded: str, kept: set[str]) -> None:
    (w, root), (b, other), x = weight(2, 4), weight(2), numbers(N, 4)
    tags = [
        ROWS_OF,
        *(
            t if n in recorded else SCOPE.constant()
            for n, t in zip("wb", (root, other), strict=True)
        ),
    ]
    rule = rule_of(weights={"w": ("x",), "b": ()})
    found = made(rule, x, w, b, tags=tags)
    assert set(found.kept) == kept
    assert found.weights == tuple(recorded)
    assert found.weights_at == tuple((k, k) for k, n in enumerate("xwb") if n in recorded)


# -- where samples are


def test_the_dimension_of_samples_is_told_and_zero_for_a_single_one() -> None:
    (w, root), x = weight(2, 4), numbers(5, N, 4)
    layout = SCOPE.samples(1)
    found = made(rule_of(), x, w, tags=[layout, root])
    assert found.dims == {"x": 1}
    assert found.layouts == {"x": layout}
    alone = Scope(1).samples(1)
    assert made(rule_of(), numbers(5, 1, 4), w, tags=[alone, root]).dims == {"x": 0}


def test_owners_of_rows_are_found_among_the_arguments() -> None:
    (w, root), x = weight(2, 4), numbers(5, 4)
    owners = Owners(SCOPE, 0, torch.tensor([0, 0, 1, 2, 2]))
    found = made(rule_of(), x, w, tags=[owners, root])
    assert found.by_owner is owners
    assert found.dims == {"x": 0}
    assert made(rule_of(), numbers(N, 4), w, tags=[ROWS_OF, root]).by_owner is None


@pytest.mark.parametrize(
    ("merges", "shape", "layout", "in_front"),
    [
        (True, (N, 5, 4), SCOPE.samples(0), True),
        (False, (N, 5, 4), SCOPE.samples(0), False),
        (True, (N, 4), SCOPE.samples(0), False),
        (True, (5, N, 4), SCOPE.samples(1), False),
        (True, (2 * N, 5, 4), SCOPE.samples(0, 1, 2), False),
    ],
)
def test_rows_are_in_front_if_all_that_is_kept_has_them_there(
    merges: bool, shape: tuple[int, ...], layout: Layout, in_front: bool
) -> None:
    w, root = weight(2, 4)
    rule = rule_of(weights={"w": ("x",)}, merges_rows=merges, results={"found": "_saved"})
    found = made(rule, numbers(*shape), w, tags=[layout, root])
    assert found.has_rows_in_front is in_front
    assert found.results == ({"found": "_saved"} if layout.key == ROWS else {})
    assert found.output is None
    assert not found.is_all_in_front
    known = found.with_output(ROWS, 3)
    assert known.output == ROWS
    assert known.is_all_in_front is in_front
    assert not found.with_output(ROWS, 2).is_all_in_front
    assert not found.with_output((1, 1, 1), 3).is_all_in_front
    assert found.with_output((1, 1, 1), 3).output == (1, 1, 1)


# -- calls that the rule does not cover


def test_a_call_without_samples_or_with_lost_ones_is_not_covered() -> None:
    (w, root), x = weight(2, 4), numbers(N, 4)
    assert plan(rule_of(), x, w, tags=[SCOPE.constant(), root]) is None
    assert plan(rule_of(), x, w, tags=[SCOPE.lost("no"), root]) is None
    assert plan(rule_of(), x, w, numbers(2), tags=[ROWS_OF, root, SCOPE.lost("no")]) is None


def test_complex_numbers_are_not_covered() -> None:
    (w, root), x = weight(2, 4), numbers(N, 4)
    assert plan(rule_of(), x.to(torch.complex128), w, tags=[ROWS_OF, root]) is None
    tags = [ROWS_OF, root, SCOPE.constant()]
    assert plan(rule_of(), x, w, numbers(2).to(torch.complex128), tags=tags) is None


def test_tensors_in_lists_and_arguments_without_a_name_are_not_covered() -> None:
    (w, root), x = weight(2, 4), numbers(N, 4)
    assert plan_of(rule_of(), F.linear, ([x], w), {}, [x, w], [ROWS_OF, root]) is None
    assert plan(rule_of(names=("x", "w")), x, w, 1, tags=[ROWS_OF, root]) is None
    assert plan(rule_of(names=("x", "w")), x, w, tags=[ROWS_OF, root]) is not None


def test_a_weight_that_the_rule_has_no_gradient_for_is_not_covered() -> None:
    (w, root), x = weight(2, 4), numbers(N, 4)
    assert plan(rule_of(weights={"b": ()}), x, w, tags=[ROWS_OF, root]) is None
    assert plan(rule_of(weights={"w": (), "b": ()}), x, w, tags=[ROWS_OF, root]) is not None
    assert plan(rule_of(weights=None), x, w, tags=[ROWS_OF, root]) is not None


@pytest.mark.parametrize("symmetric", [False, True])
def test_an_argument_that_may_be_a_weight_carries_samples_only_if_the_rule_is_symmetric(
    symmetric: bool,
) -> None:
    (w, root), x, b = weight(2, 4), numbers(N, 4), numbers(N, 2)
    rule = rule_of(weights={"w": ("x",), "b": ()}, symmetric=symmetric)
    found = plan(rule, x, w, b, tags=[ROWS_OF, root, ROWS_OF])
    assert (found is not None) is symmetric


# -- functions that may return what they made before


def test_torchs_own_functions_make_their_outputs_and_those_of_others_may_not() -> None:
    def own(x: Tensor, w: Tensor) -> Tensor:
        return x

    nameless = types.FunctionType(own.__code__, {}, "nameless")
    nameless.__module__ = None  # type: ignore[assignment]
    (w, root), x = weight(2, 4), numbers(N, 4)
    made_by = {
        f: made(rule_of(), x, w, tags=[ROWS_OF, root], func=f).makes_its_output
        for f in (F.linear, torch.mul, Tensor.mul, F.layer_norm, own, nameless)
    }
    assert made_by == {
        F.linear: True,
        torch.mul: True,
        Tensor.mul: True,
        F.layer_norm: True,
        own: False,
        nameless: False,
    }


def test_a_plan_holds_no_tensor_and_no_weight() -> None:
    (w, root), x = weight(2, 4), numbers(N, 4)
    before = sys.getrefcount(w), sys.getrefcount(x), sys.getrefcount(root)
    found = made(RULES[F.linear], x, w, tags=[ROWS_OF, root])
    assert (sys.getrefcount(w), sys.getrefcount(x), sys.getrefcount(root)) == before
    assert found.weights == ("weight",)
    assert dict(found.kept) == {"input": 0}
