"""Hooks of the user: one that treats each sample by itself is kept, one that combines them is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.engine.collecting.hooks import (
    guard_nodes,
    guarded,
    guarding_modules,
    lasting_nodes,
)
from pergrad.engine.samples.layouts import Owners, Scope
from pergrad.errors import MixedSamplesError, UnsupportedFunctionError
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import Formula, numbers

N, D = 4, 3

ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda g: g * 0.5,
    "clamped": lambda g: g.clamp(-0.1, 0.1),
    "signs": lambda g: g.sign(),
    "centred in each row": lambda g: g - g.mean(1, keepdim=True),
}
TOGETHER: dict[str, Callable[[Tensor], Tensor]] = {
    "normalised": lambda g: g / g.norm(),
    "centred": lambda g: g - g.mean(0),
    "reversed": lambda g: g.flip(0),
    "shifted": lambda g: g + 1,
    "clipped together": lambda g: g * (0.01 / g.norm()).clamp(max=1),
}


def gradient() -> Tensor:
    return numbers(N, D)


@pytest.mark.parametrize("name", ALONE)
def test_a_hook_that_treats_each_sample_alone_is_as_it_was(name: str) -> None:
    hook, g = ALONE[name], gradient()
    found = guarded(hook, Scope(N).samples(0))(g)
    assert found is not None
    assert torch.equal(found, hook(g))


@pytest.mark.parametrize("name", TOGETHER)
def test_a_hook_that_combines_samples_is_refused(name: str) -> None:
    with pytest.raises(MixedSamplesError, match=r"shape \(4, 3\) combines"):
        guarded(TOGETHER[name], Scope(N).samples(0))(gradient())


def test_a_hook_that_draws_random_numbers_leaves_them_as_one_call_does() -> None:
    def dropping(g: Tensor) -> Tensor:
        return g * (torch.rand(g.shape) < 0.5)

    g = gradient()
    torch.manual_seed(0)
    expected, after = dropping(g), torch.get_rng_state()
    torch.manual_seed(0)
    found = guarded(dropping, Scope(N).samples(0))(g)
    assert found is not None
    assert torch.equal(found, expected)
    assert torch.equal(torch.get_rng_state(), after)


def test_whose_rows_they_are_decides() -> None:
    def summed(g: Tensor) -> Tensor:
        return g + g[[1, 0, 3, 2]]

    own, other = (Owners(Scope(2), 0, torch.tensor(o)) for o in ([0, 0, 1, 1], [0, 1, 0, 1]))
    assert guarded(summed, own)(gradient()) is not None
    with pytest.raises(MixedSamplesError):
        guarded(summed, other)(gradient())
    columns = Scope(D).samples(1)
    assert guarded(lambda g: g.flip(0), columns)(gradient()) is not None
    with pytest.raises(MixedSamplesError):
        guarded(lambda g: g.flip(1), columns)(gradient())


def test_a_hook_that_only_looks_is_called_once_with_the_gradient_and_never_by_a_proof() -> None:
    seen: list[Tensor] = []
    scope, g = Scope(N), gradient()
    hook = guarded(seen.append, scope.samples(0))
    assert hook(g) is None
    assert [t is g for t in seen] == [True]
    with scope.pulling_back():
        assert hook(g) is None
    assert len(seen) == 1


# -- in a recording


def model_of(hook: Callable[[Tensor], Any]) -> Any:
    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = x @ m.w
        if hidden.requires_grad:
            hidden.register_hook(hook)
        return hidden.tanh() @ m.v

    return Formula(forward, w=numbers(D, D), v=numbers(D, D))


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


@pytest.mark.parametrize("name", ALONE)
def test_gradients_are_those_of_the_loop_with_the_hook(name: str) -> None:
    model, x = model_of(ALONE[name]), gradient()
    found = pergrad.grads(model, losses, x)
    for key, expected in loop_grads(model, losses, x).items():
        assert_near(found[key], expected, key)


@pytest.mark.parametrize("name", TOGETHER)
def test_no_gradient_is_computed_with_a_hook_that_combines_samples(name: str) -> None:
    with pytest.raises(MixedSamplesError, match="a hook on a tensor"):
        pergrad.grads(model_of(TOGETHER[name]), losses, gradient())


def test_any_hook_treats_a_batch_of_one_alone() -> None:
    model, x = model_of(TOGETHER["normalised"]), numbers(1, D)
    found = pergrad.grads(model, losses, x)
    for key, expected in loop_grads(model, losses, x).items():
        assert_near(found[key], expected, key)


def test_the_handle_of_a_hook_removes_it() -> None:
    seen: list[Tensor] = []

    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = x @ m.w
        hidden.register_hook(seen.append).remove()
        return hidden

    pergrad.grads(Formula(forward, w=numbers(D, D)), losses, gradient())
    assert not seen


# -- backward hooks of modules


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2)).double()


@pytest.mark.parametrize(
    "register", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_a_hook_of_a_module_may_look_but_not_change(register: str) -> None:
    model, x, seen = layers(), gradient(), []
    expected = loop_grads(model, losses, x)
    handle = getattr(model[1], register)(lambda *_: seen.append(1))
    found = pergrad.grads(model, losses, x)
    assert seen
    for key, rows in expected.items():
        assert_near(found[key], rows, key)
    handle.remove()
    getattr(model[1], register)(lambda m, *grads: tuple(g * 2 for g in grads[-1]))
    with pytest.raises(UnsupportedFunctionError, match="backward hook of Tanh changes gradients"):
        pergrad.grads(model, losses, x)


def test_hooks_of_modules_are_their_own_again_afterwards() -> None:
    model = layers()
    hooks = [lambda *_: None, lambda *_: None]
    model[0].register_full_backward_hook(hooks[0])
    gone = model[1].register_full_backward_pre_hook(hooks[1])

    def fails() -> None:
        with guarding_modules(model):
            assert [*model[0]._backward_hooks.values()] != hooks[:1]
            gone.remove()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert [*model[0]._backward_hooks.values()] == hooks[:1]
    assert not model[1]._backward_pre_hooks


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * 2


def test_hooks_behind_a_function_whose_result_is_gone_are_guarded() -> None:
    x = torch.ones(3, requires_grad=True)
    squares = x * x
    result = _Doubled.apply(_Doubled.apply(squares))
    seen = lasting_nodes(result.grad_fn)
    assert squares.grad_fn in seen
    del result
    squares.grad_fn.register_prehook(lambda gradients: (gradients[0].flip(0),))
    guard_nodes(seen)
    with pytest.raises(UnsupportedFunctionError, match="MulBackward0 changes gradients"):
        (squares * 3).sum().backward()
