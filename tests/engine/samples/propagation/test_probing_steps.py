"""The steps of a probe, each by itself: shapes that grow, trials with values, samples kept apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Owners, Samples, Scope
from pergrad.engine.samples.propagation import Call, probing
from pergrad.engine.samples.propagation.probing import layouts_by_probe
from pergrad.engine.samples.sizes import BatchSize
from pergrad.runtime.caches import Cache
from tests.engine.samples.propagation.calls import Tagged, call_of, described, rows

C = torch.ones  # a constant
ROW = (0, 1, 1)


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_ANSWERS", Cache(__name__, "answers of probes in a test"))


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


def refusing(x: Tensor) -> Tensor:
    if not x.is_meta and x.isnan().any():
        raise ValueError("no NaN here")
    return x * 1


def fixed(x: Tensor) -> Tensor:
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
    return x.new_zeros(size, 2) + x.sum() * 0 + 1


PROBES: dict[str, tuple[Any, Callable[[], Call]]] = {
    "rows": ([ROW], lambda: call_of(kept, rows(5, 2), count=5)),
    "rows, second": ([(1, 1, 1)], lambda: call_of(kept, rows(2, 5, dim=1), count=5)),
    "rows of several": ([(0, 2, 2)], lambda: call_of(kept, rows(20, 2, pre=2, post=2), count=5)),
    "rows of owners": (
        [(0, [4, 1, 1])],
        lambda: call_of(kept, rows(3, 2, owners=[4, 1, 1]), count=5),
    ),
    "rows in a list": ([ROW], lambda: call_of(lambda_of_list, [rows(5, 2)], count=5)),
    "rows by name": ([ROW], lambda: call_of(by_name, x=rows(5, 2), count=5)),
    "doubled": ([(0, 1, 2)], lambda: call_of(interleaved, rows(5, 2), count=5)),
    "doubled owners": (
        ["unknown"],
        lambda: call_of(interleaved, rows(3, 2, owners=[4, 1, 1]), count=5),
    ),
    "one row more": (["unknown"], lambda: call_of(stretched, rows(5, 2), count=5)),
    "flattened": ([(0, 1, 2)], lambda: call_of(flattened, rows(5, 2), count=5)),
    "pairs": (["mixed"], lambda: call_of(outer, rows(5), count=5)),
    "centered": (["mixed"], lambda: call_of(centered, rows(5, 2), count=5)),
    "last to first": (["mixed"], lambda: call_of(last_first, rows(5, 2), count=5)),
    "second to first": (["mixed"], lambda: call_of(second_first, rows(5), count=5)),
    "middle to first": (["mixed"], lambda: call_of(middle_first, rows(5, 2), count=5)),
    "first to last": (["mixed"], lambda: call_of(first_last, rows(5, 2), count=5)),
    "refuses NaN": (["mixed"], lambda: call_of(refusing, rows(5, 2), count=5)),
    "number of results": (["mixed"] * 5, lambda: call_of(counting, rows(5, 2), count=5)),
    "number of results, by values": (
        ["mixed"] * 5,
        lambda: call_of(counting_values, rows(5, 2), count=5),
    ),
    "by values": ([ROW], lambda: call_of(by_numpy, rows(5, 2), count=5)),
    "by values, second": ([(1, 1, 1)], lambda: call_of(by_numpy, rows(2, 5, dim=1), count=5)),
    "by values, several": (
        [(0, 2, 2)],
        lambda: call_of(by_numpy, rows(20, 2, pre=2, post=2), count=5),
    ),
    "by values, owners": (
        [(1, [4, 1, 1])],
        lambda: call_of(by_numpy, rows(2, 3, dim=1, owners=[4, 1, 1]), count=5),
    ),
    "by values, second argument": (
        [(1, 1, 1)],
        lambda: call_of(second_only, C(2), rows(2, 5, dim=1), count=5),
    ),
    "by values, transposed": ([(1, 1, 1)], lambda: call_of(transposed, rows(5, 2), count=5)),
    "by values, reversed": (["mixed"], lambda: call_of(flipped, rows(5, 2), count=5)),
    "by values, summed": (["mixed"], lambda: call_of(summed, rows(5, 2), count=5)),
    "fails with one more": (["unknown"], lambda: call_of(fixed, rows(5, 2), count=5)),
    "sizes": (["mixed"], lambda: call_of(of_sizes, rows(5), BatchSize(5), count=5)),
}


def lambda_of_list(xs: list[Tensor]) -> Tensor:
    return xs[0] * 1


def by_name(*, x: Tensor) -> Tensor:
    return x * 1


@pytest.mark.parametrize("name", PROBES)
def test_probe_finds_the_growing_dimension_or_refuses(name: str) -> None:
    expected, make = PROBES[name]
    call = make()
    assert described(layouts_by_probe(call)) == expected
    assert described(layouts_by_probe(call)) == expected  # also from the cache


def test_reason_of_a_failed_trial_is_one_line() -> None:
    (layout,) = layouts_by_probe(call_of(fixed, rows(5, 2), count=5))
    assert layout.reason.endswith(  # type: ignore[union-attr]
        "with one more sample it raises AssertionError (too long)"
    )


def test_samples_that_are_lost_without_gradient_are_constant() -> None:
    call = call_of(fixed, rows(5, 2), count=5, flows=False)
    assert described(layouts_by_probe(call)) == ["constant"]


def test_owners_of_several_kinds_are_not_probed() -> None:
    owners = rows(5, 2, owners=[0, 1, 2, 3, 4])
    assert described(layouts_by_probe(call_of(torch.add, owners, rows(5, 2), count=5))) == ["mixed"]
    other = rows(5, 2, owners=[0, 1, 2, 3, 4])
    assert described(layouts_by_probe(call_of(torch.add, owners, other, count=5))) == ["mixed"]
    scope, owner = Scope(5), torch.tensor([0, 1, 2, 3, 4])
    values = [C(5, 2), C(5, 2)]
    layouts: list[Any] = [Owners(scope, 0, owner), Owners(scope, 0, owner)]
    call = Call(scope, torch.add, tuple(values), {}, [C(5, 2)], values, layouts)
    assert described(layouts_by_probe(call)) == [(0, [0, 1, 2, 3, 4])]


def test_traced_calls_are_known_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(kept, rows(5, 2), count=5)
    monkeypatch.setattr(probing, "is_traced", lambda t: True)
    (layout,) = layouts_by_probe(call)
    assert "cannot be probed during a trace" in layout.reason  # type: ignore[union-attr]
    monkeypatch.undo()
    monkeypatch.setattr(probing, "_ANSWERS", Cache(__name__, "answers"))
    assert described(layouts_by_probe(call)) == [ROW]
    monkeypatch.setattr(probing, "is_traced", lambda t: True)
    assert described(layouts_by_probe(call)) == [ROW]


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


@pytest.mark.parametrize("function", [centered, refusing, first_last])
def test_samples_are_not_apart_where_one_reaches_another(
    function: Callable[[Tensor], Tensor],
) -> None:
    call = call_of(function, rows(5, 2), count=5)
    assert probing._keeps_samples_apart(call, [[0]]) is False
    assert probing._keeps_samples_apart(call_of(kept, rows(5, 2), count=5), [[0]]) is True


def test_signature_needs_values_of_integers_without_samples() -> None:
    index = torch.tensor([0, 1])
    assert probing._signature(call_of(kept, rows(3), C(2))) is not None
    assert probing._signature(call_of(kept, rows(of=torch.tensor([1, 2, 3])), C(2))) is not None
    assert probing._signature(call_of(kept, rows(3), index)) is None
    assert probing._signature(call_of(kept, rows(2, owners=[0, 1]))) is None
    assert probing._signature(call_of(kept, rows(3, 3))) != probing._signature(
        call_of(kept, rows(3, 3, dim=1))
    )


def test_shapes_differ_where_a_size_does() -> None:
    size = torch.Size
    assert probing._differing(size([2, 3, 4]), size([2, 4, 5])) == [1, 2]
    assert probing._differing(size([2]), size([2])) == []
    assert probing._differing(size([2]), size([2, 2])) is None
