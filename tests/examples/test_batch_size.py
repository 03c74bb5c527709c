import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import batch_size as demo
from pergrad.testing import loop_grads


@pytest.fixture(scope="module")
def digits():
    bunch = load_digits()
    images, labels = torch.from_numpy(bunch.data).float() / 16, torch.from_numpy(bunch.target)
    return images[:600], labels[:600].long()


def test_the_noise_scale_of_all_samples_is_that_of_gradients_run_alone(digits):
    images, labels = digits[0][:300].double(), digits[1][:300]  # more than one part
    torch.manual_seed(0)
    model = nn.Linear(64, 10).double()
    grads = loop_grads(model, demo.losses, images, labels)
    flat = torch.cat([grad.flatten(1) for grad in grads.values()], dim=1)
    trace = flat.var(dim=0).sum()
    expected = trace / (flat.mean(0).square().sum() - trace / len(flat))
    loss, noise = demo.whole_noise(model, images, labels)
    assert noise == pytest.approx(float(expected), rel=1e-6)
    assert loss == pytest.approx(float(demo.losses(model, images, labels).detach().mean()))


def test_the_running_noise_scale_is_near_that_of_all_samples_and_grows(digits):
    stages = list(demo.training(*digits, batch_size=64, steps=[20, 100, 400], seed=0))
    assert [stage.step for stage in stages] == [20, 100, 400]
    assert stages[2].loss < 0.5 * stages[0].loss
    for stage in stages[:2]:
        assert 0.7 < stage.running / stage.whole < 1.4
    assert stages[2].running > 1.5 * stages[1].running


@pytest.mark.parametrize(
    ("noise_scale", "size"), [(0.3, 1), (1.0, 1), (90.0, 64), (91.0, 128), (-5.0, None)]
)
def test_the_batch_size_is_the_nearest_power_of_two(noise_scale, size):
    assert demo.power_of_two(noise_scale) == size


def test_main_prints_a_row_for_each_stage(capsys):
    assert demo.main(["--batch-size", "16", "--steps", "2", "5"]) == 0
    printed = capsys.readouterr().out
    assert "batches of 16" in printed
    assert printed.count("│\n") == 2
