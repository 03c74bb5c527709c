import json
from pathlib import Path

import pytest

from pergrad.cli.app import run

TASK = """
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from pergrad.evaluate import Task, Trainer

generator = torch.Generator().manual_seed(0)
y = torch.arange(40) % 2
x = torch.randn(40, 3, generator=generator) + 2 * y[:, None]
loss = lambda model, x, y: F.cross_entropy(model(x), y, reduction="none")
train = Trainer(lambda: torch.nn.Linear(3, 2), loss, (x[:32], y[:32]), epochs=2)

def task():
    return Task(train, TensorDataset(x[:32], y[:32]), TensorDataset(x[32:], y[32:]), loss,
                planted=[*range(8)], wrong=[0, 1])

number = 3
"""


@pytest.fixture
def reference(tmp_path: Path) -> str:
    (tmp_path / "problem.py").write_text(TASK)
    return str(tmp_path / "problem.py")


@pytest.mark.parametrize(
    ("measure", "title"),
    [
        ("lds", "LDS"),
        ("removal", "loss added"),
        ("mislabelled", "AP"),
        ("facts", "first"),
        ("duplicates", "first"),
    ],
)
def test_each_measure_prints_a_table_and_writes_json(measure, title, reference, tmp_path, capsys):
    arguments = [
        *("--measure", measure),
        *("--methods", "dots"),
        *("--seeds", "1"),
        *("--subsets", "4"),
    ]
    target = tmp_path / "out" / "found.json"
    more = ["--repeats", "1", "-o", str(target)]
    more += ["--k", "1"] if measure in ("removal", "facts") else []
    assert run(["evaluate", f"{reference}:task", *arguments, *more]) == 0
    printed = capsys.readouterr().out
    assert "gradient dots" in printed
    assert title in printed
    stored = json.loads(target.read_text())
    assert stored["measure"] == measure
    assert {"gradient dots", "random", "loss"} <= {row["method"] for row in stored["rows"]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--methods", "magic"],
            "method 'magic' is not known; choose from index, index-final, index-ekfac, dots",
        ),
        (["--fraction", "2"], "leaves none in a subset, or all"),
        (["--fraction", "2", "-o", "."], "is a folder"),  # before anything is trained
    ],
)
def test_bad_options_are_one_sentence(arguments, words, reference, capsys):
    assert run(["evaluate", f"{reference}:task", *arguments]) == 2
    found = capsys.readouterr().err
    assert words in found
    assert len(found.strip().splitlines()) == 1


def test_a_reference_to_something_else_is_refused(reference, capsys):
    assert run(["evaluate", f"{reference}:number"]) == 2
    assert "must be a pergrad.evaluate.Task" in capsys.readouterr().err
