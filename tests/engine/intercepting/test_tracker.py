"""The tracker: whose samples a tensor has, by tag, by shape, by what made it, and by memory of such calls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.engine.intercepting import tracker as module
from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.samples.layouts import Constant, Lost, Owners, Samples
from pergrad.engine.samples.sizes import BatchSize
from pergrad.errors import MixedSamplesError
from tests.engine.exactness import Case, Formula, assert_exact, numbers, of
from tests.engine.trackers import N, samples, tracker_of, use, with_root

# -- tensors of unknown origin


@pytest.mark.parametrize(
    ("shape", "batch_dim", "dim"),
    [((N, 2), 0, 0), ((N,), 0, 0), ((2, N), 1, 1), ((N, N), 1, 1), ((N, N), 0, 0)],
)
def test_a_stranger_is_as_its_shape_shows(shape: tuple[int, ...], batch_dim: int, dim: int) -> None:
    found = tracker_of(batch_dim=batch_dim).layout(numbers(*shape))
    assert isinstance(found, Samples)
    assert found.key == (dim, 1, 1)


@pytest.mark.parametrize(
    ("shape", "batch_dim"), [((3, N), 0), ((), 0), ((N,), 1), ((N, 3), 1), ((N + 1,), 0)]
)
def test_a_stranger_of_another_shape_is_constant(shape: tuple[int, ...], batch_dim: int) -> None:
    assert isinstance(tracker_of(batch_dim=batch_dim).layout(numbers(*shape)), Constant)


def test_what_belongs_to_the_model_is_constant_whatever_its_shape() -> None:
    own = numbers(N, N)
    tracker = tracker_of(own=(own,))
    assert tracker.tag(own) is tracker.constant
    assert isinstance(tracker.layout(own.clone()), Samples)


def test_in_the_forward_strangers_are_constant_and_afterwards_only_in_a_recomputation() -> None:
    tracker, stranger, other = tracker_of(), numbers(N, 2), numbers(N, 2)
    assert not tracker.untagged_are_constant
    tracker.untagged_are_constant = True
    assert tracker.layout(stranger) is tracker.constant
    tracker.untagged_are_constant = False
    assert isinstance(tracker.layout(stranger), Samples)
    seen: list[Any] = []

    class Recomputes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.extend([tracker.layout(stranger), tracker.layout(other)])
            return grad

    Recomputes.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert seen[0] is tracker.constant
    assert isinstance(seen[1], Samples)


def test_tags_of_another_scope_mean_nothing() -> None:
    tracker, earlier = tracker_of(), tracker_of()
    t = numbers(3, N)
    earlier.mark(t, earlier.scope.samples(1))
    assert earlier.knows(t)
    assert not tracker.knows(t)
    assert tracker.tag(t) is tracker.constant
    assert tracker.mark_input(t, 0)
    assert tracker.knows(t)
    assert tracker.read(torch.sin, (t,), {})[1] == [tracker.constant]


def test_a_parameter_is_its_weight_and_constant_as_a_layout() -> None:
    tracker = tracker_of()
    w = with_root(tracker, N, 2)
    assert tracker.tag(w) is tracker.roots[id(w)]
    assert tracker.weight_of(w) is tracker.roots[id(w)]
    assert tracker.layout(w) is tracker.constant
    x = samples(tracker, N, 2)
    assert tracker.weight_of(x) is None
    assert isinstance(tracker.layout(x), Samples)


# -- inputs and sizes


def test_an_input_is_marked_once() -> None:
    tracker, t = tracker_of(), numbers(3, N)
    assert not tracker.knows(t)
    assert tracker.mark_input(t, 1)
    assert not tracker.mark_input(t, 0)
    assert tracker.layout(t) == tracker.scope.samples(1)
    constant = numbers(3)
    assert tracker.mark_input(constant, 0)
    assert tracker.layout(constant) is tracker.constant
    Tracker.unmark(t, t, numbers(2))
    assert not tracker.knows(t)


def test_the_size_of_the_samples_dimension_remembers_what_it_counts() -> None:
    tracker = tracker_of()
    for _ in range(2):  # the second time from memory
        x = samples(tracker, N, N, dim=1)
        shape = tracker.tagged(x, x.shape)
        assert shape == (N, N)
        assert [type(s) for s in shape] == [int, BatchSize]
        y = samples(tracker, N, N)
        assert [type(s) for s in tracker.tagged(y, y.shape)] == [BatchSize, int]
    constant = numbers(3)
    assert all(type(s) is int for s in tracker.tagged(constant, constant.shape))
    w = with_root(tracker, N)
    assert all(type(s) is int for s in tracker.tagged(w, w.shape))


# -- signatures


def signature(tracker: Tracker, func: Any, *args: Any, **kwargs: Any) -> Any:
    return tracker.read(func, args, kwargs)[2]


def test_tensors_and_their_tags_are_read_in_order_from_any_depth() -> None:
    tracker = tracker_of()
    w = with_root(tracker, 2)
    a, b, c, d = (samples(tracker, N, k) for k in range(1, 5))
    tensors, tags, _ = tracker.read(torch.cat, ([a, (w, b)], c), {"out": d, "more": {"x": w}})
    assert list(map(id, tensors)) == list(map(id, [a, w, b, c, d, w]))
    assert [tag.is_weight for tag in tags] == [False, True, False, False, False, True]
    assert signature(tracker, torch.cat, [a, (w, b)], c, out=d) is not None


def test_equal_calls_have_equal_signatures_also_in_another_scope() -> None:
    first, second = tracker_of(), tracker_of()
    found = [
        signature(t, F.linear, samples(t, N, 2), with_root(t, 3, 2), bias=None)
        for t in (first, second)
    ]
    assert found[0] == found[1]
    assert found[0] is not None
    assert hash(found[0]) == hash(found[1])


def test_calls_that_differ_in_anything_have_different_signatures() -> None:
    tracker = tracker_of()
    x, w = samples(tracker, N, N), with_root(tracker, N, N)
    constant = tracker_of().constant
    fixed = numbers(N, N)
    tracker.mark(fixed, tracker.constant)
    assert constant.key == tracker.constant.key
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (torch.add, (x, w), {}),
        (torch.mul, (x, w), {}),
        (torch.add, (w, x), {}),
        (torch.add, (x, fixed), {}),
        (torch.add, (x, samples(tracker, N, N, dim=1)), {}),
        (torch.add, (x, with_root(tracker, N, 1)), {}),
        (torch.add, (x, w), {"alpha": 2}),
        (torch.add, (x, w), {"alpha": 3}),
        (torch.add, (x, w), {"beta": 2}),
        (torch.add, (x, w, 2), {}),
        (torch.add, (x, w, True), {}),
        (torch.add, (x, w, 1), {}),
        (torch.add, (x, w, BatchSize(1)), {}),
        (torch.add, ([x, w],), {}),
        (torch.add, ((x, w),), {}),
        (torch.add, ([x], w), {}),
        (torch.add, (x.detach().float(), w), {}),
        (torch.add, (x, w, slice(0, 1)), {}),
        (torch.add, (x, w, slice(0, 2)), {}),
    ]
    found = [tracker.read(func, args, kwargs)[2] for func, args, kwargs in calls]
    assert None not in found
    assert len(set(found)) == len(calls)
    other = tracker_of(N - 1)
    y = numbers(N, N)
    other.mark(y, other.scope.samples(0))
    assert signature(other, torch.sin, y) != signature(tracker, torch.sin, x)


def test_what_cannot_be_compared_has_no_signature() -> None:
    tracker = tracker_of()
    x = samples(tracker, N, 2)
    owned = numbers(5, 2)
    tracker.mark(owned, Owners(tracker.scope, 0, torch.tensor([0, 0, 1, 2, 3])))
    lost = numbers(2)
    tracker.mark(lost, tracker.scope.lost("no"))
    for value in (owned, lost, {"a": 1}, object(), [owned], [object()], {"a": x}):
        assert signature(tracker, torch.sin, value, x) is None
        assert signature(tracker, torch.sin, x, value) is None
        assert signature(tracker, torch.sin, x, out=value) is None
        assert signature(tracker, torch.sin, value, out=x) is None


# -- the layouts of outputs


def run(tracker: Tracker, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    output = func(*args, **kwargs)
    tracker.propagate(func, args, kwargs, output)
    return output


@pytest.mark.parametrize("times", [1, 2])
def test_outputs_have_the_same_layouts_worked_out_and_from_memory(times: int) -> None:
    for _ in range(times):
        tracker = tracker_of()
        x = samples(tracker, N, 3, N, grad=True)
        assert tracker.layout(run(tracker, torch.sin, x)).key == (0, 1, 1)  # type: ignore[union-attr]
        assert tracker.layout(run(tracker, torch.transpose, x, 0, 2)).key == (2, 1, 1)  # type: ignore[union-attr]
        parts = run(tracker, torch.chunk, x, 3, 1)
        assert [tracker.layout(t).key for t in parts] == [(0, 1, 1)] * 3  # type: ignore[union-attr]
        pair = run(tracker, torch.max, x, 1)
        assert [tracker.layout(t).key for t in pair] == [(0, 1, 1)] * 2  # type: ignore[union-attr]
        merged = run(tracker, torch.flatten, x, 0, 1)
        assert tracker.layout(merged).key == (0, 1, 3)  # type: ignore[union-attr]
        total = tracker.layout(run(tracker, torch.sum, x))
        assert isinstance(total, Lost)
        assert total.why == "total"
        assert total.scope is tracker.scope
        made = run(tracker, torch.ones_like, with_root(tracker, N))
        assert tracker.layout(made) == tracker.constant


def test_a_total_through_which_nothing_flows_is_a_constant_also_from_memory() -> None:
    for grad in (True, False, True):
        tracker = tracker_of()
        x = samples(tracker, N, 7, grad=grad)
        found = tracker.layout(run(tracker, torch.sum, x))
        assert isinstance(found, Lost if grad else Constant)
    tracker = tracker_of()
    x = samples(tracker, N, 7)
    output = torch.sum(x)
    tracker.propagate(torch.sum, (x,), {}, output, flows=True)
    assert isinstance(tracker.layout(output), Lost)
    x.requires_grad_()
    output = torch.sum(x)
    tracker.propagate(torch.sum, (x,), {}, output, flows=False)
    assert tracker.layout(output) == tracker.constant


def test_memory_is_used_for_calls_that_repeat_and_only_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worked_out: list[str] = []
    work_out = module.layouts_of_outputs

    def watched(call: Any) -> Any:
        worked_out.append(call.name)
        return work_out(call)

    monkeypatch.setattr(module, "layouts_of_outputs", watched)

    def counted(func: Callable[..., Any], *args: Any) -> int:
        worked_out.clear()
        for _ in range(3):
            tracker = tracker_of()
            given = [a(tracker) if callable(a) else a for a in args]
            run(tracker, func, *given)
        return len(worked_out)

    def x(tracker: Tracker) -> Tensor:
        return samples(tracker, N, 11, 3)

    def index(tracker: Tracker) -> Tensor:
        t = torch.tensor([0, 1, 2, 2])
        tracker.mark(t, tracker.constant)
        return t

    def integers(tracker: Tracker) -> Tensor:
        t = torch.ones(N, 11, 3, dtype=torch.long)
        tracker.mark(t, tracker.scope.samples(0))
        return t

    def constant(tracker: Tracker) -> Tensor:
        t = numbers(11, 3)
        tracker.mark(t, tracker.constant)
        return t

    assert counted(torch.cos, x) <= 1
    assert counted(torch.add, x, integers) <= 1  # elementwise, whatever the dtype
    assert counted(torch.transpose, integers, 0, 1) <= 1
    assert counted(torch.relu, constant) <= 1
    assert counted(F.embedding, integers, constant) <= 1
    assert counted(torch.index_select, x, 0, index) == 3  # by value
    assert counted(Tensor.mul_, x, 2.0) == 3  # in place
    assert counted(Tensor.__getitem__, x, index) == 3


def test_the_layouts_of_a_signature_may_be_asked_for() -> None:
    tracker = tracker_of()
    x = samples(tracker, N, 13)
    run(tracker, torch.tan, x)
    assert tracker.known(signature(tracker, torch.tan, x)) == ((0, 1, 1),)
    assert tracker.known(("never",)) is None
    assert not tracker.recall(None, x)


def test_a_layout_of_a_key_is_made_once() -> None:
    tracker = tracker_of()
    assert tracker.layout_for((1, 2, 3)) is tracker.layout_for((1, 2, 3))
    assert tracker.layout_for((1, 2, 3)) == tracker.scope.samples(1, 2, 3)
    assert tracker.layout_for(tracker.constant.key) is tracker.constant


def test_functions_without_tensors_in_their_results_are_passed_over() -> None:
    tracker = tracker_of()
    x = samples(tracker, N, 2)
    tracker.propagate(torch.is_tensor, (x,), {}, True)
    tracker.propagate(Tensor.tolist, (x,), {}, [1.0])
    tracker.propagate(Tensor.dim, (x,), {}, None)


# -- writes in place


def test_a_write_into_part_of_a_constant_gives_it_the_samples_of_the_value() -> None:
    tracker = tracker_of()
    target, value = torch.zeros(N, 3, dtype=torch.float64), samples(tracker, N)
    tracker.mark(target, tracker.constant)
    key = (slice(None), 1)
    target[key] = value
    tracker.propagate(Tensor.__setitem__, (target, key, value), {}, None)
    assert tracker.layout(target).key == (0, 1, 1)  # type: ignore[union-attr]
    untouched = numbers(N, 3)
    tracker.mark(untouched, tracker.constant)
    untouched[key] = 1.0
    tracker.propagate(Tensor.__setitem__, (untouched, key, 1.0), {}, None)
    assert tracker.layout(untouched) is tracker.constant


def test_samples_written_through_a_view_are_found_in_what_is_behind_it() -> None:
    tracker = tracker_of()
    base = torch.zeros(3, N, dtype=torch.float64)
    tracker.mark(base, tracker.constant)
    row, other = base[0], base[1]
    for view in (row, other):
        tracker.mark(view, tracker.constant)
    run(tracker, Tensor.add_, row, use(tracker, N))
    assert tracker.layout(row).key == (0, 1, 1)  # type: ignore[union-attr]
    assert tracker.layout(base).key == (1, 1, 1)  # type: ignore[union-attr]
    assert isinstance(tracker.layout(other), Constant | Samples)  # none of its numbers has changed
    assert tracker.layout(base) is tracker.layout(base), "judged once"


def test_samples_that_meet_behind_a_view_are_an_error_once_a_gradient_flows() -> None:
    tracker = tracker_of()
    base = torch.zeros(2, N, dtype=torch.float64)
    tracker.mark(base, tracker.scope.samples(1))
    x = use(tracker, N)
    row = base[0]
    tracker.mark(row, tracker.scope.samples(0))
    with torch.no_grad():
        assert tracker.layout(base) == tracker.scope.samples(1)
    row.copy_(x.softmax(0))  # out of sight
    found = tracker.layout(base)
    assert isinstance(found, Lost)
    assert found.why == "unknown"
    with pytest.raises(MixedSamplesError, match="out of sight"):
        base.sum().backward()


def test_a_write_in_another_order_behind_a_view_is_seen() -> None:
    tracker = tracker_of()
    base = samples(tracker, N, 2)
    base[:, 0].copy_(use(tracker, N).flip(0))  # out of sight
    assert isinstance(tracker.layout(base), Lost)
    kept = samples(tracker, N, 2)
    kept[:, 0].copy_(use(tracker, N))
    assert tracker.layout(kept) == tracker.scope.samples(0)


def test_leaves_with_a_gradient_that_are_not_of_the_model_are_strangers() -> None:
    own, root_of = numbers(2).requires_grad_(), tracker_of()
    tracker = tracker_of(own=(own,))
    root = with_root(tracker, 2)
    stranger, data = numbers(N, 2).requires_grad_(), numbers(N, 2)
    made = stranger * 1
    for t in (own, root, stranger, data, made):
        tracker.layout(t)
    assert list(tracker.strangers) == [id(stranger)]
    assert not root_of.strangers


def test_a_write_that_changes_no_layout_leaves_what_is_behind() -> None:
    tracker = tracker_of()
    base = samples(tracker, N, 3)
    view = base[:, 0]
    tracker.mark(view, tracker.scope.samples(0))
    run(tracker, Tensor.mul_, view, 2.0)
    assert tracker.layout(base) == tracker.scope.samples(0)
    tracker.mark(view, tracker.constant)
    run(tracker, Tensor.mul_, view, 2.0)
    assert tracker.layout(base) == tracker.scope.samples(0)


def test_data_behind_a_view_has_the_samples_that_are_written_to_it() -> None:
    tracker = tracker_of()
    constant = torch.zeros(3, N, dtype=torch.float64)
    tracker.mark(constant, tracker.constant)
    row, other = constant[0], constant.view(-1)[2 * N :]
    for view in (row, other):
        tracker.mark(view, tracker.constant)
    run(tracker, Tensor.add_, row, samples(tracker, N))
    assert tracker.layout(constant) == tracker.scope.samples(1)
    assert tracker.layout(other) == tracker.scope.samples(0)


@pytest.mark.parametrize(
    "write",
    [
        lambda tracker, t, moved: run(tracker, Tensor.copy_, t, moved),
        lambda tracker, t, moved: run(tracker, torch.mul, moved, 2.0, out=t),
    ],
    ids=["copy_", "out"],
)
@pytest.mark.parametrize("grad", [True, False])
def test_samples_written_over_others_stay_in_their_order(write: Any, grad: bool) -> None:
    tracker = tracker_of()
    t, moved = samples(tracker, N, 3), samples(tracker, N, 3)
    order = tracker.scope.owners(0, torch.arange(N).flip(0))
    tracker.mark(moved, order)
    with torch.set_grad_enabled(grad):
        write(tracker, t, moved)
    assert tracker.layout(t) == order


# -- against the loop


def sizes_and_writes(m: Any, x: Tensor) -> Tensor:
    b, t, d = x.shape
    out = torch.zeros(b, t, d, dtype=x.dtype)
    out[:, 0] = x[:, 1] * m.w
    out = out + m.w.expand(b, t, d) * x
    return out.view(b * t, d).reshape(b, -1)[:, : x.size(-1)] + x.new_ones(b, d) * m.w


@pytest.mark.parametrize("size", [1, 3, N])
def test_sizes_and_writes_give_the_gradients_of_the_loop(size: int) -> None:
    assert_exact(Case(lambda: Formula(sizes_and_writes, w=numbers(N)), of((N, N))), size)


def test_data_of_an_earlier_scope_is_read_by_its_shape() -> None:
    earlier, later = tracker_of(), tracker_of()
    t = torch.zeros(2, N)
    with torch.no_grad():  # tagged as data
        earlier.mark(t, earlier.scope.samples(1))
    assert earlier.read(torch.sin, (t,), {})[1] == [earlier.scope.samples(1)]
    assert later.read(torch.sin, (t,), {})[1] == [later.constant]
