"""What a recording refuses once it has seen the losses, the hooks and the parameters of a step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.errors import BatchSizeError, MixedSamplesError, PergradError
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import Formula, numbers, state_of

N, D = 4, 3


def model_of(function: Callable[..., Any] | None = None) -> Any:
    return Formula(function or (lambda m, x: (x @ m.w).tanh()), w=numbers(D, D))


def rows(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


def assert_as_the_loop(model: nn.Module, loss: Any, *batch: Tensor, **options: Any) -> None:
    found = pergrad.grads(model, loss, *batch, **options)
    for name, expected in loop_grads(model, loss, *batch).items():
        assert_near(found[name], expected, name)


# -- the order of the losses


REORDERED: dict[str, Callable[[Tensor], Tensor]] = {
    "reversed": lambda each: each.flip(0),
    "rolled": lambda each: each.roll(1),
    "by an index": lambda each: each[torch.tensor([1, 0, 2, 3])],
    "cumulative": lambda each: each.cumsum(0),
    "averaged": lambda each: each.mean().expand(N),
    "added up": lambda each: each + each.flip(0),
    "by vmap, reversed": lambda each: torch.vmap(lambda e: e * 2)(each).flip(0),
}
IN_ORDER: dict[str, Callable[[Tensor], Tensor]] = {
    "as they are": lambda each: each,
    "scaled": lambda each: each * 3,
    "there and back": lambda each: each.flip(0).flip(0),
    "by an index": lambda each: each[torch.arange(N)],
    "joined": lambda each: torch.cat([each[:2], each[2:]]),
    "one by one": lambda each: torch.cat([e * 2 for e in each.split(1)]),
    "by vmap": lambda each: torch.vmap(lambda e: e * 2)(each),
    "written in place": lambda each: torch.zeros(N, dtype=each.dtype).copy_(each),
    "written": lambda each: torch.zeros(N, dtype=each.dtype).index_copy(0, torch.arange(N), each),
}


@pytest.mark.parametrize("name", REORDERED)
def test_losses_in_another_order_are_refused(name: str) -> None:
    model, x = model_of(), numbers(N, D)
    before = state_of(model)
    with pytest.raises(MixedSamplesError):
        pergrad.grads(model, lambda m, x: REORDERED[name](rows(m, x)), x)
    assert state_of(model) == before


@pytest.mark.parametrize("name", IN_ORDER)
def test_losses_in_order_are_taken_whatever_made_them(name: str) -> None:
    model, x = model_of(), numbers(N, D)
    found = pergrad.grads(model, lambda m, x: IN_ORDER[name](rows(m, x)), x)
    each = IN_ORDER[name](rows(model, x))
    for n in range(N):
        (expected,) = torch.autograd.grad(each[n], [model.w], retain_graph=True)
        assert_near(found["w"][n], expected)


@pytest.mark.parametrize("count", [N - 1, N + 1, 2 * N])
def test_another_number_of_losses_is_refused(count: int) -> None:
    model, x = model_of(), numbers(N, D)
    with pytest.raises(BatchSizeError, match=f"{count} losses for a batch of {N} samples"):
        pergrad.grads(model, lambda m, x: rows(m, x).repeat(2)[:count], x)


def test_the_loss_of_one_sample_is_its_own() -> None:
    model = model_of()
    assert_as_the_loop(model, lambda m, x: rows(m, x).cumsum(0), numbers(1, D))


def test_a_sum_of_losses_has_no_order() -> None:
    model, x = model_of(), numbers(N, D)
    found = pergrad.grads(model, lambda m, x: rows(m, x).flip(0).sum(), x)
    assert_near(found["w"], loop_grads(model, rows, x)["w"])


# -- hooks


def test_a_hook_of_a_parameter_gets_the_gradient_of_each_sample() -> None:
    model, x = model_of(), numbers(N, D)
    expected = loop_grads(model, rows, x)["w"]
    seen: list[Tensor] = []
    handles = [
        model.w.register_hook(lambda g: g.clamp(-0.1, 0.1)),
        model.w.register_hook(seen.append),
    ]
    found = pergrad.grads(model, rows, x)
    assert_near(found["w"], expected.clamp(-0.1, 0.1))
    assert_near(torch.stack(seen), expected.clamp(-0.1, 0.1))
    for handle in handles:
        handle.remove()
    assert_near(pergrad.grads(model, rows, x)["w"], expected)


def test_a_hook_that_waits_for_a_gradient_is_refused_and_stays() -> None:
    model, ran = model_of(), []
    model.w.register_post_accumulate_grad_hook(lambda p: ran.append(1))
    with pytest.raises(PergradError, match="parameter 'w' has a hook"):
        pergrad.grads(model, rows, numbers(N, D))
    rows(model, numbers(N, D)).sum().backward()
    assert ran == [1]


# -- parameters that come later


def test_a_parameter_made_in_the_forward_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        if not hasattr(m, "late"):
            m.late = nn.Parameter(numbers(D))
        return x @ m.w * m.late

    model, x = model_of(forward), numbers(N, D)
    with pytest.raises(PergradError, match="parameter 'late' was made or replaced"):
        pergrad.grads(model, rows, x)
    assert_as_the_loop(model, rows, x)  # now it is there from the beginning


def test_a_parameter_replaced_in_the_forward_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.w = nn.Parameter(m.w.detach() * 2)
        return x @ m.w

    with pytest.raises(PergradError):
        pergrad.grads(model_of(forward), rows, numbers(N, D))


def test_leaves_of_others_are_no_parameters_of_the_module() -> None:
    other = numbers(D).requires_grad_()
    model, x = model_of(lambda m, x: x @ m.w * other), numbers(N, D)
    assert_as_the_loop(model, rows, x)


# -- buffers


class Counts(nn.Module):
    """Counts its calls in a buffer, and mixes the samples if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(numbers(D, D))
        self.register_buffer("calls", torch.zeros(()))
        self.norm = nn.BatchNorm1d(D).double()
        self.mixes = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = x @ self.w
        return self.norm(y) if self.mixes else y


def test_a_step_that_is_refused_has_not_written_to_buffers() -> None:
    model, x = Counts(), numbers(N, D)
    pergrad.grads(model, rows, x)
    assert model.calls == 1
    model.mixes = True
    before = {name: b.clone() for name, b in model.named_buffers()}
    with pytest.raises(PergradError):
        pergrad.grads(model, rows, x)
    for name, b in model.named_buffers():
        assert torch.equal(b, before[name]), name
    model.mixes = False
    pergrad.grads(model, rows, x)
    assert model.calls == 2
