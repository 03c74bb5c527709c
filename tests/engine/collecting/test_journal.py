"""The notes on each parameter: by which function, on which rung, and how often."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.engine.collecting.journal import RUNGS, Journal
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.recording import recorded
from pergrad.quantities import Norms
from tests.engine.exactness import Formula, numbers


def weights(*roots: tuple[str, ...]) -> Any:
    return [SimpleNamespace(roots=names) for names in roots]


def test_each_use_is_counted_by_function_and_rung() -> None:
    journal = Journal()
    journal.note(weights(("w",)), "linear", "rule")
    journal.note(weights(("w",)), "linear", "rule")
    journal.note(weights(("w",)), "linear", "vmap")
    journal.note(weights(("v",)), "add", "broadcast")
    assert journal.uses == {
        "w": {("linear", "rule"): 2, ("linear", "vmap"): 1},
        "v": {("add", "broadcast"): 1},
    }


def test_one_call_counts_once_for_a_parameter_however_often_it_is_an_argument() -> None:
    journal = Journal()
    journal.note(weights(("w",), ("w", "v"), ("v",)), "cat", "derived")
    assert journal.uses == {"w": {("cat", "derived"): 1}, "v": {("cat", "derived"): 1}}


@pytest.mark.parametrize("slow", range(len(RUNGS)))
def test_a_parameter_stands_on_the_slowest_rung_of_its_uses(slow: int) -> None:
    journal = Journal()
    for rung in RUNGS[slow::-1]:
        journal.note(weights(("w",)), "f", rung)
    journal.note(weights(("v",)), "f", RUNGS[-1])
    assert journal.rung_of("w") == RUNGS[slow]


def test_rungs_are_ordered_from_the_fastest_to_the_slowest() -> None:
    assert RUNGS == ("rule", "derived", "broadcast", "expanded", "vmap", "masked VJP", "loop")


def test_a_parameter_without_a_use_stands_on_none() -> None:
    assert Journal().rung_of("w") is None


def test_one_step_notes_every_use_on_its_rung_also_when_the_plans_are_known() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = F.linear(x, m.w) + F.linear(x, m.w.t())
        h = h * m.s  # no rule
        return torch.cat([h, m.token.expand(x.shape[0], -1)])

    for _ in range(2):  # the second time by the plans of the first
        model = Formula(forward, w=numbers(5, 5), s=numbers(5), token=numbers(1, 5))
        journal = Journal()
        with recorded(model, [Norms()], Options(), journal=journal):
            model(numbers(3, 5)).sum().backward()
        linear = "torch.nn.functional.linear"
        assert journal.uses["w"] == {(linear, "rule"): 2, ("torch.Tensor.t", "derived"): 1}
        assert journal.uses["s"] == {("torch.Tensor.mul", "rule"): 1}
        assert {rung for _, rung in journal.uses["token"]} >= {"expanded"}
        assert journal.rung_of("w") == "derived"
