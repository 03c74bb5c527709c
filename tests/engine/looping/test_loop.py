"""A loop fills all quantities as a recording does, by all options, and leaves what a plain call leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pergrad import (
    ClippedSum,
    Dots,
    Grads,
    Gram,
    NoiseScale,
    Norms,
    Projection,
    Quantity,
    SecondMoment,
    Variance,
)
from pergrad.engine.looping.loop import Looped, looped
from pergrad.engine.looping.plain_run import CannotLoopError
from pergrad.engine.looping.snapshots import Snapshot
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.running import run_recorded
from pergrad.errors import PergradError
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import Formula, assert_all_near, numbers, state_of
from tests.engine.looping.refused import OUT, SIZE, D, Net, batch, loss

Batch = tuple[Any, ...]


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def filled(
    model: nn.Module, loss_fn: Callable[..., Tensor], own: Batch, *given: Quantity, **options: Any
) -> Looped:
    return looped(model, loss_fn, own, given, Options(**options), Snapshot(model))


QUANTITIES: dict[str, Callable[[nn.Module], Quantity]] = {
    "grads": lambda m: Grads(),
    "norms": lambda m: Norms(),
    "clipped": lambda m: ClippedSum(0.5),
    "clipped twice": lambda m: ClippedSum(0.5, memory="low"),
    "clipped dense": lambda m: ClippedSum({"first.*": 0.1, "*": 0.5}, memory="high"),
    "weighed": lambda m: ClippedSum(weighting=lambda norms: norms.max() / (1 + norms)),
    "second moment": lambda m: SecondMoment(),
    "variance": lambda m: Variance(),
    "dots": lambda m: Dots({"last.weight": torch.arange(OUT * D).view(OUT, D).double()}),
    "gram": lambda m: Gram(),
    "gram against": lambda m: Gram({"last.bias": torch.arange(2 * OUT).view(2, OUT).double()}),
    "sketch": lambda m: Projection(16),
    "two-sided sketch": lambda m: Projection(16, method="two_sided"),
    "noise": lambda m: NoiseScale(),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "weights": {"sample_weights": torch.tensor([1.0, 0.0, -2.0, 0.5, 3.0]).double()},
    "bounded and offloaded": {"max_bytes": 1, "offload": True},
}


def results(quantity: Any) -> dict[str, Tensor]:
    found = quantity.result
    if isinstance(found, float):
        return {"": torch.tensor(found).double()}
    return found if isinstance(found, dict) else {"": found}


@pytest.mark.parametrize("options", OPTIONS)
def test_all_quantities_are_those_of_a_recording(options: str) -> None:
    model, own = Net(), batch()
    chosen = {**OPTIONS[options]}
    expected = [make(model) for make in QUANTITIES.values()]
    run_recorded(copy.deepcopy(model), loss, own, expected, Options(**chosen))
    found = [make(model) for make in QUANTITIES.values()]
    filled(model, loss, own, *found, **chosen)
    for name, a, b in zip(QUANTITIES, found, expected, strict=True):
        for key, value in results(b).items():
            assert_near(results(a)[key], value, f"{name} {key}")


def test_chosen_parameters_alone_are_filled_and_the_others_train_on() -> None:
    model, own, grads = Net(), batch(), Grads()
    filled(model, loss, own, grads, params="last.*")
    expected = loop_grads(model, loss, *own)
    assert_all_near(grads.result, {k: v for k, v in expected.items() if k.startswith("last")})
    assert model.first.weight.requires_grad
    assert not model.frozen.weight.requires_grad


@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
def test_scalar_losses_are_those_of_the_samples(loss_reduction: Any) -> None:
    model, own, grads = Net(), batch(), Grads()

    def scalar(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return getattr(loss(model, x, y), loss_reduction)()

    found = filled(model, scalar, own, grads, loss_reduction=loss_reduction)
    assert_near(found.losses, scalar(model, *own).detach(), "loss")
    assert_all_near(grads.result, loop_grads(model, loss, *own))
    other = "sum" if loss_reduction == "mean" else "mean"
    with pytest.raises(CannotLoopError, match="the samples alone give the loss"):
        filled(model, scalar, own, grads, loss_reduction=other)


def test_samples_in_the_second_dimension_are_found() -> None:
    model = nn.GRU(D, OUT).double()
    x, grads = numbers(7, SIZE, D), Grads()

    def of_steps(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[0].pow(2).sum((0, 2))

    filled(model, of_steps, (x,), grads, batch_first=False)
    assert_all_near(grads.result, loop_grads(model, of_steps, x, batch_dim=1))


def test_random_numbers_are_those_of_the_batch() -> None:
    model, own, grads = Net(dropout=0.5), batch(), Grads()
    begin = torch.get_rng_state()
    losses = filled(model, loss, own, grads).losses
    end = torch.get_rng_state()
    torch.set_rng_state(begin)
    plain = loss(model, *own)
    assert torch.equal(torch.get_rng_state(), end)
    assert_near(losses, plain.detach(), "losses")
    for n in range(SIZE):
        weights = [p for p in model.parameters() if p.requires_grad and p is not model.unused]
        expected = torch.autograd.grad(plain[n], weights, retain_graph=True)
        names = [name for name in grads.result if name != "unused"]
        for name, g in zip(names, expected, strict=True):
            assert_near(grads.result[name][n], g, name)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_buffers_modes_and_gradients_are_left_as_by_a_plain_call(dropout: float) -> None:
    model, (x, y) = Net(dropout), batch()
    model.last.weight.grad = kept = torch.ones_like(model.last.weight)
    before = state_of(model)
    filled(model, loss, (x, y), Grads(), Norms())
    assert model.calls == 1
    assert model.training
    assert model.last.weight.grad is kept
    assert x.grad is None
    assert state_of(model) == before


def test_after_an_error_all_is_as_before() -> None:
    model, own, norms = Net(), batch(), Norms()
    calls = 0

    def failing(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return loss(model, x, y)

    before, seed = state_of(model), torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        filled(model, failing, own, norms, params="last.*")
    assert model.calls == 0
    assert model.first.weight.requires_grad
    assert state_of(model) == before
    assert torch.equal(torch.get_rng_state(), seed)
    with pytest.raises(PergradError, match="no result"):
        _ = norms.result


def test_little_memory_means_more_passes_and_the_same_result() -> None:
    model, own, grads = Net(), batch(), Grads()
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert filled(model, loss, own, grads).passes == SIZE
    bound = SIZE * sum(p.nbytes for p in parameters) // 2
    assert SIZE < filled(model, loss, own, grads, max_bytes=bound).passes <= 4 * SIZE
    assert filled(model, loss, own, grads, max_bytes=1).passes == SIZE * len(parameters)
    assert_all_near(grads.result, loop_grads(model, loss, *own))


PARTS: dict[str, tuple[Callable[..., Tensor], dict[str, nn.Module]]] = {
    "reentrant checkpoint": (
        lambda m, x: checkpoint(m.a, x, use_reentrant=True),
        {"a": nn.Linear(D, OUT)},
    ),
    "sparse embedding": (
        lambda m, x: m.a(x.abs().long() % 3),
        {"a": nn.EmbeddingBag(3, OUT, sparse=True, mode="sum")},
    ),
    "complex": (
        lambda m, x: (m.a(x.to(torch.complex128)) * 1j).abs(),
        {"a": nn.Linear(D, OUT, dtype=torch.complex128)},
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_kinds_of_gradients(name: str) -> None:
    function, parts = PARTS[name]
    model: Any = Formula(function, **parts)
    for p in model.parameters():
        p.data = p.data if p.is_complex() else p.data.double()
    (x, y), grads = batch(), Grads()
    filled(model, loss, (x, y), grads)
    alone = [loss(model, x[n : n + 1], y[n : n + 1]).sum() for n in range(SIZE)]
    for n, own in enumerate(alone):
        for p in model.parameters():
            p.grad = None
        own.backward()
        for key, p in model.named_parameters():
            assert p.grad is not None
            found, wanted = grads.result[key][n], p.grad.to_dense()
            if p.is_complex():
                found, wanted = torch.view_as_real(found), torch.view_as_real(wanted)
            assert_near(found, wanted, key)


def test_hooks_of_parameters_change_the_gradients_of_each_sample() -> None:
    model, own, grads = Net(), batch(), Grads()
    expected = loop_grads(model, loss, *own)["last.weight"]
    model.last.weight.register_hook(lambda g: g / g.norm())
    filled(model, loss, own, grads)
    norms = expected.flatten(1).norm(dim=1)[:, None, None]
    assert_near(grads.result["last.weight"], expected / norms, "last.weight")


def test_a_hook_after_accumulation_that_the_model_registers_is_refused() -> None:
    model, own, grads = Net(), batch(), Grads()
    handles: list[Any] = []

    def hooking(model: Net, *own: Any) -> Tensor:
        handles.append(model.last.weight.register_post_accumulate_grad_hook(lambda p: None))
        return loss(model, *own)

    with pytest.raises(PergradError, match="runs after its gradient is accumulated"):
        filled(model, hooking, own, grads)
    assert len(handles) == 1


REASONS: dict[str, tuple[Callable[..., Tensor], dict[str, Any], str]] = {
    "no samples": (lambda m, x, y: loss(m, *OTHER), {}, "no tensor or list among the arguments"),
    "another size": (loss, {"batch_size": 2}, "5 losses for 2 samples"),
    "unreached": (
        lambda m, x, y: loss(m, x * m.unused.detach().requires_grad_()[0], y),
        {"params": "unused"},
        "no gradient reaches",
    ),
    "not known": (lambda m, x, y: loss(m, x, y).sum() + y[None].sum(), {}, "not known"),
}
OTHER = batch(4)


@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_be_looped_says_why(name: str) -> None:
    function, options, message = REASONS[name]
    own: Batch = batch()
    if name == "not known":
        own = (own[0], own[1][:4])

        def scalar(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return loss(m, x[:4], y).sum()

        function = scalar
    with pytest.raises(CannotLoopError, match=message):
        filled(Net(), function, own, Norms(), **options)


def test_one_sample_is_a_batch() -> None:
    model, own, grads = Net(), batch(1), Grads()
    filled(model, loss, own, grads)
    assert_all_near(grads.result, loop_grads(model, loss, *own))


def test_autocast_holds_in_the_loop_too() -> None:
    model, (x, y), grads = Net().float(), batch(), Grads()
    with torch.autocast("cpu", torch.bfloat16):
        filled(model, loss, (x.float(), y), grads)
        expected = loop_grads(model, loss, x.float(), y)
    for name, rows in expected.items():
        assert torch.allclose(grads.result[name], rows, rtol=0.05, atol=0.05), name


def test_the_cost_is_told_in_passes_and_in_plain_steps_if_one_was_timed() -> None:
    losses = torch.zeros(3)
    assert Looped(losses, 6, 2.0).cost == "6 backward passes"
    timed = Looped(losses, 6, 2.0, plain_seconds=0.8)
    assert timed.cost == "6 backward passes, 2.5 times as long as one plain step of the batch"
