"""The steps of a probe, each by itself: proofs on the graph, shapes that grow, trials with other values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Lost, Owners, Samples, Scope
from pergrad.engine.samples.propagation import Call
from pergrad.engine.samples.propagation.probes import probing
from pergrad.engine.samples.propagation.probes.probing import layouts_by_probe
from pergrad.engine.samples.sizes import BatchSize
from pergrad.errors import MixedSamplesError
from pergrad.runtime.caches import Cache
from tests.engine.samples.propagation.calls import Tagged, call_of, described, of_torch, rows

C = torch.ones  # a constant
ROW = (0, 1, 1)
OWNERS = [4, 1, 1]


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for cache in ("_ANSWERS", "_BY_VALUES"):
        monkeypatch.setattr(probing, cache, Cache(__name__, f"{cache} of probes in a test"))


def kept(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x * 1


def by_numpy(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """As `kept`, by values: meta tensors have none."""
    x.detach().numpy()
    return x * 1


def second_only(x: Tensor, y: Tensor) -> Tensor:
    y.detach().numpy()
    return y * 1


def transposed(x: Tensor) -> Tensor:
    x.detach().numpy()
    return x.transpose(0, 1) * 1


def flipped(x: Tensor) -> Tensor:
    x.detach().numpy()
    return x.flip(0)


def interleaved(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 0)


def summed(x: Tensor) -> Tensor:
    x.detach().numpy()
    return x.sum(0)


def outer(x: Tensor) -> Tensor:
    return x.unsqueeze(0) * x.unsqueeze(1)


def flattened(x: Tensor) -> Tensor:
    return x.flatten()


def stretched(x: Tensor) -> Tensor:
    return torch.cat([x, x[:1]])


def centered(x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True)


def last_first(x: Tensor) -> Tensor:
    """Mixes the last sample into the first."""
    return torch.cat([x[:1] + x[-1:], x[1:]])


def second_first(x: Tensor) -> Tensor:
    """Mixes the second sample into the first."""
    return torch.cat([x[:1] + x[1:2], x[1:]])


def middle_first(x: Tensor) -> Tensor:
    """Mixes the sample in the middle into the first."""
    half = len(x) // 2
    return torch.cat([x[:1] + x[half : half + 1], x[1:]])


def first_last(x: Tensor) -> Tensor:
    """Mixes the first sample into the last."""
    return torch.cat([x[:-1], x[-1:] + x[:1]])


def choosy(x: Tensor) -> Tensor:
    """Refuses numbers of one sample beside another's: each sum of neighbours is bounded."""
    if not x.is_meta and (x[0] == x[1]).all():
        raise ValueError("no equal rows here")
    return x * 1


def fixed(x: Tensor) -> Tensor:
    """Refuses a batch of another size."""
    if not x.is_meta:
        x.detach().numpy()
        assert len(x) <= 5, "too long\nby far"
        return x * 1
    raise RuntimeError("meta")


def counting(x: Tensor) -> tuple[Tensor, ...]:
    return tuple((x * 1).unbind(0)) if len(x) < 9 else ()


def counting_values(x: Tensor) -> tuple[Tensor, ...]:
    x.detach().numpy()
    return tuple((x * 1).unbind(0))


def of_sizes(x: Tensor, size: int) -> Tensor:
    """Depends on no sample, by numbers: a zero times their sum."""
    return x.new_zeros(size, 2) + x.sum() * 0 + 1


def of_sum(x: Tensor, size: int) -> Tensor:
    return x.new_zeros(size, 2) + x.sum()


def of_list(xs: list[Tensor]) -> Tensor:
    return xs[0] * 1


def by_name(*, x: Tensor) -> Tensor:
    return x * 1


REFUSED = "refused"
# The function, its arguments, and the layouts: proved on the graph, and found by values.
Probe = tuple[Callable[..., Any], tuple[Any, ...], Any, Any]
PROBES: dict[str, Probe] = {
    "rows": (kept, (rows(5, 2),), [ROW], [ROW]),
    "rows, second": (kept, (rows(2, 5, dim=1),), [(1, 1, 1)], [(1, 1, 1)]),
    "rows, both": (kept, (rows(5, 5, dim=1),), [(1, 1, 1)], [(1, 1, 1)]),
    "rows of several": (kept, (rows(20, 2, pre=2, post=2),), [(0, 2, 2)], [(0, 2, 2)]),
    "rows of owners": (kept, (rows(3, 2, owners=OWNERS),), [(0, OWNERS)], [(0, OWNERS)]),
    "rows in a list": (of_list, ([rows(5, 2)],), [ROW], [ROW]),
    "doubled": (interleaved, (rows(5, 2),), [(0, 1, 2)], [(0, 1, 2)]),
    "doubled owners": (interleaved, (rows(3, 2, owners=OWNERS),), [REFUSED], [REFUSED]),
    "one row more": (stretched, (rows(5, 2),), [REFUSED], [REFUSED]),
    "flattened": (flattened, (rows(5, 2),), [(0, 1, 2)], [(0, 1, 2)]),
    "pairs": (outer, (rows(5),), [REFUSED], [REFUSED]),
    "centered": (centered, (rows(5, 2),), [REFUSED], [REFUSED]),
    "last to first": (last_first, (rows(5, 2),), [REFUSED], [REFUSED]),
    "second to first": (second_first, (rows(5),), [REFUSED], [REFUSED]),
    "middle to first": (middle_first, (rows(5, 2),), [REFUSED], [REFUSED]),
    "first to last": (first_last, (rows(5, 2),), [REFUSED], [REFUSED]),
    "refuses other values": (choosy, (rows(5, 2),), [ROW], [REFUSED]),
    "number of results": (counting, (rows(5, 2),), [REFUSED] * 5, [REFUSED] * 5),
    "number of results, by values": (
        counting_values,
        (rows(5, 2),),
        [REFUSED] * 5,
        [REFUSED] * 5,
    ),
    "in numpy": (by_numpy, (rows(5, 2),), [ROW], [ROW]),
    "in numpy, second": (by_numpy, (rows(2, 5, dim=1),), [(1, 1, 1)], [(1, 1, 1)]),
    "in numpy, several": (by_numpy, (rows(20, 2, pre=2, post=2),), [(0, 2, 2)], [(0, 2, 2)]),
    "in numpy, owners": (
        by_numpy,
        (rows(2, 3, dim=1, owners=OWNERS),),
        [(1, OWNERS)],
        [(1, OWNERS)],
    ),
    "in numpy, second argument": (
        second_only,
        (C(2), rows(2, 5, dim=1)),
        [(1, 1, 1)],
        [(1, 1, 1)],
    ),
    "in numpy, transposed": (transposed, (rows(5, 2),), [(1, 1, 1)], [(1, 1, 1)]),
    "in numpy, reversed": (flipped, (rows(5, 2),), [REFUSED], [REFUSED]),
    "in numpy, summed": (summed, (rows(5, 2),), [REFUSED], [REFUSED]),
    "fails with one more": (fixed, (rows(5, 2),), [ROW], [ROW]),
    "sizes": (of_sizes, (rows(5), BatchSize(5)), [ROW], [ROW]),
    "sizes, and a sum": (of_sum, (rows(5), BatchSize(5)), [REFUSED], [REFUSED]),
}


def frozen(value: Any) -> Any:
    """The argument without a gradient."""
    if isinstance(value, Tagged):
        return Tagged(value.value.detach(), value.place)
    return [frozen(v) for v in value] if isinstance(value, list) else value


# What functions of torch that only move elements are known to return.
MOVED: dict[str, Any] = {
    "doubled owners": [(0, [4, 4, 1, 1, 1, 1])],
    "one row more": [(0, [0, 1, 2, 3, 4, 0])],
    "number of results": [(0, [n, n]) for n in range(5)],
    "number of results, by values": [(0, [n, n]) for n in range(5)],
}


def found(call: Call) -> Any:
    return [
        REFUSED if why in ("mixed", "unknown") else why for why in described(layouts_by_probe(call))
    ]


@pytest.mark.parametrize("is_own", [True, False], ids=["of torch", "foreign"])
@pytest.mark.parametrize("name", PROBES)
def test_the_graph_decides_where_a_gradient_flows(name: str, is_own: bool) -> None:
    function, args, expected, _ = PROBES[name]
    function = of_torch(function) if is_own else function
    expected = MOVED.get(name, expected) if is_own else expected
    call = call_of(function, *args, count=5)
    assert found(call) == expected
    for t, layout in zip(call.outputs, expected, strict=True):
        if layout == REFUSED:
            with pytest.raises(MixedSamplesError, match=function.__name__):
                t.sum().backward()
        else:
            t.sum().backward(retain_graph=True)
    assert found(call_of(function, *args, count=5)) == expected  # also from the cache


@pytest.mark.parametrize("name", PROBES)
def test_other_values_decide_where_the_graph_cannot(name: str) -> None:
    function, args, _, expected = PROBES[name]
    function = of_torch(function)
    for _ in "twice":  # also from the cache
        call = call_of(function, *map(frozen, args), count=5, flows=True)
        assert found(call) == expected


@pytest.mark.parametrize("name", PROBES)
def test_data_from_a_foreign_function_is_as_the_functions_inside_say(name: str) -> None:
    function, args, _, _ = PROBES[name]
    call = call_of(function, *map(frozen, args), count=5)
    assert described(layouts_by_probe(call)) == ["constant"] * len(call.outputs)
    hints = [call.scope.samples(0)] * len(call.outputs)
    call.hints = hints
    assert layouts_by_probe(call) == hints


def test_arguments_by_name_are_followed() -> None:
    assert described(layouts_by_probe(call_of(by_name, x=rows(5, 2), count=5))) == [ROW]
    own = of_torch(lambda *, x: x * 1)
    data = call_of(own, x=frozen(rows(5, 2)), count=5, flows=True)
    assert described(layouts_by_probe(data)) == [ROW]


# -- what is kept


def counted(function: Callable[[Tensor], Tensor]) -> tuple[Callable[..., Any], list[int]]:
    runs: list[int] = []

    def counting_runs(x: Tensor) -> Tensor:
        runs.append(1)
        return function(x)

    return counting_runs, runs


@pytest.mark.parametrize(("function", "expected"), [(kept, [ROW]), (centered, ["mixed"])])
def test_answers_for_functions_of_torch_are_kept(function: Any, expected: Any) -> None:
    inner, runs = counted(function)
    own = of_torch(inner)
    for _ in "12":
        call = call_of(own, rows(5, 2), count=5)
        runs.clear()
        assert described(layouts_by_probe(call)) == expected
        assert not call.reads_values, "the answer holds for all values"
    assert not runs, "the second call is not tried"
    assert len(probing._ANSWERS) == 1


@pytest.mark.parametrize("function", [kept, centered])
def test_answers_for_foreign_functions_are_not_kept(function: Any) -> None:
    inner, _ = counted(function)
    call = call_of(inner, rows(5, 2), count=5)
    layouts_by_probe(call)
    assert call.reads_values
    assert len(probing._ANSWERS) == 0


def test_a_foreign_function_that_changes_its_mind_is_judged_each_time() -> None:
    mixes = False

    def fickle(x: Tensor) -> Tensor:
        return centered(x) if mixes else kept(x)

    assert found(call_of(fickle, rows(5, 2), count=5)) == [ROW]
    mixes = True
    assert found(call_of(fickle, rows(5, 2), count=5)) == [REFUSED]


def test_what_other_values_may_change_is_not_kept() -> None:
    closed = of_torch(lambda x: (x - 100).relu())
    call = call_of(closed, rows(5, 2), count=5)
    assert found(call) == [ROW]  # thin: no gradient has reached any sample
    assert call.reads_values
    infinite = rows(of=torch.full((5, 2), torch.inf, dtype=torch.float64).requires_grad_())
    call = call_of(of_torch(kept), infinite, count=5)
    assert found(call) == [ROW]
    assert call.reads_values
    assert len(probing._ANSWERS) == 0


def test_calls_with_integers_are_judged_each_time() -> None:
    pick = of_torch(lambda x, i: x[i] * 1)
    assert found(call_of(pick, rows(5, 2), torch.arange(5), count=5)) == [ROW]
    assert found(call_of(pick, rows(5, 2), torch.arange(5).flip(0), count=5)) == [REFUSED]


def test_signature_needs_values_of_integers() -> None:
    own = of_torch(kept)
    index = torch.tensor([0, 1])
    assert probing._signature(call_of(own, rows(3), C(2))) is not None
    assert probing._signature(call_of(kept, rows(3), C(2))) is None  # foreign
    assert probing._signature(call_of(own, rows(of=torch.tensor([1, 2, 3])), C(2))) is None
    assert probing._signature(call_of(own, rows(3), index)) is None
    assert probing._signature(call_of(own, rows(2, owners=[0, 1]))) is None
    assert probing._signature(call_of(own, rows(3), torch.eye(3).to_sparse())) is None
    different = [rows(3, 3), rows(3, 3, dim=1), frozen(rows(3, 3)), rows(3, 4)]
    assert len({probing._signature(call_of(own, x)) for x in different}) == len(different)


# -- refusals


def test_reason_of_a_failed_trial_is_one_line() -> None:
    mixing = of_torch(lambda x: centered(fixed(x)))
    (layout,) = layouts_by_probe(call_of(mixing, frozen(rows(5, 2)), count=5, flows=True))
    assert isinstance(layout, Lost)
    assert layout.reason.endswith("with one more sample it raises AssertionError (too long)")


def test_samples_that_are_lost_without_gradient_are_constant() -> None:
    call = call_of(of_torch(lambda x: fixed(x) * 2), frozen(rows(5, 2)), count=5, flows=False)
    assert described(layouts_by_probe(call)) == ["constant"]


def test_samples_that_are_only_moved_keep_their_owners() -> None:
    call = call_of(of_torch(fixed), frozen(rows(5, 2)), count=5, flows=False)
    assert described(layouts_by_probe(call)) == [(0, 1, 1)]


def test_owners_of_several_kinds_are_proved_or_not_probed() -> None:
    owners, other = (rows(5, 2, owners=[0, 1, 2, 3, 4]) for _ in "ab")
    reverse = rows(5, 2, owners=[4, 3, 2, 1, 0])
    for second, expected in ((rows(5, 2), True), (other, True), (reverse, False)):
        (layout,) = layouts_by_probe(call_of(torch.add, owners, second, count=5))
        assert isinstance(layout, Lost) is not expected
        if expected:
            own = layout.owner_of_each(torch.device("cpu"))  # type: ignore[union-attr]
            assert own.tolist() == [0, 1, 2, 3, 4]
        data = call_of(torch.add, frozen(owners), frozen(second), count=5, flows=True)
        assert described(layouts_by_probe(data)) == ["mixed"]
    scope, owner = Scope(5), torch.tensor([0, 1, 2, 3, 4])
    values = [C(5, 2), C(5, 2)]
    layouts: list[Any] = [Owners(scope, 0, owner), Owners(scope, 0, owner)]
    call = Call(scope, torch.add, tuple(values), {}, [C(5, 2)], values, layouts)
    assert described(layouts_by_probe(call)) == [(0, [0, 1, 2, 3, 4])]


def test_traced_calls_are_known_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = of_torch(kept)
    monkeypatch.setattr(probing, "is_traced", lambda t: True)
    (layout,) = layouts_by_probe(call_of(own, rows(5, 2), count=5))
    assert isinstance(layout, Lost)
    assert "cannot be probed during a trace" in layout.reason
    assert len(probing._ANSWERS) == 0, "the next untraced call is tried"
    monkeypatch.undo()
    monkeypatch.setattr(probing, "_ANSWERS", Cache(__name__, "answers"))
    assert described(layouts_by_probe(call_of(own, rows(5, 2), count=5))) == [ROW]
    monkeypatch.setattr(probing, "is_traced", lambda t: True)
    assert described(layouts_by_probe(call_of(own, rows(5, 2), count=5))) == [ROW]


class Unruly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise KeyError("first\nsecond")


def test_a_backward_that_cannot_run_by_itself_leaves_the_samples_unknown() -> None:
    (layout,) = layouts_by_probe(call_of(Unruly.apply, rows(5, 2), count=5))
    assert isinstance(layout, Lost)
    assert layout.why == "unknown"
    assert "its backward raises KeyError ('first" in layout.reason
    assert "\n" not in layout.reason


def test_all_that_a_batch_of_one_makes_is_of_the_one_sample() -> None:
    assert described(layouts_by_probe(call_of(centered, rows(1, 2), count=1))) == [ROW]
    assert described(layouts_by_probe(call_of(torch.sum, rows(1, 2), count=1))) == ["total"]


# -- growing batches


@pytest.mark.parametrize("probe", ["_shapes", "_trial"])
def test_growing_arguments_are_tensors_and_sizes_that_count_samples(probe: str) -> None:
    given: list[Any] = []

    def noting(*args: Any, **kwargs: Any) -> Tensor:
        given.append((args, kwargs))
        return torch.ones(2)

    scope = Scope(3)
    tagged = [
        Tagged(torch.arange(6).double().view(3, 2), ROW),
        Tagged(torch.arange(12).double(), (0, 2, 2)),
        Tagged(torch.arange(4).double().view(1, 4), (1, [2, 0, 0, 1])),
    ]
    constant = torch.ones(7)
    values = [t.value for t in tagged]
    layouts = [*(t.layout(scope) for t in tagged), scope.constant()]
    call = Call(
        scope,
        noting,
        (values[0], [values[1], (BatchSize(6), 6)], torch.Size([2])),
        {"last": values[2], "c": constant},
        [torch.ones(2)],
        [*values, constant],
        layouts,  # type: ignore[arg-type]
    )
    if probe == "_shapes":
        assert probing._shapes(call, 0) == probing._shapes(call, 1) == [torch.Size([2])]
    else:
        assert probing._trial(call) == [[]]
    (first, (blocks, sizes), plain), kwargs = given[-1]
    assert first.shape == (4, 2)
    assert blocks.shape == (16,)
    assert sizes == (8, 6)
    assert not isinstance(sizes[0], BatchSize)
    assert plain == (2,)
    assert kwargs["last"].shape == (1, 5)
    assert kwargs["c"].shape == (7,)
    if probe == "_trial":  # the last sample is repeated
        assert first.flatten().tolist() == [0, 1, 2, 3, 4, 5, 4, 5]
        assert blocks.tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9, 10, 11, 10, 11]
        assert kwargs["last"].tolist() == [[0, 1, 2, 3, 3]]


def test_result_extends_another_where_all_but_the_last_sample_agree() -> None:
    scope = Scope(2)
    t = torch.arange(8.0)
    blocks = Samples(scope, 0, 2, 2)
    longer = torch.tensor([0.0, 1, 2, 3, 9, 9, 4, 5, 6, 7, 9, 9])
    assert probing._extends(longer, t, blocks)
    assert probing._extends(longer.flip(0), t, blocks) is False
    assert probing._extends(longer[:10], t, blocks) is False
    assert probing._extends(longer, t, scope.constant()) is False
    owners = Owners(scope, 0, torch.zeros(8, dtype=torch.long))
    assert probing._extends(torch.cat([t, t[:1]]), t, owners)
    assert probing._extends(torch.cat([t[:1], t]), t, owners) is False
    with_nan = torch.tensor([[torch.nan, 1.0], [2.0, 3.0]])
    assert probing._extends(torch.cat([with_nan, with_nan[:1]]), with_nan, scope.samples(0))


@pytest.mark.parametrize("function", [centered, choosy, first_last])
def test_values_are_not_apart_where_one_reaches_another(function: Any) -> None:
    call = call_of(function, rows(5, 2), count=5)
    layouts = [call.scope.samples(0)]
    assert probing._values_stay_apart(call, layouts) is False
    assert probing._values_stay_apart(call_of(kept, rows(5, 2), count=5), layouts) is True


def test_shapes_differ_where_a_size_does() -> None:
    size = torch.Size
    assert probing._differing(size([2, 3, 4]), size([2, 4, 5])) == [1, 2]
    assert probing._differing(size([2]), size([2])) == []
    assert probing._differing(size([2]), size([2, 2])) is None


def squared_by(constant: Any, x: Any) -> Any:
    return constant @ x


DIAGONAL = torch.eye(5, dtype=torch.float64)
DENSE = DIAGONAL + 1


@pytest.mark.parametrize("first", [DIAGONAL, DENSE])
def test_answers_that_depend_on_the_values_of_a_constant_are_not_kept(first: Tensor) -> None:
    inner = of_torch(squared_by)
    for constant in (first, DIAGONAL, DENSE, DIAGONAL):
        call = call_of(inner, constant, rows(5, 2), count=5)
        assert described(layouts_by_probe(call)) == ([ROW] if constant is DIAGONAL else ["mixed"])
        assert call.reads_values
    assert len(probing._ANSWERS) == 0


@pytest.mark.parametrize("function", [lambda x: x.sort(0)[0], lambda x: x.cummax(0)[0]])
def test_answers_that_depend_on_the_order_of_samples_are_not_kept(function: Any) -> None:
    own = of_torch(function)
    ascending = torch.arange(10.0).view(5, 2)
    for x, expected in [(ascending, [ROW]), (ascending.roll(2, 0), ["mixed"])]:
        call = call_of(own, rows(of=x.requires_grad_()), count=5)
        assert described(layouts_by_probe(call)) == expected


def test_answers_for_functions_that_refuse_random_values_are_kept() -> None:
    def roots(x: Tensor) -> Tensor:
        return torch.linalg.cholesky(x)

    own = of_torch(roots)
    x = torch.randn(5, 3, 3)
    call = call_of(own, rows(of=(x @ x.mT + torch.eye(3)).requires_grad_()), count=5)
    assert described(layouts_by_probe(call)) == [ROW]
    assert not call.reads_values
