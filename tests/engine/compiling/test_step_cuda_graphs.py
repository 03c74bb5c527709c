"""A compiled step with CUDA graphs, on a stand-in for those: what is replayed, and from which memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.engine.compiling import step as step_module


class FakeReplayed:
    made: list[FakeReplayed]

    def __init__(self, call: Callable[..., Sequence[Any]], state: int, pool: Any) -> None:
        FakeReplayed.made.append(self)
        self.call, self.state, self.pool, self.calls = call, state, pool, 0

    def __call__(self, *inputs: Tensor) -> Sequence[Any]:
        self.calls += 1
        return self.call(*inputs)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum(1)


@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["without", "with"])
def test_steps_of_all_signatures_are_replayed_from_one_pool(
    cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeReplayed.made = []
    pools = iter(["first pool", "second pool"])
    checked: list[int] = []
    monkeypatch.setattr(step_module, "Replayed", FakeReplayed)
    monkeypatch.setattr(step_module, "check_devices", lambda given: checked.append(len(given)))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    model, norms = nn.Linear(3, 2).double(), pergrad.Norms()
    step = pergrad.compiled(model, loss, norms, backend="eager", cuda_graphs=cuda_graphs)
    for size in (4, 5):
        for _ in range(3):
            x = torch.rand(size, 3, dtype=torch.float64)
            step(x)
            torch.testing.assert_close(norms.result, pergrad.norms(model, loss, x))
    if cuda_graphs:
        assert checked == [3, 3]  # once for each signature: two parameters and the batch
        found = [(made.state, made.pool, made.calls) for made in FakeReplayed.made]
        assert found == [(2, "first pool", 2)] * 2
    else:
        assert checked == []
        assert FakeReplayed.made == []


def test_graph_is_wanted_from_the_second_call_on_up_to_the_limit() -> None:
    step = pergrad.compiled(nn.Linear(3, 2), loss, pergrad.Norms(), max_graphs=0)
    assert step._wants_graph("key") is False
    with pytest.warns(UserWarning, match="0 different signatures are compiled already"):
        assert step._wants_graph("key") is False
    assert step._wants_graph("key") is False  # without another warning
    more = pergrad.compiled(nn.Linear(3, 2), loss, pergrad.Norms(), max_graphs=1)
    assert [more._wants_graph("key") for _ in range(3)] == [False, True, True]
