"""`record(verify=True)`: a right step passes, a wrong one and one that cannot be checked raise."""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import pergrad
from pergrad.errors import PergradError
from pergrad.testing import loop_grads
from tests.engine.exactness import Formula, assert_all_near, numbers, of, state_of, total
from tests.engine.wrong_rule import Scaled, doubled_rule

SIZE, T, D, OUT = 5, 6, 4, 3
Step = Callable[..., Tensor]


def loss(model: Callable[..., Any], *batch: Any) -> Tensor:
    return total(model(*batch))


def verified(model: nn.Module, step: Step, *batch: Any, **options: Any) -> dict[str, Tensor]:
    with pergrad.record(model, pergrad.Grads(), verify=True, **options) as grads:
        step(model, *batch).backward()
    return grads.result


def linear() -> nn.Module:
    return nn.Linear(D, OUT).double()


@pytest.mark.parametrize("size", [1, SIZE])
def test_right_step_passes_and_gives_the_grads_of_the_loop(size: int) -> None:
    model = nn.Sequential(linear(), nn.Tanh(), nn.Linear(OUT, OUT).double())
    batch = of((D,))(size)
    before = state_of(model)
    assert_all_near(verified(model, loss, *batch), loop_grads(model, loss, *batch))
    assert state_of(model) == before


@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
def test_loss_outside_the_module_may_be_a_sum_or_a_mean(loss_reduction: Any) -> None:
    model, x, y = linear(), numbers(SIZE, D), torch.randint(OUT, (SIZE,))

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction=loss_reduction)

    found = verified(model, step, x, y, loss_reduction=loss_reduction)
    assert_all_near(found, loop_grads(model, step, x, y))


def test_module_may_be_called_by_keywords_only() -> None:
    assert verified(linear(), lambda m, x: total(m(input=x)), numbers(SIZE, D))


def test_samples_may_be_the_second_dimension() -> None:
    assert verified(linear(), loss, numbers(T, SIZE, D), batch_first=False)


def test_random_state_is_what_the_step_alone_leaves() -> None:
    model, x = linear(), numbers(SIZE, D)
    before = torch.get_rng_state()
    verified(model, loss, x)
    assert torch.equal(torch.get_rng_state(), before)


def test_wrong_rule_raises_with_the_table() -> None:
    model = Scaled()
    before = state_of(model)
    with doubled_rule(), pytest.raises(PergradError) as caught:
        verified(model, loss, numbers(SIZE, D))
    (row,) = [line for line in str(caught.value).splitlines() if line.startswith("scale")]
    assert row.endswith("wrong")
    assert state_of(model) == before


def test_wrong_rule_passes_unseen_without_verify() -> None:
    model, x = Scaled(), numbers(SIZE, D)
    with doubled_rule():
        found = pergrad.grads(model, loss, x)
    torch.testing.assert_close(found["scale"], 2 * loop_grads(model, loss, x)["scale"])


def _twice(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(x)) + total(model(2 * x))


# What the step is, on which model, and what the error must say.
UNCHECKABLE: dict[str, tuple[Callable[[], nn.Module], Step, str]] = {
    "two calls": (linear, _twice, "one call of the module in the block, got 2"),
    "dropout": (lambda: nn.Sequential(linear(), nn.Dropout()), loss, "dropout.*eval"),
    "functional dropout": (
        lambda: Formula(lambda m, x: F.dropout(m.map(x)), map=linear()),
        loss,
        "dropout",
    ),
    "mixed samples": (
        lambda: Formula(lambda m, x: ((h := m.map(x)) - h.detach().mean(0)) ** 2, map=linear()),
        loss,
        "wrong",
    ),
}


@pytest.mark.parametrize("name", UNCHECKABLE)
def test_step_that_cannot_be_checked_raises_and_leaves_nothing(name: str) -> None:
    build, step, message = UNCHECKABLE[name]
    model = build()
    before = state_of(model)
    with pytest.raises(PergradError, match=message):
        verified(model, step, numbers(SIZE, D))
    assert state_of(model) == before


def test_dropout_in_eval_mode_is_checked() -> None:
    assert verified(nn.Sequential(linear(), nn.Dropout()).eval(), loss, numbers(SIZE, D))


def test_error_of_the_caller_is_not_replaced() -> None:
    model = linear()
    before = state_of(model)
    with pytest.raises(ZeroDivisionError), pergrad.record(model, pergrad.Grads(), verify=True):
        _ = 1 / 0
    assert state_of(model) == before


class Last(nn.Module):
    """Samples in the second dimension of the input and in the first of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(D, OUT), nn.Linear(OUT, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][-1])


def _autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x.float())
    return output.float().pow(2).sum()


def _heads() -> nn.Module:
    parts = {"body": nn.Linear(D, OUT), "head": nn.Linear(OUT, 2)}
    return Formula(lambda m, x: (h := m.body(x), m.head(h)), **parts).double()


# Steps whose gradients are right; name -> model, step, input, options.
RIGHT: dict[str, tuple[Callable[[], nn.Module], Step, tuple[int, ...], dict[str, Any]]] = {
    "an output that another one depends on": (_heads, loss, (SIZE, D), {}),
    "a mean loss inside the module": (
        lambda: Formula(lambda m, x: m.map(x).pow(3).sum(1).mean(), map=linear()),
        lambda m, x: m(x),
        (SIZE, D),
        {"loss_reduction": "mean"},
    ),
    "autocast": (
        lambda: nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Linear(8, OUT)),
        _autocast,
        (SIZE, D),
        {},
    ),
    "spectral norm in training": (lambda: spectral_norm(linear()), loss, (SIZE, D), {}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_step_raises_no_alarm(name: str) -> None:
    torch.manual_seed(0)
    build, step, shape, options = RIGHT[name]
    assert verified(build(), step, numbers(*shape), **options)


def _flat() -> nn.Module:
    return Formula(lambda m, x: m.map(x).flatten(0, 1), map=linear())


@pytest.mark.parametrize(
    ("build", "shape", "batch_first"),
    [(lambda: Last().double(), (T, SIZE, D), False), (_flat, (SIZE, T, D), True)],
    ids=["samples first in the output only", "samples and positions in one dimension"],
)
def test_output_whose_samples_cannot_be_told_apart_is_refused(
    build: Callable[[], nn.Module], shape: tuple[int, ...], batch_first: bool
) -> None:
    with pytest.raises(PergradError, match=r"pergrad\.verify"):
        verified(build(), loss, numbers(*shape), batch_first=batch_first)


@pytest.mark.parametrize("is_on", [True, False])
def test_samples_run_under_the_autocast_of_the_recorded_call(is_on: bool) -> None:
    model, seen = nn.Linear(D, OUT), []
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))

    x = numbers(SIZE, D).float()
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=not is_on),
        pergrad.record(model, pergrad.Grads(), verify=True),
    ):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            output = model(x)
        with torch.autocast("cpu", enabled=False):
            output.float().sum().backward()
    assert len(seen) > 1
    assert len(set(seen)) == 1


@dataclass
class Outputs:
    logits: Tensor
    name: str = "head"


def test_arguments_and_outputs_may_be_mappings_and_dataclasses() -> None:
    model = Formula(lambda m, given: Outputs(m.map(given["x"])), map=linear())
    model.forward = lambda given: model.function(model, given)  # type: ignore[method-assign]

    def step(model: nn.Module, x: Tensor) -> Tensor:
        return total(model(given=UserDict(x=x)).logits)

    x = numbers(SIZE, D)
    assert_all_near(verified(model, step, x), loop_grads(model, step, x))


def test_wrong_rule_is_found_behind_a_dataclass() -> None:
    scaled = Scaled()
    model = Formula(lambda m, x: Outputs(m.scaled(x)), scaled=scaled)
    with doubled_rule(), pytest.raises(PergradError, match="wrong"):
        verified(model, lambda m, x: total(m(x).logits), numbers(SIZE, D))
