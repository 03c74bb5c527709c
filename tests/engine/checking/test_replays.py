"""A replay gives the same outputs and ordinary gradients again, in any precision, and leaves nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pergrad.engine.checking.replays import LossReplay, Replay, WholeNumbersAs
from pergrad.engine.looping.snapshots import Snapshot
from pergrad.engine.recording.options import Options
from pergrad.errors import PergradError
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import Formula, numbers, state_of

SIZE, D, OUT = 5, 4, 3
PIXELS = torch.arange(12, dtype=torch.uint8).reshape(3, 4)


def loss(model: Any, x: Tensor) -> Tensor:
    return model(x).pow(3).sum(1)


def replay_of(model: nn.Module, x: Tensor, **options: Any) -> Replay:
    return LossReplay(model, loss, (x,), Options(**options), Snapshot(model), SIZE)


def test_runs_draw_the_same_numbers() -> None:
    model = nn.Sequential(nn.Linear(D, OUT), nn.Dropout()).double()
    replay = replay_of(model, numbers(SIZE, D))
    first, second = replay.outputs(), replay.outputs()
    assert torch.equal(first[0].tensor, second[0].tensor)
    assert replay.forwards == 2


@pytest.mark.parametrize(
    ("factor", "is_repeated"), [(1.0, True), (1 + 1e-10, True), (1.01, False), (float("nan"), True)]
)
def test_a_step_is_repeated_up_to_rounding(factor: float, is_repeated: bool) -> None:
    model, x = nn.Linear(D, OUT).double(), numbers(SIZE, D)
    recorded = loss(model, x).detach()
    model.bias.data.mul_(factor)
    replay = LossReplay(model, loss, (x,), Options(), Snapshot(model), SIZE, losses=recorded)
    # Losses that are not finite are refused later, by a message of their own.
    assert replay.is_repeated_by(replay.outputs()) is is_repeated


@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
def test_ordinary_gradients_are_weighted_sums_of_the_loop(loss_reduction: Any) -> None:
    model, x, weights = nn.Linear(D, OUT).double(), numbers(SIZE, D), numbers(SIZE)
    replay = replay_of(model, x, loss_reduction=loss_reduction)
    found = replay.ordinary(replay.outputs(), weights, dict(model.named_parameters()))
    expected = loop_grads(model, lambda m, x: loss(m, x).sum(), x)
    divisor = SIZE if loss_reduction == "mean" else 1
    for name, rows in expected.items():
        assert_near(found[name], torch.einsum("n,n...->...", weights, rows) / divisor, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_precise_run_casts_all_and_puts_the_parameters_back(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(D, OUT), nn.BatchNorm1d(OUT)).eval().bfloat16()
    tensors = [*model.parameters(), *model.buffers()]
    before = [(t.data_ptr(), t.dtype, t.clone()) for t in tensors]
    marks = state_of(model)
    replay = replay_of(model, numbers(SIZE, D).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        with replay.precisely(dtype):
            outputs = replay.outputs()
            assert outputs[0].tensor.dtype == outputs[0].gradient.dtype == dtype
            found = replay.ordinary(outputs, torch.ones(SIZE), dict(model.named_parameters()))
            assert {g.dtype for g in found.values()} == {dtype}
        assert torch.is_autocast_enabled("cpu")
    for t, (address, dtype_before, values) in zip(tensors, before, strict=True):
        assert (t.data_ptr(), t.dtype) == (address, dtype_before)
        assert torch.equal(t, values)
    assert state_of(model) == marks


def test_parameters_are_put_back_after_an_error() -> None:
    model = nn.Linear(D, OUT).bfloat16()
    replay = replay_of(model, numbers(SIZE, D))
    with pytest.raises(ZeroDivisionError), replay.precisely(torch.float64):
        _ = 1 / 0
    assert model.weight.dtype == torch.bfloat16
    assert replay.dtype is None


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (Tensor.sum, "returns a scalar"),
        (lambda t: t[:2], r"got \(2,\)"),
        (lambda t: None, "NoneType"),
    ],
)
def test_losses_must_be_one_for_each_sample(returned: Any, message: str) -> None:
    model, x = nn.Linear(D, OUT).double(), numbers(SIZE, D)
    replay = LossReplay(
        model, lambda m, x: returned(loss(m, x)), (x,), Options(), Snapshot(model), SIZE
    )
    with pytest.raises(PergradError, match=message):
        replay.outputs()


def test_a_reentrant_checkpoint_is_pulled_back_and_grad_is_left() -> None:
    model: Any = Formula(
        lambda m, x: checkpoint(m.a, x, use_reentrant=True), a=nn.Linear(D, OUT)
    ).double()
    model.a.weight.grad = kept = torch.ones_like(model.a.weight)
    x = numbers(SIZE, D).requires_grad_()
    replay = replay_of(model, x)
    named = {"a.weight": model.a.weight}
    found = replay.ordinary(replay.outputs(), torch.ones(SIZE), named)
    assert model.a.weight.grad is kept
    assert model.a.bias.grad is None
    assert x.grad is None
    expected = torch.autograd.grad(model.a(x.detach()).pow(3).sum(), model.a.weight)[0]
    assert_near(found["a.weight"], expected, "a.weight")


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.to(dtype=torch.float32),
        lambda x: x / 255,
        lambda x: torch.sqrt(x),
        lambda x: F.one_hot(x.long()).float(),
        lambda x: x.float() / 255,
    ],
)
def test_floats_of_whole_numbers_have_the_precision_and_the_value(make: Any) -> None:
    with WholeNumbersAs(torch.float64):
        found = make(PIXELS)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), make(PIXELS))


def test_casts_of_floats_and_new_tensors_are_left_alone() -> None:
    with WholeNumbersAs(torch.float64):
        for left in (
            torch.ones(2, dtype=torch.float64).float(),
            torch.ones(2),
            PIXELS.half().float(),
        ):
            assert left.dtype == torch.float32
        assert PIXELS.half().dtype == torch.float16
        assert (PIXELS + 1).dtype == torch.uint8


def test_a_model_of_pixels_is_repeated_in_another_precision() -> None:
    class Pixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            return self.layer(x.float() / 255)

    model = Pixels()
    options = Options(batch_size=3, loss_reduction="sum")

    def losses(model: Any, x: Tensor) -> Tensor:
        return model(x).sum(1)

    replay = LossReplay(model, losses, (PIXELS,), options, Snapshot(model), 3)
    with replay.precisely(torch.float64):
        (output,) = replay.outputs()
    assert output.tensor.dtype == torch.float64
    torch.testing.assert_close(output.tensor.detach().float(), losses(model, PIXELS).detach())


def test_the_graph_of_a_run_is_freed_unless_it_is_kept() -> None:
    model, weights = nn.Linear(D, OUT).double(), torch.ones(SIZE).double()
    replay, parameters = replay_of(model, numbers(SIZE, D)), dict(model.named_parameters())
    outputs = replay.outputs()
    kept = replay.ordinary(outputs, weights, parameters, retain_graph=True)
    last = replay.ordinary(outputs, weights, parameters)
    assert torch.equal(kept["weight"], last["weight"])
    with pytest.raises(RuntimeError, match="second time"):
        replay.ordinary(outputs, weights, parameters)
