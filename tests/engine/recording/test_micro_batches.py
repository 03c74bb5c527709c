"""Several calls of a module in one block: two views of one batch, the same samples, or further ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.errors import MixedSamplesError, PergradError, ScopeError
from pergrad.testing import assert_near, loop_grads
from tests.quantities.oracle import NAMES, assert_is_quantity_of, losses, quantity

JOINABLE = [name for name in NAMES if name != "gram"]
SIZES = [2, 1, 3]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def rows(count: int = 6) -> Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, generator=random, dtype=torch.float64)


def of_outputs(out: Tensor) -> Tensor:
    return losses(lambda t: t, out)


def one_by_one(model: nn.Module, x: Tensor) -> None:
    for part in x.split(SIZES):
        losses(model, part).sum().backward()


def forward_first(model: nn.Module, x: Tensor) -> None:
    """As a pipeline does."""
    outs = [model(part) for part in x.split(SIZES)]
    for out in outs:
        of_outputs(out).sum().backward()


def backward_in_reverse(model: nn.Module, x: Tensor) -> None:
    totals = [losses(model, part).sum() for part in x.split(SIZES)]
    for total in reversed(totals):
        total.backward()


def by_gradients(model: nn.Module, x: Tensor) -> None:
    """As a stage that gets the gradients of its outputs from the next one."""
    outs = [model(part) for part in x.split(SIZES)]
    for out in outs:
        detached = out.detach().requires_grad_()
        (g,) = torch.autograd.grad(of_outputs(detached).sum(), detached)
        out.backward(g)


ORDERS = [one_by_one, forward_first, backward_in_reverse, by_gradients]
each_order = pytest.mark.parametrize("run", ORDERS, ids=lambda f: f.__name__)


@each_order
@pytest.mark.parametrize("name", JOINABLE)
def test_further_samples_are_appended_in_the_order_of_the_calls(
    name: str, run: Callable[[nn.Module, Tensor], None]
) -> None:
    model, x = net(), rows()
    found: Any = quantity(name, dict(model.named_parameters()))
    with pergrad.record(model, found, calls="more"):
        run(model, x)
    assert found.samples == 6
    assert_is_quantity_of(found, loop_grads(model, losses, x), name)
    assert all(p.grad is None for p in model.parameters())


@each_order
def test_gradients_are_kept_over_all_calls(run: Callable[[nn.Module, Tensor], None]) -> None:
    model, x, norms = net(), rows(), pergrad.Norms()
    run(model, x)
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    with pergrad.record(model, norms, calls="more", keep_grad=True):
        run(model, x)
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None
        assert grad is not None
        assert torch.equal(p.grad, grad)
    assert_near(norms.result, pergrad.norms(model, losses, x))


def test_means_of_micro_batches_are_undone_each() -> None:
    model, x = net(), rows()
    with pergrad.record(model, pergrad.Norms(), calls="more", loss_scale=1 / 3) as norms:
        for part in x.split(SIZES):
            (losses(model, part).mean() / 3).backward()
    assert_near(norms.result, pergrad.norms(model, losses, x))


def test_chosen_parameters_and_blocks_that_accumulate() -> None:
    model, x, norms = net(), rows(), pergrad.Norms(accumulate=True)
    for part in x.split(3):
        with pergrad.record(model, norms, calls="more", params="2.*"):
            for row in part.split(1):
                losses(model, row).sum().backward()
    assert norms.names == ("2.weight", "2.bias")
    assert_near(norms.result, pergrad.norms(model, losses, x, params="2.*"))


def test_running_noise_scale_counts_the_block_once() -> None:
    model, x = net(), rows()
    apart, whole = pergrad.NoiseScale(decay=0.5), pergrad.NoiseScale(decay=0.5)
    for _ in range(2):
        with pergrad.record(model, apart, calls="more"):
            one_by_one(model, x)
        with pergrad.record(model, whole):
            losses(model, x).sum().backward()
    assert apart.running == pytest.approx(whole.running)


def test_calls_without_gradients_are_no_samples() -> None:
    model, x = net(), rows()
    with pergrad.record(model, pergrad.Norms(), calls="more") as norms:
        losses(model, x[:2]).sum().backward()
        with torch.no_grad():
            model(x)
        losses(model, x[2:]).sum().backward()
    assert_near(norms.result, pergrad.norms(model, losses, x))


def meet(model: nn.Module, x: Tensor) -> None:
    (losses(model, x[:3]).sum() + losses(model, x[3:]).sum()).backward()


def forget(model: nn.Module, x: Tensor) -> None:
    losses(model, x[:3]).sum().backward()
    losses(model, x[3:]).sum()


REFUSED: dict[str, tuple[Callable[[nn.Module, Tensor], None], type, str]] = {
    "meeting": (meet, MixedSamplesError, 'calls="same"'),
    "forgotten": (forget, ScopeError, "call 2 of the module was not backpropagated"),
    "none": (lambda model, x: None, ScopeError, "was not called"),
    "empty": (
        lambda model, x: losses(model, x[:0]).sum().backward(),
        PergradError,
        "without samples",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_misuse_is_refused_and_the_model_trains_on(name: str) -> None:
    model, x, norms = net(), rows(), pergrad.Norms()
    run, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message), pergrad.record(model, norms, calls="more"):
        run(model, x)
    assert "no result yet" in repr(norms)
    assert all(p.grad is None for p in model.parameters())
    losses(model, x).sum().backward()
    with pergrad.record(model, norms):
        losses(model, x).sum().backward()
    assert_near(norms.result, pergrad.norms(model, losses, x))


@pytest.mark.parametrize(
    "options", [{"sample_weights": torch.ones(3)}, {"owners": torch.arange(3)}]
)
def test_options_of_one_batch_are_refused(options: dict[str, Any]) -> None:
    with (
        pytest.raises(PergradError, match="several batches"),
        pergrad.record(net(), pergrad.Norms(), calls="more", **options),
    ):
        pass


def test_calls_are_two_words() -> None:
    with (
        pytest.raises(PergradError, match="calls must be 'same' or 'more', got 'other'"),
        pergrad.record(net(), pergrad.Norms(), calls="other"),  # type: ignore[arg-type]
    ):
        pass
    for check in ("verify", "certify"):
        with (
            pytest.raises(PergradError, match="check one batch"),
            pergrad.record(net(), pergrad.Norms(), calls="more", **{check: True}),  # type: ignore[arg-type]
        ):
            pass


# -- without `calls`, and with "same"


OTHER = 2 * rows().flip(1)  # of the same samples, as far as nobody says otherwise


def both(model: nn.Module, x: Tensor) -> Tensor:
    return losses(model, x) + losses(model, 2 * x.flip(1))


def views(model: nn.Module, x: Tensor) -> Tensor:
    return losses(model, x) + losses(model, OTHER)


def test_calls_that_meet_in_one_loss_are_the_same_samples() -> None:
    model, x = net(), rows()
    with pergrad.record(model, pergrad.Norms()) as norms:
        views(model, x).mean().backward()
    assert_near(norms.result, pergrad.norms(model, both, x))


def apart(model: nn.Module, x: Tensor) -> None:
    losses(model, x).sum().backward()
    losses(model, OTHER).sum().backward()


def apart_after_both(model: nn.Module, x: Tensor) -> None:
    first, second = losses(model, x).sum(), losses(model, OTHER).sum()
    first.backward()
    second.backward()


each_way = pytest.mark.parametrize("run", [apart, apart_after_both], ids=lambda f: f.__name__)


@each_way
@pytest.mark.parametrize(
    "make", [pergrad.Grads, pergrad.Norms, pergrad.Sum], ids=lambda m: m.__name__
)
def test_calls_that_are_backpropagated_apart_are_refused(
    make: Any, run: Callable[[nn.Module, Tensor], None]
) -> None:
    model, x = net(), rows()
    with (
        pytest.raises(ScopeError, match=r'calls="same".*calls="more"'),
        pergrad.record(model, make()),
    ):
        run(model, x)
    losses(model, x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@each_way
@pytest.mark.parametrize("name", [n for n in NAMES if n != "clipped, low memory"])
def test_same_samples_add_up(name: str, run: Callable[[nn.Module, Tensor], None]) -> None:
    model, x = net(), rows()
    found: Any = quantity(name, dict(model.named_parameters()))
    with pergrad.record(model, found, calls="same"):
        run(model, x)
    assert_is_quantity_of(found, loop_grads(model, both, x), name)


def test_two_losses_of_one_call_are_the_same_samples() -> None:
    model, x = net(), rows()
    with pergrad.record(model, pergrad.Grads()) as grads:
        with torch.no_grad():
            model(x)
        out = losses(model, x)
        out.sum().backward(retain_graph=True)
        (2 * out).sum().backward()
    for name, g in loop_grads(model, lambda m, x: 3 * losses(m, x), x).items():
        assert_near(grads.result[name], g)


def test_calls_with_the_same_inputs_are_the_same_samples() -> None:
    model, x = net(), rows()
    with pergrad.record(model, pergrad.Grads()) as grads:
        losses(model, x).sum().backward()
        losses(model, x).sum().backward()
        losses(model, 2 * x.flip(1)).sum().backward()  # as the recorder sees

    def thrice(model: nn.Module, x: Tensor) -> Tensor:
        return losses(model, x) + both(model, x)

    for name, g in loop_grads(model, thrice, x).items():
        assert_near(grads.result[name], g)


def test_an_error_before_the_first_call_puts_the_gradients_back() -> None:
    model = net()
    before = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad = before[name]

    def fail() -> None:
        model.zero_grad()
        raise ValueError("no data")

    with (
        pytest.raises(ValueError, match="no data"),
        pergrad.record(model, pergrad.Norms(), calls="more", keep_grad=True),
    ):
        fail()
    for name, p in model.named_parameters():
        assert p.grad is before[name]
