"""Replayed steps give what plain ones give, and need one GPU."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.engine.compiling.cuda_graphs import Replayed, check_devices


def test_cuda_graphs_of_a_model_on_the_cpu_are_refused() -> None:
    model = nn.Linear(3, 2)
    step = pergrad.compiled(model, lambda m, x: m(x).sum(1), pergrad.Norms(), cuda_graphs=True)
    with pytest.raises(ValueError, match="on one GPU; parameters, buffers and batch are on cpu"):
        step(torch.randn(4, 3))


def test_all_devices_are_named_where_there_is_more_than_one() -> None:
    with pytest.raises(ValueError, match="are on cpu, meta"):
        check_devices([torch.ones(1), torch.ones(1, device="meta")])


def test_first_call_runs_as_it_is() -> None:
    replayed = Replayed(lambda *inputs: [sum(inputs)], 1, None)
    (found,) = replayed(torch.ones(2), torch.ones(2))
    assert found.tolist() == [2, 2]


def _step(weight: Tensor, x: Tensor) -> Sequence[object]:
    weight.add_(1)
    return [weight * x, "text"]


@pytest.mark.gpu
def test_replays_read_the_state_in_place_and_the_batch_from_anywhere() -> None:
    replayed = Replayed(_step, 1, torch.cuda.graph_pool_handle())
    weight = torch.zeros(2, device="cuda")
    results = []
    for k in range(1, 5):
        found, text = replayed(weight, torch.full((2,), float(k), device="cuda"))
        assert text == "text"
        results.append(found)
    assert [t.tolist() for t in results] == [[k * k] * 2 for k in range(1, 5)]
    assert weight.tolist() == [4, 4]


@pytest.mark.gpu
def test_state_that_lies_elsewhere_is_captured_again() -> None:
    replayed = Replayed(_step, 1, torch.cuda.graph_pool_handle())
    x = torch.ones(2, device="cuda")
    for weight in (torch.zeros(2, device="cuda"), torch.full((2,), 10.0, device="cuda")):
        for _ in range(3):
            found, _text = replayed(weight, x)
            assert found.tolist() == weight.tolist()
        assert weight[0] % 10 == 3


@pytest.mark.gpu
def test_what_cannot_be_captured_says_which_option_to_leave_out() -> None:
    replayed = Replayed(lambda x: [x.sum().item()], 0, torch.cuda.graph_pool_handle())
    x = torch.ones(2, device="cuda")
    replayed(x)
    with pytest.raises(RuntimeError, match="cuda_graphs=False"):
        replayed(x)
    torch.rand(2, device="cuda")  # the generator has left the capture
