from pathlib import Path

import torch

import private_training as demo
from pergrad.private import Plan


def plan() -> Plan:
    return Plan(
        noise_multiplier=0.5,
        sample_rate=0.5,
        steps=12,
        max_norm=0.5,
        population=demo.TRAIN,
        delta=demo.DELTA,
    )


def test_it_learns_and_resumes_where_it_was_stopped(tmp_path: Path) -> None:
    train, test = demo.data()
    model, half = demo.train_privately(plan(), train, tmp_path, stop=6)
    assert half is not None
    model, released = demo.train_privately(plan(), train, tmp_path)
    assert released is not None
    assert (half.step, released.step, released.spent) == (6, 12, 12)
    assert demo.accuracy(model, test) > 0.7
    whole = tmp_path / "whole"
    whole.mkdir()
    # The checkpoint holds the keys: a run from the first one is the same.
    demo.train_privately(plan(), train, whole, stop=1)
    resumed = [demo.train_privately(plan(), train, whole)[0] for _ in range(2)]
    assert torch.equal(resumed[0].weight, resumed[1].weight)


def test_it_prints_what_was_spent(capsys: object) -> None:
    assert demo.main(["--steps", "6", "--epsilon", "8"]) == 0
    out = capsys.readouterr().out
    assert "interrupted" in out
    assert "resumed" in out
    assert "7.99" in out or "8.000" in out
