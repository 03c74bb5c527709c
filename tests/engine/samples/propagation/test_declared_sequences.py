"""Layouts through the layers of recurrent networks: each row must be one sample's sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Constant, Layout, Lost, Owners, Samples, Scope
from pergrad.engine.samples.propagation.table import Call, handler_of
from pergrad.rules.recurrence import Steps, linear_over_steps, recurrent_states, unrolled

SCOPE = Scope(3)


def layouts(
    function: object, args: tuple[object, ...], given: list[tuple[Tensor, Layout]], outputs: int = 1
) -> list[Layout]:
    """Apply the function's handler to a call with these arguments, of whose tensors layouts are given."""
    scope = given[0][1].scope
    made = [torch.ones(6, 3, 2, requires_grad=True) * 1 for _ in range(outputs)]
    tensors, known = [t for t, _ in given], [layout for _, layout in given]
    call = Call(scope, function, args, {}, made, tensors, known)  # type: ignore[arg-type]
    handler = handler_of(function)  # type: ignore[arg-type]
    assert handler is not None
    found = handler(call)
    assert found is not None
    return [*found] if isinstance(found, list | tuple) else [found]  # type: ignore[list-item]


def of_steps(x: Tensor, layout: Layout, steps: Steps) -> Layout:
    (found,) = layouts(unrolled, (None, steps, x), [(x, layout)])
    return found


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_beside_the_steps_stay_with_their_samples(dim: int) -> None:
    steps, x = Steps(dim, reverse=False), torch.ones(3, 3, 2)  # as many steps as samples
    assert of_steps(x, SCOPE.samples(1 - dim), steps) == SCOPE.samples(1 - dim)
    mixed = of_steps(x, SCOPE.samples(dim), steps)
    assert isinstance(mixed, Lost)
    assert mixed.why == "mixed"


def test_owners_of_rows_stay_with_them() -> None:
    owners = Owners(SCOPE, 1, torch.tensor([2, 0, 1]))
    assert of_steps(torch.ones(4, 3, 2), owners, Steps(0, reverse=False)) is owners


@pytest.mark.parametrize(
    ("owner", "is_one"), [([1, 0, 2, 1, 0, 1], True), ([1, 0, 2, 0, 1, 1], False)]
)
def test_a_packed_row_belongs_to_one_sample_at_every_step(owner: list[int], is_one: bool) -> None:
    layout = Owners(SCOPE, 0, torch.tensor(owner))
    found = of_steps(torch.ones(6, 2), layout, Steps(0, reverse=False, sizes=(3, 2, 1)))
    assert (found is layout) == is_one
    assert isinstance(found, Owners if is_one else Lost)


def test_what_is_no_layout_of_samples_is_handed_on() -> None:
    assert isinstance(
        of_steps(torch.ones(4, 3, 2), SCOPE.constant(), Steps(0, reverse=False)), Constant
    )


def test_all_rows_are_of_the_only_sample() -> None:
    scope, x = Scope(1), torch.ones(4, 3, 2)
    assert of_steps(x, scope.samples(0, 1, 4), Steps(0, reverse=False)) == scope.samples(0, 1, 4)
    args = (None, x, (x,), x)
    found = layouts(recurrent_states, args, [(x, scope.samples(1, 1, 3))], outputs=2)
    assert found == [scope.samples(0, 1, 6)] * 2


def test_the_output_is_as_the_steps_and_the_states_are_as_the_first() -> None:
    start, hidden = torch.ones(3, 2), torch.ones(4, 3, 2)
    args = (Steps(0, reverse=False), torch.ones(4, 3, 2), (start, start), hidden)
    given = [(start, SCOPE.samples(0)), (hidden, SCOPE.samples(1))]
    output, *states = layouts(recurrent_states, args, given, outputs=3)  # type: ignore[arg-type]
    assert output == SCOPE.samples(1)
    assert states == [SCOPE.samples(0)] * 2


@pytest.mark.parametrize(
    ("sizes", "of_hidden"), [(None, Owners(SCOPE, 1, torch.tensor([2, 0, 1]))), ((3, 1), None)]
)
def test_states_of_other_samples_than_the_steps_are_refused(sizes: Any, of_hidden: Any) -> None:
    start, hidden = torch.ones(3, 2), torch.ones(4, 3, 2)
    of_hidden = of_hidden or Owners(SCOPE, 0, torch.tensor([2, 0, 1, 2]))
    args = (Steps(0, reverse=False, sizes=sizes), hidden, (start,), hidden)
    for owner, is_same in (([2, 0, 1], True), ([0, 1, 2], False)):
        given = [(start, Owners(SCOPE, 0, torch.tensor(owner))), (hidden, of_hidden)]
        output, _ = layouts(recurrent_states, args, given, outputs=2)
        assert isinstance(output, Owners if is_same else Lost)


def test_several_samples_in_one_sequence_are_refused() -> None:
    start, hidden = torch.ones(3, 2), torch.ones(4, 3, 2)
    args = (None, torch.ones(4, 3, 2), (start,), hidden)
    given = [(hidden, SCOPE.lost("by a test", "mixed")), (start, SCOPE.samples(0))]
    found = layouts(recurrent_states, args, given, outputs=2)  # type: ignore[arg-type]
    assert len(found) == 2
    for layout in found:
        assert isinstance(layout, Lost)
        assert layout.why == "mixed"
        assert "treats several samples as one sequence" in layout.reason


def test_a_linear_map_of_all_steps_is_as_its_input() -> None:
    x, w = torch.ones(4, 3, 2), torch.ones(2, 2)
    (found,) = layouts(linear_over_steps, (x, w), [(w, SCOPE.constant()), (x, SCOPE.samples(1))])
    assert isinstance(found, Samples)
    assert found == SCOPE.samples(1)
