import pytest
import torch

from benchmarks import ranking
from pergrad.attribution.grading import Grade, Within


def test_digits_named_next_have_the_label_after_their_own():
    digits = ranking.digits_named_next(0.15, seed=0)
    flipped = digits.flipped
    assert int(flipped.sum()) == round(0.15 * len(digits))
    assert torch.equal(digits.given[flipped], (digits.true[flipped] + 1) % 10)


@pytest.mark.parametrize("flips", ranking.FLIPS)
def test_a_table_has_a_row_for_each_stage(capsys, flips):
    argv = ["--epochs", "1", "2", "--seeds", "100", "--share", "0.1", "--flips", flips]
    assert ranking.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("│")[1:-1] for line in lines if line.startswith("│")]
    assert [row[0].strip() for row in rows] == ["1", "2"]
    # By chance 0.1.
    assert all(0.3 < float(row[1]) <= 1 for row in rows)


def test_a_row_has_means_and_the_worst_seed():
    grades = [
        Grade(90, (Within(0.05, 90, 80, 80), Within(0.1, 180, found, 90)), ours, 0.96)
        for ours, found in ((0.99, 90), (0.95, 81))
    ]
    assert ranking.row_of(5, grades) == ["5", "0.9700", "0.9600", "1 of 2", "90.0%"]
