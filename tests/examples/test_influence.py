import pytest
import torch

import influence as demo
from pergrad.testing import loop_grads


@pytest.fixture(scope="module")
def digits():
    return demo.split(600, seed=0)


@pytest.fixture(scope="module")
def model(digits):
    return demo.trained(digits[0], epochs=10, seed=0)


def one(digits, row):
    return demo.Digits(digits.images[row : row + 1], digits.labels[row : row + 1])


@pytest.mark.parametrize("batch_size", [1, 7, 20])
def test_influences_are_inner_products_with_gradients_of_samples_run_alone(
    digits, model, batch_size
):
    train, test = digits
    few, sample = demo.Digits(train.images[:20], train.labels[:20]), one(test, 3)
    grads, direction = loop_grads(model, demo.losses, *few), loop_grads(model, demo.losses, *sample)
    expected = sum((grads[name] * direction[name]).flatten(1).sum(1) for name in grads)
    found = demo.influences(model, few, sample, batch_size=batch_size)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_samples_of_the_own_class_dominate_the_helpful_side(digits, model):
    train, test = digits
    own = []
    for row in range(20):
        sample = one(test, row)
        scores = demo.influences(model, train, sample, batch_size=256)
        own.append(train.labels[scores.topk(10).indices] == sample.labels)
    # One in ten would be chance.
    assert torch.stack(own).float().mean() > 0.7


def test_an_influence_is_the_fall_of_the_loss_in_a_small_step(digits, model):
    train, test = digits
    with torch.no_grad():
        sample = one(test, int(demo.losses(model, *test).argmax()))
    scores = demo.influences(model, train, sample, batch_size=256)
    for row in (int(scores.argmax()), int(scores.argmin())):
        real = demo.drop_after_step(model, one(train, row), sample)
        assert real == pytest.approx(float(demo.RATE * scores[row]), rel=0.1)


def test_main_lists_both_sides(capsys):
    options = ["--samples", "300", "--epochs", "3", "--top", "2"]
    assert demo.main(options) == 0
    printed = capsys.readouterr().out
    assert "push for the right answer" in printed
    assert "push against the right answer" in printed
    assert printed.count("│\n") == 4
