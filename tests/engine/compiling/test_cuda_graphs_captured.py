"""Capturing and replaying a step, on a stand-in for CUDA's graphs: which work is done when, and on what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from pergrad.engine.compiling import cuda_graphs
from pergrad.engine.compiling.cuda_graphs import Replayed, check_devices


class FakeGraph:
    """Repeats the step that was called during the capture."""

    made: list[FakeGraph]
    capturing: FakeGraph | None = None

    def __init__(self) -> None:
        FakeGraph.made.append(self)
        self.pool: Any = "none"
        self.mode = ""
        self.again: Callable[[], None] = lambda: None
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.again()


@contextmanager
def fake_capture(graph: FakeGraph, pool: Any = None, *, capture_error_mode: str) -> Iterator[None]:
    graph.pool, graph.mode = pool, capture_error_mode
    FakeGraph.capturing = graph
    try:
        yield
    finally:
        FakeGraph.capturing = None


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraph]:
    FakeGraph.made = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", fake_capture)
    return FakeGraph.made


def step(weight: Tensor, x: Tensor) -> Sequence[Any]:
    """Adds one to the weight; a capture computes nothing, and a replay does it on the same tensors."""
    graph = FakeGraph.capturing
    if graph is None:
        weight.add_(1)
        return [weight * x, "text"]
    result = torch.zeros_like(x)

    def again() -> None:
        weight.add_(1)
        result.copy_(weight * x)

    graph.again = again
    return [result, "text"]


def test_first_call_is_not_captured_and_all_others_replay_one_graph(
    graphs: list[FakeGraph],
) -> None:
    replayed = Replayed(step, 1, "pool")
    weight = torch.zeros(2)
    results = []
    for k in range(1, 5):
        found, text = replayed(weight, torch.full((2,), float(k)))
        assert len(graphs) == (k > 1)
        assert text == "text"
        results.append(found)
    assert [t.tolist() for t in results] == [[k * k] * 2 for k in range(1, 5)]
    assert weight.tolist() == [4, 4]
    assert [(g.pool, g.mode, g.replays) for g in graphs] == [("pool", "relaxed", 3)]


def test_batch_is_copied_to_the_graphs_own(graphs: list[FakeGraph]) -> None:
    replayed = Replayed(step, 1, None)
    weight, first = torch.zeros(2), torch.ones(2)
    replayed(weight, first)
    replayed(weight, first)
    replayed(weight, torch.full((2,), 5.0))
    assert first.tolist() == [1, 1]


def test_state_that_lies_elsewhere_is_captured_again_in_the_same_pool(
    graphs: list[FakeGraph],
) -> None:
    replayed = Replayed(step, 1, "pool")
    x = torch.ones(2)
    weights = torch.zeros(2), torch.full((2,), 10.0)
    for weight in weights:
        for _ in range(3):
            found, _text = replayed(weight, x)
            assert found.tolist() == weight.tolist()
    assert [w[0].item() for w in weights] == [3, 13]
    assert [(g.pool, g.replays) for g in graphs] == [("pool", 2), ("pool", 3)]


def test_tables_of_kernels_live_as_long_as_their_graph(
    graphs: list[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    @contextmanager
    def kept() -> Iterator[list[str]]:
        assert FakeGraph.capturing is None  # they are kept before the capture begins
        opened.append(1)
        yield ["table"]

    monkeypatch.setattr(cuda_graphs, "kept_tables", kept)
    replayed = Replayed(step, 1, None)
    weight = torch.zeros(2)
    for _ in range(3):
        replayed(weight, torch.ones(2))
    captured = replayed._captured
    assert captured is not None
    assert captured._tables == ["table"]
    assert opened == [1]


def test_what_cannot_be_captured_says_which_option_to_leave_out(graphs: list[FakeGraph]) -> None:
    def refuses(x: Tensor) -> Sequence[Any]:
        if FakeGraph.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return [x]

    replayed = Replayed(refuses, 0, None)
    replayed(torch.ones(2))
    with pytest.raises(RuntimeError, match="pass cuda_graphs=False") as caught:
        replayed(torch.ones(2))
    assert "not permitted" in str(caught.value.__cause__)


class OnDevice:
    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:1"], ["cuda:0", "cpu"], ["cpu"]])
def test_inputs_on_other_devices_are_refused_by_name(devices: list[str]) -> None:
    with pytest.raises(ValueError, match="are on " + ", ".join(sorted(devices))):
        check_devices([OnDevice(d) for d in devices])  # type: ignore[misc]


def test_inputs_on_one_gpu_are_accepted() -> None:
    check_devices([OnDevice("cuda:0"), OnDevice("cuda:0")])  # type: ignore[list-item]
