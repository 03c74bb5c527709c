"""Layouts themselves: what they say of each index, how rows are cut by them, whose they are."""

from collections.abc import Callable
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pergrad.engine.collecting.grad_samples import GradSampleSink
from pergrad.engine.collecting.ledger import UseCounter
from pergrad.engine.intercepting.recorder import Recorder
from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.samples import layouts
from pergrad.engine.samples.layouts import (
    Constant,
    Lost,
    Owners,
    Samples,
    Scope,
    after_reshape,
    samples_first,
)
from tests.engine.samples.propagation.dependence import Batched
from tests.engine.samples.propagation.inputs import batches
from tests.engine.samples.propagation.test_shaping import factorings

CPU = torch.device("cpu")
properties = settings(deadline=None, derandomize=True, max_examples=200)


@properties
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_samples_repeat_in_blocks(count: int, pre: int, post: int) -> None:
    layout = Scope(count).samples(0, pre, post)
    expected = [n for _ in range(pre) for n in range(count) for _ in range(post)]
    assert layout.size == len(expected)
    assert layout.owner_of_each(CPU).tolist() == expected


@properties
@given(batches())
def test_rows_are_cut_by_sample_in_order(batch: tuple[int, Batched]) -> None:
    count, x = batch
    scope = Scope(count)
    layout, owner = x.layout(scope), x.owner_of_each(scope)
    values = torch.arange(prod(x.shape)).view(x.shape)
    rows = samples_first(values, layout)
    if isinstance(layout, Owners):
        expected = [values.narrow(x.dim, k, 1) for k in range(x.shape[x.dim])]
    else:
        indices = owner.movedim(x.dim, 0).reshape(x.shape[x.dim], -1)[:, 0]
        expected = [
            values.index_select(x.dim, (indices == n).nonzero()[:, 0]) for n in range(count)
        ]
    assert torch.equal(rows, torch.stack(expected))


@properties
@given(batches(), st.integers(1, 4), st.data())
def test_layout_after_a_reshape_is_that_of_the_reshaped_owners(
    batch: tuple[int, Batched], rank: int, data: st.DataObject
) -> None:
    count, x = batch
    scope = Scope(count)
    shape = torch.Size(data.draw(st.sampled_from(list(factorings(prod(x.shape), rank)))))
    layout = after_reshape(x.layout(scope), torch.Size(x.shape), shape)
    if isinstance(layout, Lost):
        return
    assert isinstance(layout, Samples | Owners)
    if layout.size != shape[layout.dim]:
        return  # told as lost by the check that follows every handler
    told = layout.owner_of_each(CPU).view([-1 if d == layout.dim else 1 for d in range(rank)])
    assert torch.equal(told.expand(shape), x.owner_of_each(scope).reshape(shape))


def test_owners_in_the_plain_order_are_samples() -> None:
    scope = Scope(3)
    assert scope.owners(1, torch.arange(3)) == scope.samples(1)
    assert isinstance(scope.owners(1, torch.tensor([0, 2, 1])), Owners)
    assert isinstance(scope.owners(1, torch.arange(2)), Owners)


def test_moving_a_layout_changes_its_place_only() -> None:
    scope = Scope(3)
    for layout in (scope.samples(0, 2, 3), scope.owners(0, torch.tensor([2, 2]))):
        moved = layout.at(2)
        assert moved.dim == 2
        assert torch.equal(moved.owner_of_each(CPU), layout.owner_of_each(CPU))
        assert layout.at(0) is layout


def test_layout_of_another_scope_means_nothing() -> None:
    first, second = (Tracker(Scope(3), 0) for _ in range(2))
    x = torch.zeros(5, 3)
    first.mark(x, first.scope.samples(1))
    assert first.knows(x)
    assert not second.knows(x)
    assert first.layout(x) == first.scope.samples(1)
    assert isinstance(second.layout(x), Constant)


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_stranger_is_read_by_its_shape_unless_the_module_runs(batch_dim: int) -> None:
    tracker = Tracker(Scope(3), batch_dim)
    x, other = torch.zeros(3, 3), torch.zeros(4, 4)
    assert tracker.layout(x) == tracker.scope.samples(batch_dim)
    assert isinstance(tracker.layout(other), Constant)
    tracker.untagged_are_constant = True
    assert isinstance(tracker.layout(x), Constant)


def test_unmarked_tensor_has_no_trace() -> None:
    tracker, x = Tracker(Scope(3), 0), torch.zeros(3)
    tracker.mark(x, tracker.scope.samples(0))
    Tracker.unmark(x)
    Tracker.unmark(x)
    assert not vars(x)


def _recorded(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
    """Whose the rows of function(x) are, where the rows of x are the samples."""
    scope = Scope(len(x))
    tracker = Tracker(scope, 0)
    recorder = Recorder({})
    recorder.begin(tracker, UseCounter(), GradSampleSink({}, 1))
    tracker.mark(x, scope.samples(0))
    with recorder:
        y = function(x)
    layout = tracker.layout(y)
    assert isinstance(layout, Samples | Owners)
    assert layout.dim == 0
    return layout.owner_of_each(y.device).tolist()


def test_order_by_value_is_worked_out_for_each_call() -> None:
    """One that happens to be that of the samples says nothing about the next step."""
    assert _recorded(torch.tensor([1.0, 2.0, 3.0]), torch.argsort) == [0, 1, 2]
    assert _recorded(torch.tensor([3.0, 1.0, 2.0]), torch.argsort) == [1, 2, 0]


def test_strides_are_looked_at_for_each_call() -> None:
    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.as_strided((2, 2), (2, 1))

    x = torch.arange(4.0)
    assert _recorded(x.view(2, 2), rows) == [0, 1]
    with pytest.raises(AssertionError):  # the same call on other strides mixes the samples
        _recorded(x.view(2, 2).t(), rows)


def test_a_scope_knows_while_the_engine_itself_differentiates() -> None:
    scope, other = Scope(2), Scope(2)

    def fails() -> None:
        with scope.pulling_back():
            assert scope.is_pulling_back
            with scope.pulling_back():
                assert scope.is_pulling_back
            assert scope.is_pulling_back, "the outer one is still open"
            assert not other.is_pulling_back
            raise KeyError

    assert not scope.is_pulling_back
    with pytest.raises(KeyError):
        fails()
    assert not scope.is_pulling_back
    assert scope != other


@pytest.mark.parametrize(("owners", "are_apart"), [([0, 0, 1, 1], False), ([0, 1, 1, 1], True)])
def test_a_trace_notes_whether_rows_that_it_takes_together_have_one_owner(
    owners: list[int], are_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "is_traced", lambda _: True)
    scope = Scope(2)
    rows = Owners(scope, 0, torch.tensor(owners))
    found = after_reshape(rows, torch.Size((4, 3)), torch.Size((2, 6)))
    assert isinstance(found, Owners)
    assert (found.dim, found.owner.tolist()) == (0, [owners[0], owners[2]])
    assert list(map(bool, scope.misplaced)) == [are_apart]
