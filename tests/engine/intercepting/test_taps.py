"""Taps: the gradient of an output reaches the rule once, by a hook or by a node, or an error says why not."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.checkpoint import checkpoint

import pergrad
from pergrad.engine.collecting import ledger
from pergrad.errors import PergradError, ScopeError, UnsupportedFunctionError
from pergrad.rules import RULES
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import Case, Formula, assert_exact, numbers, of

D = 4


def forward_twice(m: Any, x: Tensor) -> Tensor:
    return F.linear(F.linear(x, m.w, m.b).tanh(), m.w)


def model_of(function: Callable[..., Any] = forward_twice) -> Any:
    torch.manual_seed(0)
    return Formula(function, w=numbers(D, D), b=numbers(D))


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1)  # type: ignore[no-any-return]


def assert_all_near(found: dict[str, Tensor], expected: dict[str, Tensor], times: int = 1) -> None:
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        assert_near(found[name], times * rows, name)


def is_tapped_by_a_node(t: Tensor) -> bool:
    return "Tap" in type(t.grad_fn).__name__


# -- hooks and nodes


def weights_derived(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.w.tanh())


@pytest.mark.parametrize("shape", [(D,), (3, D)], ids=str)
def test_a_function_of_a_parameter_is_tapped_by_a_hook_on_its_own_node(
    shape: tuple[int, ...],
) -> None:
    model, x = model_of(), numbers(D, *shape).requires_grad_()
    with pergrad.record(model, pergrad.Grads()) as grads:
        y = model(x)
        assert not is_tapped_by_a_node(y)
        y.square().sum().backward()
    assert_all_near(grads.result, loop_grads(model, squares, x.detach()))


def test_a_function_of_a_derived_weight_is_tapped_by_a_node() -> None:
    model, x = model_of(weights_derived), numbers(D, D).requires_grad_()
    with pergrad.record(model, pergrad.Grads()) as grads:
        y = model(x)
        assert is_tapped_by_a_node(y)
        y.square().sum().backward()
    assert_all_near(grads.result, loop_grads(model, squares, x.detach()))


def test_an_output_without_a_graph_is_tapped_by_a_node() -> None:
    """The first layer: neither its input nor the detached weight requires a gradient."""
    model, x = model_of(lambda m, x: F.linear(x, m.w)), numbers(D, D)
    with pergrad.record(model, pergrad.Grads()) as grads:
        y = model(x)
        assert is_tapped_by_a_node(y)
        assert y.requires_grad
        y.square().sum().backward()
    assert_all_near(grads.result, loop_grads(model, squares, x))


def test_saved_tensors_that_are_packed_make_a_node() -> None:
    packed: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t

    model, x = model_of(lambda m, x: F.linear(x, m.w)), numbers(D, D).requires_grad_()
    with pergrad.record(model, pergrad.Grads()) as grads:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = model(x)
        assert is_tapped_by_a_node(y)
        y.square().sum().backward()
    assert any(t.data_ptr() == x.data_ptr() for t in packed), "what the tap keeps is packed too"
    assert_all_near(grads.result, loop_grads(model, squares, x.detach()))


def test_several_passes_need_a_node_and_give_the_clipped_sum_of_the_loop() -> None:
    model, x = model_of(), numbers(D, 3, D).requires_grad_()
    clipped = pergrad.ClippedSum(max_norm=0.7, memory="low")
    with pergrad.record(model, clipped, pergrad.Grads()) as (_, grads):
        y = model(x)
        assert is_tapped_by_a_node(y)
        y.square().sum().backward()
    expected = loop_grads(model, squares, x.detach())
    norms = torch.cat([g.flatten(1) for g in expected.values()], 1).norm(dim=1)
    weights = (0.7 / norms).clamp(max=1)
    for name, rows in expected.items():
        assert_near(clipped.result[name], torch.einsum("n,n...->...", weights, rows), name)
    assert_all_near(grads.result, expected)


# -- a rule of one's own, to see what a rule is given


@contextmanager
def rule_for(function: Callable[..., Any], **options: Any) -> Iterator[Callable[..., Any]]:
    def register(rule: Callable[..., Any]) -> None:
        pergrad.implements_per_sample_grads(function, **options)(rule)

    try:
        yield register
    finally:
        RULES.pop(function, None)


def two_outputs() -> Callable[..., Any]:
    def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        if has_torch_function((x, w)):
            return handle_torch_function(both, (x, w), x, w)  # type: ignore[no-any-return]
        return x * w, x.sin() * w

    return both


@pytest.mark.parametrize("reached", [(0,), (1,), (0, 1)], ids=str)
def test_outputs_that_the_loss_does_not_reach_have_no_gradient_for_the_rule(
    reached: tuple[int, ...],
) -> None:
    both, seen = two_outputs(), []

    def rule(grad_output: Any, x: Tensor, w: Tensor) -> dict[str, Tensor]:
        seen.append([g is not None for g in grad_output])
        parts = zip(grad_output, (x, x.sin()), strict=True)
        return {"w": sum(((g * f).sum(1) for g, f in parts if g is not None), torch.zeros(()))}

    def loss(model: Any, x: Tensor) -> Tensor:
        outputs = both(x, model.w)
        return sum(outputs[k].square().sum(1) * (k + 1) for k in reached)  # type: ignore[return-value]

    model: Any = Formula(loss, w=numbers(D))
    with rule_for(both) as register:
        register(rule)
        found = pergrad.grads(model, lambda m, x: m(x), x := numbers(D, D))
    assert_all_near(found, loop_grads(model, lambda m, x: m(x), x))
    assert seen == [[k in reached for k in range(2)]]


def test_no_rule_runs_for_a_use_that_the_loss_does_not_reach() -> None:
    both, seen = two_outputs(), []

    def rule(grad_output: Any, x: Tensor, w: Tensor) -> dict[str, Tensor]:
        seen.append(1)
        return {"w": (grad_output[0] * x).sum(1)}

    def forward(m: Any, x: Tensor) -> Tensor:
        both(x, m.w)
        return x * m.w

    with rule_for(both) as register:
        register(rule)
        pergrad.grads(Formula(forward, w=numbers(D)), squares, numbers(3, D))
    assert not seen


def one_output() -> Callable[..., Any]:
    def times(x: Tensor, w: Tensor, power: int = 1) -> Tensor:
        if has_torch_function((x, w)):
            return handle_torch_function(times, (x, w), x, w, power)  # type: ignore[no-any-return]
        return x**power * w

    return times


def test_a_rule_that_gives_no_gradient_for_a_weight_is_named() -> None:
    times = one_output()
    model = Formula(lambda m, x: times(x, m.w), w=numbers(D))
    with rule_for(times) as register:
        register(lambda grad_output, x, w, power=1: {"other": grad_output.sum(1), "b": grad_output})
        with pytest.raises(PergradError) as caught:
            pergrad.grads(model, squares, numbers(3, D))
    assert "the rule of `times` returns no gradient for argument 'w'" in str(caught.value)
    assert "which is parameter 'w'; it returns gradients for ['b', 'other']" in str(caught.value)


@pytest.mark.parametrize("is_lazy", [False, True])
@pytest.mark.parametrize("size", [1, 3, D])
def test_a_rule_sees_samples_in_front_and_may_return_a_function(size: int, is_lazy: bool) -> None:
    times, shapes = one_output(), []

    def rule(grad_output: Tensor, x: Tensor, w: Tensor, power: int = 1) -> dict[str, Any]:
        shapes.append((tuple(grad_output.shape), tuple(x.shape), tuple(w.shape), power))
        found = (grad_output * x**power).sum((1, 2))
        return {"w": (lambda: found) if is_lazy else found}

    model = Formula(lambda m, x: times(x, m.w, 2), w=numbers(D))
    with rule_for(times) as register:
        register(rule)
        found = pergrad.grads(model, squares, x := numbers(size, 3, D))
    assert_all_near(found, loop_grads(model, squares, x))
    assert shapes == [((size, 1, 3, D), (size, 1, 3, D), (D,), 2)]


@pytest.mark.parametrize("merges", [False, True])
def test_a_rule_that_merges_rows_gets_them_without_a_dimension_of_one(merges: bool) -> None:
    times, shapes = one_output(), []

    def rule(grad_output: Tensor, x: Tensor, w: Any, power: int = 1) -> dict[str, Any]:
        shapes.append((tuple(grad_output.shape), tuple(x.shape)))
        return {"w": (grad_output * x**power).flatten(1, -2).sum(1)}

    model = Formula(lambda m, x: times(x, m.w), w=numbers(D))
    with rule_for(times, merges_rows=merges, weights={"w": ("x",)}) as register:
        register(rule)
        for shape in ((2, 3, D), (2, D)):
            for _ in range(2):  # worked out, and by the plan
                found = pergrad.grads(model, squares, x := numbers(*shape))
                assert_all_near(found, loop_grads(model, squares, x))
    rows = (2, 3, D) if merges else (2, 1, 3, D)
    assert shapes == [(rows, rows)] * 2 + [((2, 1, D), (2, 1, D))] * 2


@pytest.mark.parametrize("size", [1, 2, D])
def test_samples_in_another_dimension_or_told_by_owners_come_in_front_too(size: int) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        other = F.linear(x.transpose(0, 1), m.w, m.b).transpose(0, 1)  # samples in dimension 1
        merged = F.linear(x.flatten(0, 1), m.w).view(len(x), -1, D)
        mask = torch.ones(len(x), x.shape[1], dtype=torch.bool)
        mask[:, 1] = False
        picked = F.linear(x[mask], m.w, m.b)  # rows by owner
        back = torch.zeros_like(x).masked_scatter(mask.unsqueeze(-1).expand_as(x), picked)
        return other * merged + back

    assert_exact(Case(lambda: model_of(forward), of((3, D))), size)


def test_a_rule_runs_outside_of_autocast() -> None:
    times, seen = one_output(), []

    def rule(grad_output: Tensor, x: Tensor, w: Tensor, power: int = 1) -> dict[str, Tensor]:
        seen.append(torch.is_autocast_enabled("cpu"))
        return {"w": (grad_output * x).sum(1)}

    with rule_for(times) as register:
        register(rule)
        with pergrad.record(
            model := Formula(lambda m, x: times(x, m.w), w=numbers(D)), pergrad.Norms()
        ):
            total = model(numbers(3, D)).sum()
            with torch.autocast("cpu", torch.bfloat16):
                total.backward()
    assert seen == [False]


# -- the graph, in place writes, several backwards


def test_an_argument_changed_in_place_after_the_call_is_refused_by_hook_and_node() -> None:
    for needs_grad in (False, True):

        def forward(m: Any, x: Tensor) -> Tensor:
            h = x * 1.0
            y = F.linear(h, m.w)
            h.detach().add_(1.0)
            return y

        model, x = model_of(forward), numbers(3, D).requires_grad_(needs_grad)
        with (
            pytest.raises(RuntimeError, match=r"in ?place"),
            pergrad.record(model, pergrad.Norms()),
        ):
            model(x).sum().backward()


def test_an_argument_changed_after_a_backward_that_kept_the_graph_is_refused_in_the_next() -> None:
    model, x = model_of(), numbers(3, D).requires_grad_()
    h = x.detach().clone()

    def twice() -> None:
        with pergrad.record(model, pergrad.Grads()):
            total = model(h).sum()
            total.backward(retain_graph=True)
            h.zero_()
            total.backward()

    with pytest.raises(RuntimeError, match=r"in ?place"):
        twice()


def test_backwards_through_a_retained_graph_add_up() -> None:
    model, x = model_of(), numbers(D, D)
    with pergrad.record(model, pergrad.Grads()) as grads:
        total = squares(model, x).sum()
        total.backward(retain_graph=True)
        total.backward(retain_graph=True)
        total.backward()
    assert_all_near(grads.result, loop_grads(model, squares, x), times=3)


def second_backward(x: Tensor, forward: Callable[..., Any]) -> None:
    model = model_of(forward)
    with pergrad.record(model, pergrad.Grads()):
        y = model(x)
        y.backward(torch.ones_like(y))
        y.backward(torch.ones_like(y))


def test_a_second_backward_without_a_retained_graph_is_refused() -> None:
    with pytest.raises(RuntimeError, match="second time"):
        second_backward(numbers(3, D), forward_twice)
    with pytest.raises(RuntimeError, match="second time"):
        second_backward(numbers(3, D).requires_grad_(), lambda m, x: F.linear(x, m.w))


class InNumpy(torch.autograd.Function):
    """x, in memory whose lifetime can be watched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, made: list[weakref.ref[Any]]) -> Tensor:
        memory = np.zeros(x.shape)
        made.append(weakref.ref(memory))
        return torch.from_numpy(memory).copy_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@pytest.mark.parametrize("keeps", [False, True])
def test_a_hook_lets_go_of_what_it_kept_once_it_has_run_unless_the_graph_is_kept(
    keeps: bool,
) -> None:
    made: list[weakref.ref[Any]] = []
    model = model_of(lambda m, x: F.linear(InNumpy.apply(x, made), m.w))
    with pergrad.record(model, pergrad.Norms()):
        y = model(numbers(3, D).requires_grad_())
        assert not is_tapped_by_a_node(y)
        total = y.sum()
        total.backward(retain_graph=keeps)
        gc.collect()
        assert (made[0]() is not None) is keeps


def test_create_graph_is_refused_by_hook_and_by_node() -> None:
    for x in (numbers(3, D), numbers(3, D).requires_grad_()):
        model = model_of(lambda m, x: F.linear(x, m.w))
        with (
            pytest.raises(UnsupportedFunctionError, match="create_graph=True ran inside"),
            pergrad.record(model, pergrad.Norms()),
        ):
            model(x).sum().backward(create_graph=True)


def test_a_gradient_after_the_block_is_refused_by_hook_and_by_node() -> None:
    for x in (numbers(3, D), numbers(3, D).requires_grad_()):
        model = model_of(lambda m, x: F.linear(x, m.w))
        with pergrad.record(model, pergrad.Norms()):
            late = model(x).sum()
            late.backward(retain_graph=True)
        with pytest.raises(ScopeError, match="outside of its scope"):
            late.backward()


def test_gradients_asked_for_by_torch_inside_of_the_block_leave_ours_alone() -> None:
    model, x = model_of(), numbers(D, D).requires_grad_()
    with pergrad.record(model, pergrad.Grads()) as grads:
        total = squares(model, x).sum()
        (of_input,) = torch.autograd.grad(total, x, retain_graph=True)
        total.backward(inputs=[x], retain_graph=True)
        total.backward()
    assert_near(of_input, torch.autograd.grad(squares(model, x).sum(), x)[0])
    assert_near(x.grad, 2 * of_input)
    assert_all_near(grads.result, loop_grads(model, squares, x.detach()))


@pytest.mark.parametrize("size", [1, 3, D])
@pytest.mark.parametrize(
    "change",
    [
        lambda y: y.mul_(3.0),
        lambda y: y.view(-1).mul_(2.0).view(y.shape),
        lambda y: F.relu(y, inplace=True),
        lambda y: y[:, :1].zero_() is None or y,
        lambda y: y.transpose(-1, -2).exp_().transpose(-1, -2),
    ],
    ids=["whole", "view", "relu", "part", "transposed view"],
)
def test_an_output_written_to_in_place_has_the_gradient_of_the_loop(
    change: Callable[[Tensor], Tensor], size: int
) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return change(F.linear(F.linear(x, m.w, m.b).sin(), m.w))

    assert_exact(Case(lambda: model_of(forward), of((3, D))), size)


def test_a_node_that_another_use_has_too_is_not_hooked_twice() -> None:
    """A function may return its input: what it made belongs to another call."""

    def same(x: Tensor, w: Tensor) -> Tensor:
        if has_torch_function((x, w)):
            return handle_torch_function(same, (x, w), x, w)  # type: ignore[no-any-return]
        return x

    def rule(grad_output: Tensor, x: Tensor, w: Tensor) -> dict[str, Tensor]:
        return {"w": grad_output.sum(1)}

    model, x = model_of(lambda m, x: same(F.linear(x, m.w), m.b)), numbers(3, D).requires_grad_()
    with rule_for(same) as register:
        register(rule)
        found = pergrad.grads(model, squares, x)
    y = F.linear(x, model.w).detach()
    assert_near(found["b"], 2 * y)
    assert_near(found["w"], torch.einsum("no,ni->noi", 2 * y, x.detach()))


# -- checkpoints, and work that waits


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_change_no_gradient(
    reentrant: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_is_bound_by_python", lambda _: waits)

    def forward(m: Any, x: Tensor) -> Tensor:
        inner = lambda h: F.linear(F.linear(h, m.w, m.b).tanh(), m.w * 2)  # noqa: E731
        h = F.linear(x, m.w)
        h = checkpoint(inner, h, use_reentrant=reentrant) if m.training else inner(h)
        return F.linear(h, m.w)

    model, x = model_of(forward), numbers(D, D).requires_grad_()
    with pergrad.record(model, pergrad.Grads()) as grads:
        squares(model, x).sum().backward()
    assert_all_near(grads.result, loop_grads(model.eval(), squares, x.detach()))


def test_rules_that_wait_give_what_rules_give_at_once_and_count_what_they_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger, "_is_bound_by_python", lambda _: True)
    model, x = model_of(), numbers(D, D)
    held: list[int] = []
    put = ledger.Queue.put

    def counting(self: Any, work: Any, held_bytes: int = 0, **options: Any) -> None:
        held.append(held_bytes)
        put(self, work, held_bytes, **options)

    monkeypatch.setattr(ledger.Queue, "put", counting)
    with pergrad.record(model, pergrad.Grads(), max_bytes=10**6) as grads:
        total = squares(model, x).sum()
        total.backward()
    assert_all_near(grads.result, loop_grads(model, squares, x))
    of_one = x.nbytes
    assert [h for h in held if h] == [2 * of_one, 2 * of_one]  # the output's gradient and the input


def test_a_backward_that_leaves_ours_alone_enqueues_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger, "_is_bound_by_python", lambda _: True)
    model, x = model_of(), numbers(D, D).requires_grad_()
    with pergrad.record(model, pergrad.Grads(), max_bytes=10**6) as grads:
        total = squares(model, x).sum()
        torch.autograd.grad(total, x, retain_graph=True)
        total.backward()
    assert_all_near(grads.result, loop_grads(model, squares, x.detach()))
