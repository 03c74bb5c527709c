"""The table of handlers, and what every handler may ask of a call."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import wrap_torch_function

from pergrad.engine.samples.layouts import Constant, Layout, Lost, Owners, Samples, Scope
from pergrad.engine.samples.propagation import table
from pergrad.engine.samples.propagation.table import (
    HANDLERS,
    Call,
    handler_of,
    is_by_value,
    is_own,
    moves_samples,
    name_of,
    refuse_lost,
    tensors_in,
)
from pergrad.errors import MixedSamplesError
from pergrad.rules.recurrence import linear_over_steps


def call_of(
    scope: Scope, *tensors: tuple[Tensor, Layout], output: Tensor, flows: bool | None = None
) -> Call:
    values, layouts = [t for t, _ in tensors], [layout for _, layout in tensors]
    return Call(scope, torch.add, tuple(values), {}, [output], values, layouts, flows)


def flowing(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True) * 1


def test_tensors_are_found_in_lists_tuples_and_dicts() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    found = tensors_in(a, [2, (b, "x")], {"k": {"c": c}}, None)
    assert [id(t) for t in found] == [id(a), id(b), id(c)]


NAMES: dict[str, list[Callable[..., Any]]] = {
    "add": [torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__],
    "matmul": [torch.matmul, Tensor.__matmul__, Tensor.__rmatmul__],
    "invert": [Tensor.__invert__],  # begins with i, and is no in-place form of `nvert`
    "T": [Tensor.T.__get__],
    "relu": [torch.relu, torch.relu_, torch.nn.functional.relu],
    "getitem": [Tensor.__getitem__],
}


@pytest.mark.parametrize("name", NAMES)
def test_all_forms_of_an_operation_have_one_name(name: str) -> None:
    assert {name_of(form) for form in NAMES[name]} == {name}


def test_an_argument_is_found_by_name_before_place() -> None:
    call = Call(Scope(2), torch.add, (1, 2), {"dim": 3}, [torch.ones(1)], [], [])
    assert call.argument(0, "axis", "dim") == 3
    assert call.argument(1, "other") == 2
    assert call.argument(2, "other") is None
    assert call.argument(2, "other", default=7) == 7


def test_what_is_no_argument_is_constant() -> None:
    scope, x = Scope(2), torch.ones(2)
    call = call_of(scope, (x, scope.samples(0)), output=torch.ones(2))
    assert call.layout(x) == scope.samples(0)
    assert isinstance(call.layout(x.clone()), Constant)


def test_gradients_flow_where_an_output_needs_one_or_where_it_is_said() -> None:
    scope = Scope(2)
    assert call_of(scope, output=flowing(2)).flows
    assert not call_of(scope, output=torch.ones(2)).flows
    assert call_of(scope, output=torch.ones(2), flows=True).flows
    assert not call_of(scope, output=flowing(2), flows=False).flows


def test_mixed_samples_are_an_error_once_a_gradient_flows_through_them() -> None:
    output = flowing(2)
    layout = call_of(Scope(2), output=output).mixed()
    assert isinstance(layout, Lost)
    assert layout.why == "mixed"
    refuse_lost(output, layout)
    with pytest.raises(MixedSamplesError, match="`add` mixes the samples"):
        output.sum().backward()


def test_mixed_samples_without_gradients_are_constant() -> None:
    assert isinstance(call_of(Scope(2), output=torch.ones(2)).mixed(), Constant)
    assert isinstance(call_of(Scope(2), output=torch.ones(2)).total(), Constant)


def test_a_total_is_lost_and_may_be_differentiated() -> None:
    output = flowing(2)
    layout = call_of(Scope(2), output=output).total()
    assert isinstance(layout, Lost)
    assert layout.why == "total"
    output.sum().backward()


def test_one_sample_cannot_be_lost_or_mixed_but_in_a_scalar() -> None:
    scope = Scope(1)
    call = call_of(scope, output=flowing(3, 2))
    assert call.lost("does things") == call.mixed() == scope.samples(0, 1, 3)
    scalar = call_of(scope, output=flowing())
    assert isinstance(scalar.lost("does things"), Lost)
    assert isinstance(scalar.mixed(), Lost)
    scalar.output.backward()  # the only sample is mixed with none


def test_arguments_agree_where_each_index_has_one_owner() -> None:
    scope = Scope(2)
    samples = scope.samples(0)
    same, other = Owners(scope, 0, torch.tensor([0, 1])), Owners(scope, 0, torch.tensor([1, 0]))
    call = call_of(scope, output=flowing(2))
    assert call.agreed([samples, samples]) is samples
    assert call.agreed([same, samples]) is samples
    assert call.agreed([samples, same]) is samples
    assert call.agreed([other, Owners(scope, 0, other.owner)]) is other
    for wrong in ([samples, other], [other, same], [samples, scope.samples(1)]):
        assert isinstance(call.agreed(wrong), Lost)
    assert isinstance(call.agreed([scope.samples(0, 1, 2), scope.samples(0, 2, 1)]), Lost)


def test_blocks_of_the_only_sample_agree() -> None:
    scope = Scope(1)
    call = call_of(scope, output=flowing(4))
    assert isinstance(call.agreed([scope.samples(0, 1, 4), scope.samples(0, 2, 2)]), Samples)


def test_what_is_picked_belongs_to_the_sample_of_its_index() -> None:
    scope = Scope(2)
    layout = scope.samples(0, 1, 2)
    call = call_of(scope, output=flowing(3))
    part = call.after_select(torch.ones(3), layout, 2)
    assert isinstance(part, Owners)
    assert part.dim == 0
    assert part.owner.tolist() == [1, 1, 1]
    assert isinstance(call.after_select(torch.tensor(1.0), layout, 2), Constant)
    picked = call.after_select(flowing(), layout, 2)
    assert isinstance(picked, Owners)
    assert picked.is_one
    assert picked.owner.tolist() == [1]


def test_a_handler_is_found_by_any_form_of_its_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HANDLERS, "trunc", None)  # put back at the end, as the next is
    before = set(table._BY_VALUE)

    @moves_samples("trunc", "no such", by_value=True)
    def handler(call: Call) -> Layout:
        return call.total()

    try:
        handler_of.cache_clear()
        assert handler_of(torch.trunc) is handler_of(Tensor.trunc_) is handler
        assert before | {"trunc", "no such"} == table._BY_VALUE
        assert is_by_value(torch.trunc)
        assert handler_of(operator.truth) is None
    finally:
        HANDLERS.pop("no such")
        table._BY_VALUE.intersection_update(before)
        handler_of.cache_clear()


def test_operations_are_by_shape_unless_said_otherwise() -> None:
    assert handler_of(linear_over_steps) is not None
    assert not is_by_value(linear_over_steps)
    assert not is_by_value(torch.add)


def test_decorators_make_no_function_torchs_own() -> None:
    @wrap_torch_function(lambda x: (x,))
    def gelu(x: Tensor) -> Tensor:
        return x - x.mean(0)

    @functools.wraps(F.relu)
    def relu(x: Tensor) -> Tensor:
        return x - x.mean(0)

    assert not is_own(gelu)
    assert not is_own(relu)
    assert is_own(F.relu)
    assert is_own(Tensor.__rpow__)  # decorated by torch itself
    assert name_of(gelu) not in HANDLERS


def test_data_in_the_order_of_the_samples_keeps_it_if_all_rows_are_as_many() -> None:
    scope = Scope(3)
    rows = scope.samples(0)
    call = call_of(scope, (torch.ones(3), rows), output=torch.ones(3))
    assert not call.flows

    def agreed(dim: int, owners: list[int]) -> Layout:
        return call.agreed([rows, Owners(scope, dim, torch.tensor(owners))])

    assert agreed(0, [2, 1, 0]) is rows
    assert isinstance(agreed(0, [0, 1, 1, 2]), Constant)
    assert isinstance(agreed(1, [2, 1, 0]), Constant)
    assert isinstance(call.agreed([rows, scope.samples(1)]), Constant)
