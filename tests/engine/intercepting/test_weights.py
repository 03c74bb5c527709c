"""Weights: roots, transposes and casts of them, and derived ones, by factors and by carriers."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pergrad.engine.collecting.ledger import UseCounter
from pergrad.engine.intercepting.weights import (
    Derived,
    Root,
    Transformed,
    Weight,
    carriers_of,
    quiet_vmap,
    refuse_ordinary_gradients,
    refusing_ordinary_gradients,
    vjp_of_each,
)
from pergrad.engine.samples.layouts import Scope
from pergrad.errors import UnseenUseError
from pergrad.factors import Dense, Factor, OuterProduct
from pergrad.runtime.queue import Queue
from tests.engine.exactness import Case, Formula, assert_exact, numbers, of

N = 3  # also the size of other dimensions


class Collects:
    """A sink that keeps what it is given."""

    def __init__(self, passes: int = 1) -> None:
        self.passes = passes
        self.queue = Queue()
        self.taken: list[tuple[str, Factor]] = []

    def expects(self, name: str) -> bool:
        return True

    def add(self, name: str, factor: Factor) -> None:
        assert not torch.is_autocast_enabled("cpu")
        self.taken.append((name, factor))

    def total(self, name: str) -> Tensor:
        rows = [f.materialize() for n, f in self.taken if n == name]
        return torch.stack(rows).sum(0)


def anchor() -> Tensor:
    return torch.zeros((), requires_grad=True)


def root(value: Tensor, name: str = "w", sink: Collects | None = None) -> Root:
    return Root(Scope(N), name, value, UseCounter(), sink or Collects(), anchor())


def is_last_of(weight: Weight, count: int, name: str = "w") -> bool:
    """Whether so many uses are expected."""
    return [weight.uses.arrive(name) for _ in range(count)] == [*[False] * (count - 1), True]


# -- what a weight is


def test_a_weight_carries_no_samples_and_has_one_key() -> None:
    weight = root(numbers(2))
    assert weight.is_weight
    assert not weight.has_samples
    assert weight.key == ("weight",)


def test_the_value_of_a_weight_is_no_part_of_a_graph_and_the_same_memory() -> None:
    p = nn.Parameter(numbers(2, 3))
    weight = root(p)
    assert not weight.value.requires_grad
    assert weight.value.data_ptr() == p.data_ptr()


def test_a_weight_of_several_parameters_names_them_all() -> None:
    first = root(numbers(2))
    derived = Derived(first.scope, ("w", "v"), numbers(2), first.uses, first.sink, anchor())
    assert first.name == "w"
    assert first.roots == ("w",)
    assert derived.name == "w and v"
    assert derived.counted == ()
    assert not derived.may_hook
    assert not derived.is_view


def test_a_weight_of_no_kind_has_no_carrier_and_takes_nothing() -> None:
    first = root(numbers(2))
    weight = Weight(first.scope, ("w",), numbers(2), first.uses, first.sink, anchor())
    with pytest.raises(NotImplementedError):
        _ = weight.carrier
    with pytest.raises(NotImplementedError):
        weight.take(Dense(numbers(N, 2)))


# -- roots


def test_a_root_hands_its_factors_to_the_sink_and_nothing_flows_on() -> None:
    sink = Collects()
    factor = Dense(numbers(N, 2))
    assert root(numbers(2), sink=sink).take(factor) is None
    assert sink.taken == [("w", factor)]


@pytest.mark.parametrize(("passes", "may"), [(1, True), (2, False), (3, False)])
def test_a_tap_on_a_root_may_be_a_hook_if_there_is_one_pass(passes: int, may: bool) -> None:
    weight = root(numbers(2), sink=Collects(passes))
    assert weight.may_hook is may
    assert weight.counted == ("w",)


def test_the_carrier_of_a_root_is_one_use_without_storage_and_its_gradient_goes_to_the_sink() -> (
    None
):
    sink = Collects()
    weight = root(numbers(2, 4), sink=sink)
    carrier = weight.carrier
    assert weight.carrier is carrier
    assert carrier.shape == (N, 2, 4)
    assert carrier.untyped_storage().nbytes() == carrier.element_size()
    rows, more = numbers(N, 2, 4), numbers(N, 2, 4)
    with torch.autocast("cpu"):
        torch.autograd.backward([carrier, carrier], [rows, more])
    torch.testing.assert_close(sink.total("w"), rows + more)
    assert len(sink.taken) == 1
    weight.uses.expect([weight])  # beside the carrier's own
    assert is_last_of(weight, 2)
    assert weight.anchor.grad is None


# -- transposes and casts


def transposed(parent: Weight) -> Transformed:
    return Transformed(parent, parent.value.mT, lambda factor: factor.transposed())


def test_a_transposed_weight_passes_transposed_factors_on() -> None:
    sink = Collects()
    parent = root(numbers(2, 4), sink=sink)
    weight = transposed(parent)
    g, x = numbers(N, 5, 4), numbers(N, 5, 2)
    assert weight.take(OuterProduct(g, x)) is None
    ((name, factor),) = sink.taken
    assert name == "w"
    assert isinstance(factor, OuterProduct)
    torch.testing.assert_close(factor.materialize(), torch.einsum("nto,nti->nio", g, x))


def test_a_transformed_weight_is_as_its_parent_in_all_else() -> None:
    parent = root(numbers(2, 4))
    weight = transposed(parent)
    assert (weight.scope, weight.uses, weight.sink) == (parent.scope, parent.uses, parent.sink)
    assert weight.anchor is parent.anchor
    assert weight.roots == ("w",)
    assert weight.may_hook
    assert weight.counted == ("w",)
    assert not transposed(root(numbers(2, 4), sink=Collects(2))).may_hook


def test_a_weight_that_shares_its_memory_with_its_parent_is_a_view() -> None:
    parent = root(numbers(2, 4))
    assert transposed(parent).is_view
    assert Transformed(parent, parent.value, lambda factor: factor).is_view
    assert not Transformed(parent, parent.value.clone(), lambda factor: factor).is_view


def test_a_view_is_stale_once_the_weight_behind_it_is_written_to() -> None:
    parameter = root(numbers(2, 4))
    parent = Transformed(parameter, parameter.value.clone(), lambda factor: factor)
    before = transposed(parent)
    copied = Transformed(parent, parent.value.clone(), lambda factor: factor)
    twice = transposed(before)
    assert not any(w.is_stale for w in (parent, before, copied, twice))
    parent.write()
    after = transposed(parent)
    assert before.is_stale
    assert twice.is_stale, "a view of a view"
    assert not parent.is_stale, "it knows of its own write"
    assert not copied.is_stale, "it has memory of its own"
    assert not after.is_stale
    after.write()
    assert parent.is_stale, "a write through a view changes what is behind"
    assert not after.is_stale
    assert not parameter.is_stale, "torch lets nobody write to it"


def test_any_weight_may_be_a_view_of_another() -> None:
    first, second = root(numbers(2)), root(numbers(2), "v")
    derived = Derived(first.scope, ("w",), numbers(2), first.uses, first.sink, anchor())
    derived.view(first)
    assert derived.is_view
    second.write()
    assert not derived.is_stale
    first.write()
    assert derived.is_stale


def test_the_gradient_of_a_transposed_carrier_reaches_the_sink_transposed() -> None:
    sink = Collects()
    parent = root(numbers(2, 4), sink=sink)
    weight = transposed(parent)
    carrier = weight.carrier
    assert carrier.shape == (N, 4, 2)
    rows = numbers(N, 4, 2)
    carrier.backward(rows)
    torch.testing.assert_close(sink.total("w"), rows.mT)
    parent.uses.expect([parent])
    assert is_last_of(parent, 2)


# -- derived weights


def test_a_derived_weight_lets_its_gradients_flow_in_its_own_dtype() -> None:
    first = root(numbers(2))
    place = anchor()
    derived = Derived(
        first.scope, ("w",), torch.zeros(2, dtype=torch.float32), first.uses, first.sink, place
    )
    rows = numbers(N, 2)
    found = derived.take(Dense(rows))
    assert found is not None
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, rows.float())
    assert derived.carrier is place


def test_gradients_of_derived_weights_are_pulled_back_to_all_parents() -> None:
    sink = Collects()
    uses = UseCounter()
    scope = Scope(N)
    w = Root(scope, "w", numbers(2, 4), uses, sink, anchor())
    v = Root(scope, "v", numbers(4), uses, sink, anchor())
    unused = Root(scope, "unused", numbers(5), uses, sink, anchor())
    leaves = [r.value.detach().requires_grad_() for r in (w, v, unused)]
    outputs = [(leaves[0] * leaves[1]).exp(), leaves[1].sin(), leaves[2] * 2]
    carriers = carriers_of(outputs, leaves, [w, v, unused])
    assert [c.shape for c in carriers] == [(N, 2, 4), (N, 4), (N, 5)]
    assert all(c.untyped_storage().nbytes() == c.element_size() for c in carriers)
    rows = numbers(N, 2, 4)
    carriers[0].backward(rows.float().double())
    expected = [
        torch.autograd.grad(outputs[0], leaves[:2], rows[n].float().double(), retain_graph=True)
        for n in range(N)
    ]
    torch.testing.assert_close(sink.total("w"), torch.stack([e[0] for e in expected]))
    torch.testing.assert_close(sink.total("v"), torch.stack([e[1] for e in expected]))
    assert not sink.total("unused").any()


def test_tensors_that_are_no_weights_get_the_gradient_of_the_whole_batch() -> None:
    sink = Collects()
    w = root(numbers(3), sink=sink)
    other = numbers(3).requires_grad_()
    leaf, own = w.value.detach().requires_grad_(), other.detach().requires_grad_()
    (carrier,) = carriers_of([leaf * own], [leaf, own], [w], [other])
    rows = numbers(N, 3)
    carrier.backward(rows)
    torch.testing.assert_close(sink.total("w"), rows * other.detach())
    assert other.grad is not None
    torch.testing.assert_close(other.grad, (rows * w.value).sum(0))


def test_carriers_of_a_coarser_dtype_give_gradients_of_the_outputs_dtype() -> None:
    sink = Collects()
    w = root(numbers(3), sink=sink)
    leaf = w.value.detach().requires_grad_()
    outputs = [leaf.float() * 2]
    (carrier,) = carriers_of(outputs, [leaf], [w])
    assert carrier.dtype is torch.float32
    rows = torch.randn(N, 3)
    carrier.backward(rows)
    torch.testing.assert_close(sink.total("w"), 2 * rows.double())


# -- one VJP for each sample


class NoBatching(torch.autograd.Function):
    """x², without a batching rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * torch.from_numpy(grad.numpy())


@pytest.mark.parametrize(
    ("square", "calls"), [(NoBatching.apply, 1 + N), (torch.square, 1)], ids=["loop", "vmap"]
)
def test_vjps_of_all_samples_are_those_of_one_after_the_other(
    square: Any, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    grad = torch.autograd.grad

    def counted(*args: Any, **kwargs: Any) -> Any:
        ran.append(1)
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    a, b, unused = (numbers(4).requires_grad_() for _ in range(3))
    outputs = [square(a) * b, square(b).sum()]
    gradients = [numbers(N, 4), numbers(N)]
    found = vjp_of_each(outputs, gradients, [a, b, unused], N)
    assert len(ran) == calls
    of_a = 2 * a * b * gradients[0]
    of_b = a**2 * gradients[0] + 2 * b * gradients[1].unsqueeze(1)
    assert found[2] is None
    torch.testing.assert_close(found[0], of_a.detach())
    torch.testing.assert_close(found[1], of_b.detach())
    assert vjp_of_each(outputs, gradients, [a], N)[0] is not None, "the graph is kept"


def test_vmap_is_silent_about_functions_that_it_runs_as_a_loop() -> None:
    with quiet_vmap():
        warnings.warn("There is a performance drop because we have not ...", stacklevel=1)
    with pytest.warns(UserWarning, match="other"), quiet_vmap():
        warnings.warn("something other", stacklevel=1)
    with pytest.warns(UserWarning, match="performance"):
        warnings.warn("There is a performance drop because we have not ...", stacklevel=1)


# -- ordinary gradients


def test_an_ordinary_gradient_is_refused_within_and_not_afterwards() -> None:
    w, v = nn.Parameter(numbers(2)), nn.Parameter(numbers(2))
    with refusing_ordinary_gradients({"a.w": w}):
        (v * 2).sum().backward()
        with pytest.raises(UnseenUseError, match=r"reached parameter 'a\.w': "):
            (w * v).sum().backward()
    assert not w._backward_hooks
    (w * 2).sum().backward()
    assert torch.equal(w.grad, torch.full_like(w, 2))  # type: ignore[arg-type]


def test_every_parameter_is_refused_by_its_own_name_and_hooks_of_others_stay() -> None:
    seen: list[str] = []
    w, v = nn.Parameter(numbers(2)), nn.Parameter(numbers(2))
    w.register_hook(lambda _: seen.append("own"))

    def fails() -> None:
        with refusing_ordinary_gradients({"w": w, "v": v}):
            for name, p in (("v", v), ("w", w)):
                with pytest.raises(UnseenUseError, match=f"'{name}'"):
                    p.sum().backward()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    seen.clear()
    (w.sum() + v.sum()).backward()
    assert seen == ["own"]
    assert len(w._backward_hooks or ()) == 1


def test_two_that_refuse_the_same_parameter_end_in_any_order() -> None:
    w = nn.Parameter(numbers(2))
    first, second = (refusing_ordinary_gradients({name: w}) for name in ("one", "two"))
    first.__enter__()
    second.__enter__()
    assert len(w._backward_hooks or ()) == 2
    first.__exit__(None, None, None)
    with pytest.raises(UnseenUseError, match="'two'"):
        w.sum().backward()
    second.__exit__(None, None, None)
    w.sum().backward()


def test_hooks_that_were_cleared_within_are_no_error() -> None:
    w = nn.Parameter(numbers(2))
    with refusing_ordinary_gradients({"w": w}):
        w._backward_hooks.clear()  # type: ignore[union-attr]
    v = nn.Parameter(numbers(2))
    with refusing_ordinary_gradients({"v": v}):
        v._backward_hooks = None
    v.sum().backward()


def test_an_ordinary_gradient_may_be_allowed_for_a_time() -> None:
    w, t = nn.Parameter(numbers(2)), numbers(2).requires_grad_()
    scope = Scope(N)
    refuse_ordinary_gradients(t, ["t"], lambda: scope.is_pulling_back)
    with refusing_ordinary_gradients({"w": w}, lambda: scope.is_pulling_back):
        with scope.pulling_back():
            found = torch.autograd.grad((w * t).sum(), [w, t])
        assert torch.equal(found[0], t.detach())
        assert torch.equal(found[1], w.detach())
        for own, name in ((w, "w"), (t, "t")):
            with pytest.raises(UnseenUseError, match=f"'{name}'"):
                own.sum().backward()


def test_a_derived_tensor_refuses_ordinary_gradients_for_good() -> None:
    t = numbers(2).requires_grad_()
    refuse_ordinary_gradients(t, ["w"])
    with pytest.raises(UnseenUseError, match="'w'"):
        t.sum().backward()


# -- against the loop

D = 3
WAYS = {
    "transposed, cast and derived": lambda m, x: (
        F.linear(x, m.w.t().double()) + F.linear(x, (m.w * m.s).mT) @ m.w.clone()
    ),
    "two outputs of one derivation, one of them unused": lambda m, x: (
        F.linear(x, m.w.unbind(0)[1].outer(m.s)) + x * m.w.unbind(0)[0]
    ),
    "a carrier and rules": lambda m, x: F.linear(x, m.w) * (m.w @ m.s).tanh() + x @ m.w.T.exp(),
}


@pytest.mark.parametrize("size", [1, D, 2])
@pytest.mark.parametrize("name", WAYS)
def test_gradients_are_those_of_the_loop(name: str, size: int) -> None:
    assert_exact(Case(lambda: Formula(WAYS[name], w=numbers(D, D), s=numbers(D)), of((D,))), size)
