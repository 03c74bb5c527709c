import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pergrad.engine.checking.casting import WholeNumbersAs
from pergrad.engine.checking.replays import LossReplay
from pergrad.engine.looping.snapshots import Snapshot
from pergrad.engine.recording.options import Options

PIXELS = torch.arange(12, dtype=torch.uint8).reshape(3, 4)


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
def test_floats_of_whole_numbers_have_the_precision_and_the_value(make) -> None:
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

        def forward(self, x):
            return self.layer(x.float() / 255)

    model = Pixels()
    options = Options(batch_size=3, loss_reduction="sum")

    def losses(model, x):
        return model(x).sum(1)

    replay = LossReplay(model, losses, (PIXELS,), options, Snapshot(model), 3)
    with replay.precisely(torch.float64):
        (output,) = replay.outputs()
    assert output.tensor.dtype == torch.float64
    torch.testing.assert_close(output.tensor.detach().float(), losses(model, PIXELS).detach())
