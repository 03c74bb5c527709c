import pytest

import clipping as demo


@pytest.fixture(scope="module")
def data():
    return demo.regression(256, 6, seed=0)


def run(data, max_norm, epochs=20):
    return list(demo.training(*data, max_norm=max_norm, epochs=epochs, batch_size=16, seed=0))


def test_only_the_asked_number_of_training_targets_is_corrupted(data):
    train, test = data
    assert int(train.corrupted.sum()) == 6
    assert not test.corrupted.any()
    assert bool((train.y[train.corrupted] == 1000).all())
    assert test.y.abs().max() < 100


def test_clipping_keeps_the_corrupted_samples_from_spoiling_the_fit(data):
    plain, clipped = run(data, None), run(data, 1.0)
    assert clipped[-1].test_loss < 0.1 * clipped[0].test_loss
    assert clipped[-1].test_loss < 2 * demo.NOISE**2
    assert plain[-1].test_loss > 100 * clipped[-1].test_loss


def test_the_corrupted_are_clipped_to_the_end_and_most_others_are_not(data):
    last = run(data, 1.0)[-1].clipped
    corrupted = data[0].corrupted
    assert bool(last[corrupted].all())
    assert last[~corrupted].float().mean() < 0.3


def test_a_bound_that_no_gradient_reaches_is_plain_sgd(data):
    plain, clipped = run(data, None, epochs=2), run(data, 1e9, epochs=2)
    assert not clipped[-1].clipped.any()
    for one, other in zip(plain, clipped, strict=True):
        assert other.test_loss == pytest.approx(one.test_loss, rel=1e-4)


def test_main_prints_a_row_for_each_epoch(capsys):
    assert demo.main(["--samples", "64", "--corrupted", "2", "--epochs", "3"]) == 0
    printed = capsys.readouterr().out
    assert "2 of 64 are corrupted" in printed
    assert [f"│     {n} │" in printed for n in (1, 2, 3, 4)] == [True, True, True, False]
