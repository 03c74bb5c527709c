"""The judge of soundness fails on wrong answers, on changed models and on refusals without a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.errors import PergradError
from tests.engine.soundness.judge import Case, exact_or_refused

PLAIN = Case(lambda m, x: m.b(m.a(x).tanh()), "exact")
MIXED = Case(lambda m, x: m.b(m.a(x) - m.a(x).mean(0)), "refused")


def patch(
    monkeypatch: pytest.MonkeyPatch, entry: str, change: Callable[[nn.Module, Any], Any]
) -> None:
    own = getattr(pergrad, entry)

    def changed(model: nn.Module, *args: Any) -> Any:
        return change(model, own(model, *args))

    monkeypatch.setattr(pergrad, entry, changed)


@pytest.fixture(autouse=True)
def _float64(monkeypatch: pytest.MonkeyPatch) -> None:
    build = Case.made

    def made(self: Case) -> tuple[nn.Module, tuple[Tensor, ...]]:
        model, batch = build(self)
        return model.double(), tuple(t.double() for t in batch)

    monkeypatch.setattr(Case, "made", made)


@pytest.mark.parametrize("case", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_verdicts_are_those_of_the_cases(case: Case) -> None:
    assert exact_or_refused(case.made) == case.verdict


@pytest.mark.parametrize("row", range(4))
def test_one_wrong_row_is_found(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    def change(_: nn.Module, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        rows["a.weight"][row] *= 1 + 1e-6
        return rows

    patch(monkeypatch, "grads", change)
    with pytest.raises(AssertionError, match=r"a\.weight"):
        exact_or_refused(PLAIN.made)


def test_wrong_norms_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, "norms", lambda _, norms: norms.flip(0))
    with pytest.raises(AssertionError, match="norms"):
        exact_or_refused(PLAIN.made)


def fail(model: nn.Module, _: Any) -> Any:
    raise PergradError(" ")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda model, rows: model.a.weight.data.add_(1), "changed"),
        (lambda model, rows: model.a.weight.register_hook(lambda g: g), "is left"),
        (lambda model, rows: setattr(model.b.bias, "grad", torch.ones(3).double()), "is left"),
        (lambda model, rows: model.b.register_forward_hook(lambda *_: None), "is left"),
        (fail, "without a reason"),
    ],
    ids=["value", "hook of a parameter", "gradient", "hook of a module", "no reason"],
)
def test_changes_and_empty_refusals_are_found(
    monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any], match: str
) -> None:
    patch(monkeypatch, "grads", change)
    with pytest.raises(AssertionError, match=match):
        exact_or_refused(PLAIN.made)


def test_a_refusal_by_one_entry_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise PergradError("refused")

    monkeypatch.setattr(pergrad, "norms", refuse)
    with pytest.raises(AssertionError, match="one of"):
        exact_or_refused(PLAIN.made)
