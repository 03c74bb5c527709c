import torch

from benchmarks import kept_cost
from benchmarks.models import MODELS


def test_rows_are_of_plain_and_recorded_steps() -> None:
    rows = kept_cost.rows("tiny", rounds=2, seed=0)
    assert [row.method for row in rows] == ["plain", "keep_grad"]
    assert rows[0].ratio == 1
    assert rows[1].fastest is not None
    assert rows[0].fastest is not None
    assert rows[1].ratio == rows[1].fastest / rows[0].fastest


def test_both_steps_fill_grad_alike() -> None:
    torch.manual_seed(0)
    task = MODELS["transformer"]["tiny"].build()
    found: list[list[torch.Tensor]] = []

    def keep(**_: object) -> None:
        found.append([p.grad.clone() for p in task.model.parameters() if p.grad is not None])

    task.model.zero_grad = keep  # type: ignore[assignment, method-assign]
    for step in kept_cost.steps(task).values():
        step()
        for p in task.model.parameters():
            p.grad = None
    assert len(found[0]) == len(found[1]) > 0
    for plain, kept in zip(*found, strict=True):
        torch.testing.assert_close(plain, kept)
