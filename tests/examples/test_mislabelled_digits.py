import json

import numpy as np
import pytest
import torch
from rich.console import Console

import mislabelled_digits as demo
from pergrad.audit import run_audit
from pergrad.errors import PergradError


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


def test_the_audit_sees_every_sample_with_the_label_that_training_saw(digits):
    spec = demo.spec_of(demo.convnet(0), digits)
    assert len(spec.dataset) == len(digits)
    assert spec.label(spec.dataset[17]) == str(int(digits.given[17]))
    assert torch.equal(spec.show(spec.dataset[17]), digits.images[17])
    assert spec.known_wrong == np.flatnonzero(digits.flipped.numpy()).tolist()


def audited(seed, folder):
    digits = demo.digits_with_flips(0.05, seed)
    model = demo.trained(digits, epochs=demo.EPOCHS, seed=seed, console=Console(quiet=True))
    summary = run_audit(demo.spec_of(model, digits), folder)
    return digits, summary["grade"]


def test_flips_learnt_by_heart_rank_highest_and_the_others_name_the_right_label(tmp_path):
    digits, grade = audited(0, tmp_path / "audit")
    assert grade["known"] == 90
    assert grade["within"][1]["share"] == 0.1
    assert grade["within"][1]["found"] >= 0.97 * 90
    assert grade["average_precision"] >= 0.97
    assert grade["average_precision_by_loss"] <= grade["average_precision"] - 0.02
    named, shown = demo.labels_named(tmp_path / "audit", digits)
    assert shown == 90
    # By chance one of nine.
    assert named >= 0.85 * shown


@pytest.mark.slow
def test_the_grade_is_stable_over_five_seeds_and_no_worse_than_loss_alone(tmp_path):
    grades = [audited(seed, tmp_path / str(seed))[1] for seed in range(5)]
    for seed, grade in enumerate(grades):
        within = grade["within"]
        print(
            f"seed {seed}: top 5% {within[0]['found']} (by loss {within[0]['found_by_loss']}), top 10% "
            f"{within[1]['found']} ({within[1]['found_by_loss']}) of {grade['known']}; average precision "
            f"{grade['average_precision']:.4f} ({grade['average_precision_by_loss']:.4f})"
        )
        assert within[1]["found"] >= 0.97 * grade["known"]
    ours, by_loss = (
        np.mean([grade[key] for grade in grades])
        for key in ("average_precision", "average_precision_by_loss")
    )
    print(f"mean average precision {ours:.4f}, by loss alone {by_loss:.4f}")
    assert ours >= by_loss


def test_main_prints_the_grade_and_where_the_report_is(tmp_path, capsys):
    output = tmp_path / "audit"
    argv = ["--epochs", "1", "--flipped", "0.1", "--seed", "4", "--output", str(output)]
    assert demo.main(argv) == 0
    printed = capsys.readouterr().out
    assert "Flipped labels found, of 180" in printed
    assert "by loss alone" in printed
    assert (output / "report.html").as_uri() in printed.replace("\n", "")
    summary = json.loads((output / "summary.json").read_text())
    assert summary["dataset"]["name"] == "scikit-learn digits, 180 of 1,797 labels flipped"
    assert summary["grade"]["known"] == 180


def test_without_flips_there_is_a_report_and_no_grade(tmp_path, capsys):
    argv = ["--epochs", "1", "--flipped", "0", "--output", str(tmp_path / "audit")]
    assert demo.main(argv) == 0
    assert "Flipped labels found" not in capsys.readouterr().out
    assert (tmp_path / "audit" / "report.html").exists()


def test_the_default_folder_is_made_anew_and_one_that_was_asked_for_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in ("0", "1"):
        assert demo.main(["--epochs", "1", "--seed", seed]) == 0
    assert json.loads((tmp_path / demo.OUTPUT / "summary.json").read_text())["seed"] == 1
    with pytest.raises(PergradError, match="holds an audit with another"):
        demo.main(["--epochs", "1", "--seed", "2", "--output", str(demo.OUTPUT)])


@pytest.mark.parametrize(
    "argv", [["--flipped", "1.5"], ["--epochs", "0"], ["--output"], ["--seed", "x"]]
)
def test_bad_options_end_with_a_message_and_status_2(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(argv)
    assert stopped.value.code == 2
    assert argv[0] in capsys.readouterr().err
