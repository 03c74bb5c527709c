import pytest
import torch

import mislabelled_digits as demo


def small(digits, size):
    return demo.Digits(digits.images[:size], digits.given[:size], digits.true[:size])


@pytest.fixture(scope="module")
def digits():
    return demo.digits_with_flips(0.05, seed=0)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_exactly_the_asked_share_of_labels_is_flipped(share):
    digits = demo.digits_with_flips(share, seed=1)
    assert int(digits.flipped.sum()) == round(share * len(digits))
    assert digits.given.min() >= 0
    assert digits.given.max() < demo.CLASSES


def test_flips_depend_on_the_seed_alone(digits):
    again, other = demo.digits_with_flips(0.05, seed=0), demo.digits_with_flips(0.05, seed=1)
    assert torch.equal(digits.given, again.given)
    assert not torch.equal(digits.given, other.given)
    assert torch.equal(digits.true, other.true)


def test_building_the_model_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    model, again = demo.convnet(3), demo.convnet(3)
    assert torch.equal(before, torch.get_rng_state())
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_training_yields_a_falling_loss_for_each_epoch(digits):
    yielded = list(demo.training(demo.convnet(0), small(digits, 512), epochs=3, seed=0))
    assert len(yielded) == 3
    assert yielded[2] < yielded[0]


@pytest.mark.parametrize("batch_size", [1, 5, 12, 100])
def test_gradient_norms_are_those_of_one_backward_a_sample(digits, batch_size):
    few = small(digits, 12)
    few = demo.Digits(few.images.double(), few.given, few.true)
    model = demo.convnet(0).double()
    expected = []
    for row in range(len(few)):
        loss = demo.losses(model, few.images[row : row + 1], few.given[row : row + 1]).sum()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        expected.append(torch.cat([grad.flatten() for grad in grads]).norm())
    norms = demo.gradient_norms(model, few, batch_size=batch_size)
    torch.testing.assert_close(norms, torch.stack(expected), rtol=1e-9, atol=1e-12)


def test_gradient_norms_leave_no_gradient_behind(digits):
    model = demo.convnet(0)
    demo.gradient_norms(model, small(digits, 12))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(hasattr(parameter, "grad_sample") for parameter in model.parameters())


def test_flips_on_top_counts_only_the_highest_scores():
    scores = torch.tensor([9.0, 1.0, 8.0, 0.0])
    flipped = torch.tensor([True, True, False, False])
    assert demo.flips_on_top(scores, flipped, 0.5) == (1, 2)
    assert demo.flips_on_top(scores, flipped, 0.75) == (2, 3)
    assert demo.flips_on_top(scores, flipped, 0.0) == (0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_flipped_labels_have_the_largest_gradients(seed):
    digits = demo.digits_with_flips(0.05, seed)
    model = demo.convnet(seed)
    for _ in demo.training(model, digits, epochs=10, seed=seed):
        pass
    found, _ = demo.flips_on_top(demo.gradient_norms(model, digits), digits.flipped, 0.10)
    assert found >= 0.97 * int(digits.flipped.sum())


def test_main_prints_the_ranking_and_the_grade(capsys):
    assert demo.main(["--epochs", "1", "--top", "3", "--flipped", "0.1", "--seed", "4"]) == 0
    printed = capsys.readouterr().out
    assert "3 largest of 1797" in printed
    assert "180 (10.0% of the data)" in printed
    assert "by chance" in printed


@pytest.mark.parametrize(
    "argv", [["--flipped", "1.5"], ["--epochs", "0"], ["--top", "-1"], ["--seed", "x"]]
)
def test_bad_options_end_with_a_message_and_status_2(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(argv)
    assert stopped.value.code == 2
    assert argv[0] in capsys.readouterr().err
