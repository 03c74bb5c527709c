"""A user's own torch.autograd.Function, with and without a weight, against the loop."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import pergrad
from pergrad.engine.intercepting.autograd_functions import _applied, _refuse_untracked
from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.samples.layouts import Constant, Layout, Lost, Scope
from pergrad.errors import PergradError
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import Case, Formula, assert_exact, numbers, state_of, total

T = D = 4


class Sine(torch.autograd.Function):
    """No weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


class Map(torch.autograd.Function):
    """y = x Wᵀ + b; the gradients of weights are sums over all rows, as people write them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
        return grad @ weight, rows.t() @ inputs, rows.sum(0) if ctx.has_bias else None


class OnceScale(torch.autograd.Function):
    """The weight is on ctx, the input comes second, and there are numbers and two outputs."""

    @staticmethod
    def forward(ctx: Any, power: int, weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.power, ctx.weight = power, weight
        ctx.save_for_backward(x)
        return x * weight**power, x.sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_sum: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        of_weight = ctx.power * ctx.weight ** (ctx.power - 1) * (grad * x).flatten(0, -2).sum(0)
        return None, of_weight, grad * ctx.weight**ctx.power + grad_sum.unsqueeze(-1)


class Modern(torch.autograd.Function):
    """With setup_context and a generated vmap rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(tuple(range(x.dim() - weight.dim())))


class StraightThrough(torch.autograd.Function):
    """A weight alone: a quantised weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Reversed(torch.autograd.Function):
    """The gradient's sign is turned: the backward is not that of the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * grad, None


class InNumpy(torch.autograd.Function):
    """Leaves torch: nothing inside of it can be seen, nor tried on tensors without values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.from_numpy(np.tanh(x.detach().numpy() @ weight.detach().numpy().T))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad * (1 - (x @ weight.t()).tanh() ** 2)
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class ByItem(torch.autograd.Function):
    """One number after the other, as C code would; samples may be anywhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        numbers = [v.item() for v in x.reshape(-1)]
        return torch.tensor(numbers, dtype=x.dtype).view(x.shape) * weight.item()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight.item(), (grad * x).sum().view(weight.shape)


class OverTheBatch(torch.autograd.Function):
    """In numpy, and each sample's result depends on all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        array = x.detach().numpy()
        return torch.from_numpy(array - array.mean(0)) * weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return (grad - grad.mean(0)) * weight, (grad * (x - x.mean(0))).flatten(0, -2).sum(0)


class ForFourOnly(torch.autograd.Function):
    """In numpy, for batches of one size: it cannot be tried with another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy().reshape(4, T, D)) * weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, (grad * ctx.saved_tensors[0]).flatten(0, -2).sum(0)


class CentredForFourOnly(ForFourOnly):
    """Mixes the samples, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        found: Tensor = ForFourOnly.forward(ctx, x - x.mean(0), weight)
        return found


def formula(function: Callable[..., Any], *sample: int, **shapes: tuple[int, ...]) -> Case:
    return Case(
        lambda: Formula(function, **{name: numbers(*shape) for name, shape in shapes.items()}),
        lambda size: (numbers(size, *(sample or (T, D))),),
    )


CASES = {
    "no weight": formula(lambda m, x: Sine.apply(x * m.w) * m.w, w=(D,)),
    "no weight, between layers": formula(
        lambda m, x: F.linear(Sine.apply(F.linear(x, m.v)), m.w), v=(3, D), w=(2, 3)
    ),
    "reversed gradient": formula(lambda m, x: Reversed.apply(x @ m.w, 0.5) @ m.w, w=(D, D)),
    "weight": formula(lambda m, x: Map.apply(x, m.w), w=(3, D)),
    "weight and bias": formula(lambda m, x: Map.apply(x, m.w, m.b), w=(3, D), b=(3,)),
    "one row a sample": formula(lambda m, x: Map.apply(x, m.w, m.b), D, w=(3, D), b=(3,)),
    "derived weight": formula(lambda m, x: Map.apply(x, m.w.tanh().t()), w=(D, 3)),
    "weight used elsewhere too": formula(
        lambda m, x: Map.apply(x, m.w) + F.linear(x, m.w), w=(D, D)
    ),
    "twice": formula(lambda m, x: Map.apply(Map.apply(x, m.w), m.w), w=(D, D)),
    "rows folded": formula(lambda m, x: Map.apply(x.reshape(-1, D), m.w), w=(3, D)),
    "rows selected": formula(lambda m, x: Map.apply(x[x[..., 0] > -0.5], m.w), w=(3, D)),
    "samples second": formula(
        lambda m, x: Map.apply(x.transpose(0, 1), m.w).transpose(0, 1), w=(3, D)
    ),
    "two outputs": formula(lambda m, x: OnceScale.apply(2, m.w, x), w=(D,)),
    "one of two outputs": formula(lambda m, x: OnceScale.apply(3, m.w, x)[0], w=(D,)),
    "modern": formula(lambda m, x: Modern.apply(x, m.w), w=(D,)),
    "in numpy": formula(lambda m, x: InNumpy.apply(x, m.w), w=(3, D)),
    "in numpy, one row a sample": formula(lambda m, x: InNumpy.apply(x, m.w), D, w=(3, D)),
    "in numpy, rows folded": formula(lambda m, x: InNumpy.apply(x.reshape(-1, D), m.w), w=(3, D)),
    "in numpy, rows selected": formula(
        lambda m, x: InNumpy.apply(x[x[..., 0] > -0.5], m.w), w=(3, D)
    ),
    "in numpy, samples second": formula(
        lambda m, x: InNumpy.apply(x.transpose(0, 1), m.w).transpose(0, 1), w=(3, D)
    ),
    "in numpy, between layers": formula(
        lambda m, x: F.linear(InNumpy.apply(x * m.s, m.w), m.v), s=(D,), w=(D, D), v=(2, D)
    ),
    "by item": formula(lambda m, x: ByItem.apply(x * m.v, m.w), w=(1,), v=(D,)),
    "weight alone": formula(lambda m, x: F.linear(x, StraightThrough.apply(m.w)), w=(3, D)),
    "weight alone, then a function": formula(
        lambda m, x: Map.apply(x, StraightThrough.apply(m.w)), w=(3, D)
    ),
}


@pytest.mark.parametrize("size", [T, 3, 1])
@pytest.mark.parametrize("name", CASES)
def test_per_sample_gradients_are_those_of_the_loop(name: str, size: int) -> None:
    assert_exact(CASES[name], size)


def test_function_that_leaves_torch_and_mixes_samples_is_refused() -> None:
    model = Formula(lambda m, x: OverTheBatch.apply(x, m.w), w=numbers(D))
    with pytest.raises(PergradError, match="mixes or reorders the samples"):
        pergrad.grads(model, lambda m, x: total(m(x)), numbers(3, T, D))


def test_function_whose_samples_cannot_be_told_says_why_and_what_to_do() -> None:
    model = Formula(lambda m, x: CentredForFourOnly.apply(x, m.w), w=numbers(D))
    message = (
        r"CentredForFourOnly.*samples cannot be told.*one more sample.*ValueError.*(Keep|Register)"
    )
    with pytest.raises(PergradError, match=message):
        pergrad.grads(model, lambda m, x: total(m(x)), numbers(4, T, D))


def test_function_for_one_size_is_judged_by_other_values() -> None:
    model, x = Formula(lambda m, x: ForFourOnly.apply(x, m.w), w=numbers(D)), numbers(4, T, D)
    found = pergrad.grads(model, lambda m, x: m(x).square().flatten(1).sum(1), x)
    torch.testing.assert_close(found["w"], (2 * x.square() * model.w).sum(1).detach())


class Normalised(torch.autograd.Function):
    """The backward divides by the norm of all gradients: each sample's depends on the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm()


class Centred(Normalised):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(0)


class BatchLogSumExp(torch.autograd.Function):
    """A loss over the batch, whose backward has no graph to the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.softmax(0))
        return x.logsumexp(0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


# Taken before any recording, as at the top of a module: its calls are out of sight.
EARLIER = {f: f.apply for f in (Sine, Normalised, Centred, BatchLogSumExp)}


@pytest.mark.parametrize("is_seen", [True, False], ids=["in sight", "out of sight"])
@pytest.mark.parametrize("function", [Normalised, Centred, BatchLogSumExp])
def test_a_backward_that_mixes_samples_is_refused(function: Any, is_seen: bool) -> None:
    model = Formula(
        lambda m, x: (function.apply if is_seen else EARLIER[function])(x * m.w), w=numbers(D)
    )
    before = state_of(model)
    with pytest.raises(PergradError), pergrad.record(model, pergrad.Grads()):
        model(numbers(3, D)).sum().backward()
    assert state_of(model) == before


@pytest.mark.parametrize("size", [T, 3, 1])
def test_an_apply_that_was_taken_earlier_is_followed(size: int) -> None:
    assert_exact(formula(lambda m, x: EARLIER[Sine](x * m.w) @ m.v, w=(D,), v=(D, 2)), size)


def test_hooks_of_the_user_see_the_gradient_once() -> None:
    seen: list[Tensor] = []

    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = x * m.w
        hidden.register_hook(seen.append)
        return Reversed.apply(Sine.apply(hidden), 0.5)

    model, x = Formula(forward, w=numbers(D)), numbers(3, D)
    pergrad.grads(model, lambda m, x: total(m(x)), x)
    (found,) = seen
    seen.clear()
    total(model(x)).sum().backward()
    torch.testing.assert_close(found, seen[0])


class Hidden(torch.autograd.Function):
    """Takes its weight from outside of its arguments: nobody sees that it is used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: nn.Module) -> Tensor:
        ctx.model = model
        return F.linear(x, model.weight.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            x = torch.ones(len(grad), ctx.model.in_features, dtype=grad.dtype)
            torch.autograd.backward(F.linear(x, ctx.model.weight), grad)
        return grad @ ctx.model.weight, None


def test_weight_used_out_of_sight_is_recorded_or_refused_never_an_ordinary_gradient() -> None:
    inner = nn.Linear(D, 3, bias=False).double()
    model = Formula(lambda m, x: Hidden.apply(x * m.scale, inner), scale=numbers(D), inner=inner)
    before = state_of(model)
    with pytest.raises(PergradError):
        pergrad.grads(model, lambda m, x: total(m(x)), numbers(3, D))
    assert state_of(model) == before


# -- `Function.apply` itself


def test_other_threads_and_the_time_after_have_the_original_apply() -> None:
    original, seen = torch.autograd.Function.__dict__["apply"], []

    def look() -> None:
        seen.append((Sine.apply.__func__, Sine.apply.__self__))

    model, x = nn.Linear(D, D), torch.ones(2, D)
    with pergrad.record(model, pergrad.Norms()):
        inside = Sine.apply
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        Sine.apply(model(x)).sum().backward()
    assert seen == [(original.__func__, Sine)]
    assert inside.__func__ is not original.__func__
    assert torch.autograd.Function.__dict__["apply"] is original


def test_apply_stays_intercepted_until_the_last_thread_has_closed_its_recording() -> None:
    original = torch.autograd.Function.__dict__["apply"]
    opened, close = threading.Event(), threading.Event()
    x, results = torch.ones(2, D), []

    def open_one() -> None:
        layer, norms = nn.Linear(D, 1, bias=False), pergrad.Norms()
        with pergrad.record(layer, norms, batch_size=2):
            opened.set()
            assert close.wait(60)
            Map.apply(x, layer.weight).sum().backward()
        results.append(norms.result)

    thread = threading.Thread(target=open_one)
    thread.start()
    assert opened.wait(60)
    model = nn.Linear(D, 1)
    with pergrad.record(model, pergrad.Norms()):
        model(x).sum().backward()
    assert torch.autograd.Function.__dict__["apply"] is not original
    close.set()
    thread.join()
    assert torch.autograd.Function.__dict__["apply"] is original
    torch.testing.assert_close(results, [torch.full((2,), 2.0)])


def test_an_error_in_a_recording_gives_the_original_apply_back() -> None:
    original = torch.autograd.Function.__dict__["apply"]
    with pytest.raises(ZeroDivisionError), pergrad.record(nn.Linear(2, 2), pergrad.Norms()):
        raise ZeroDivisionError
    assert torch.autograd.Function.__dict__["apply"] is original


def test_an_apply_that_somebody_has_set_meanwhile_stays() -> None:
    original = torch.autograd.Function.__dict__["apply"]
    theirs = classmethod(lambda cls, *args: original.__get__(None, cls)(*args))
    model = nn.Linear(2, 2)
    try:
        with pergrad.record(model, pergrad.Norms()):
            model(torch.ones(2, 2)).sum().backward()
            torch.autograd.Function.apply = theirs
        assert torch.autograd.Function.__dict__["apply"] is theirs
    finally:
        torch.autograd.Function.apply = original


# -- what leaves a reentrant checkpoint


def of_a_checkpoint(*shape: int) -> Tensor:
    return numbers(*shape).requires_grad_().clone()  # with a graph, as what a Function returns


def mark_inside(tracker: Tracker, t: Tensor, layout: Layout) -> None:
    """Tags a tensor as the functions inside of the checkpoint do, where gradients are off."""
    with torch.no_grad():
        tracker.mark(t, layout)


def test_all_that_leaves_a_checkpoint_belongs_to_the_only_sample() -> None:
    tracker = Tracker(Scope(1), 0, ())
    left = of_a_checkpoint(3, 2)
    mark_inside(tracker, left, tracker.constant)
    _refuse_untracked(tracker, (left, 7))
    assert tracker.layout(left) == tracker.scope.samples(0, 1, 3)


def test_a_number_that_leaves_a_checkpoint_of_one_sample_is_refused() -> None:
    tracker = Tracker(Scope(1), 0, ())
    left = of_a_checkpoint()
    mark_inside(tracker, left, tracker.constant)
    _refuse_untracked(tracker, left)
    assert isinstance(tracker.layout(left), Lost)


def test_what_leaves_a_checkpoint_without_samples_is_refused_once_it_is_differentiated() -> None:
    tracker = Tracker(Scope(4), 0, ())
    known, free, left, other = of_a_checkpoint(4), numbers(2), *(of_a_checkpoint(2) for _ in "ab")
    mark_inside(tracker, known, tracker.scope.samples(0))
    for t in (free, left, other):
        mark_inside(tracker, t, tracker.constant)
    _refuse_untracked(tracker, [known, free, left, other])  # each by itself
    assert tracker.layout(known) == tracker.scope.samples(0)
    assert isinstance(tracker.layout(free), Constant)
    known.sum().backward()
    for t in (left, other):
        lost = tracker.layout(t)
        assert isinstance(lost, Lost)
        assert lost.why == "mixed"
        assert "use_reentrant=False" in lost.reason
        with pytest.raises(PergradError, match="a reentrant checkpoint returns a tensor"):
            t.sum().backward()


# Uses of a layer in a reentrant checkpoint of a loss function; `h` is the layer's own output.
REORDERED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "inside": lambda m, h: checkpoint(lambda h: m(h.flip(0)), h, use_reentrant=True),
    "inside, by halves": lambda m, h: checkpoint(
        lambda h: torch.cat([m(h[2:]), m(h[:2])]), h, use_reentrant=True
    ),
}
ORDERED_AGAIN: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "inside, and back outside": lambda m, h: REORDERED["inside"](m, h).flip(0),
    "before, and back after": lambda m, h: checkpoint(m, h.flip(0), use_reentrant=True).flip(0),
    "by halves, in order": lambda m, h: checkpoint(
        lambda h: torch.cat([m(h[:2]), m(h[2:])]), h, use_reentrant=True
    ),
    "inside and back": lambda m, h: checkpoint(
        lambda h: m(h[torch.tensor([2, 0, 3, 1])])[torch.tensor([1, 3, 0, 2])],
        h,
        use_reentrant=True,
    ),
}


@pytest.mark.parametrize("way", REORDERED)
def test_losses_that_a_reentrant_checkpoint_reorders_are_refused(way: str) -> None:
    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return REORDERED[way](model, model(x)).square().sum(1)

    with pytest.raises(PergradError, match="use_reentrant=False"):
        pergrad.norms(nn.Linear(D, D).double(), losses, numbers(T, D))


@pytest.mark.parametrize("way", ORDERED_AGAIN)
def test_samples_keep_their_order_through_a_reentrant_checkpoint(way: str) -> None:
    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return ORDERED_AGAIN[way](model, model(x)).square().sum(1)

    def plain(model: nn.Module, x: Tensor) -> Tensor:
        return model(model(x)).square().sum(1)

    model, x = nn.Linear(D, D).double(), numbers(T, D)
    found, expected = pergrad.grads(model, losses, x), loop_grads(model, plain, x)
    for name, g in expected.items():
        assert_near(found[name], g)


@pytest.mark.parametrize("reorders", ["inside", "before"])
def test_a_first_call_within_a_reentrant_checkpoint_gives_no_rows_in_another_order(
    reorders: str,
) -> None:
    def losses(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        if reorders == "inside":
            x = checkpoint(lambda h: model(h.flip(0)), x, use_reentrant=True)
        else:
            x = checkpoint(model, x, use_reentrant=True).flip(0)
        return x.square().sum(1)

    with pytest.raises(PergradError, match=r"use_reentrant=False|samples were reordered"):
        pergrad.norms(nn.Linear(D, D).double(), losses, numbers(T, D))


def test_one_object_stands_for_the_apply_of_a_class() -> None:
    assert _applied(Sine) is _applied(Sine)
    assert _applied(Sine) is not _applied(Map)
    assert (_applied(Sine).function, _applied(Sine).__name__) == (Sine, "Sine")
    assert torch.equal(_applied(Sine)(x := numbers(3)), x.sin())
