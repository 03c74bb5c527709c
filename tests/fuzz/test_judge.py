"""The judge finds wrong answers, crashes and changed models, and accepts right ones and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn

import pergrad
from fuzz.judge import judge
from fuzz.programs import Program, Step, draw
from fuzz.registry import Sizes

PLAIN = Program(
    Sizes(4, 3, 4), "vec", (Step("linear", 0), Step("activation", 1), Step("linear", 2))
)
MIXED = Program(Sizes(4, 3, 4), "vec", (Step("linear", 0), Step("batch_mean", 1)))


def replacing(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    grads = pergrad.grads
    monkeypatch.setattr(pergrad, "grads", lambda model, *args: change(grads(model, *args), model))


def certifying(monkeypatch: pytest.MonkeyPatch, *, ok: bool) -> None:
    """Makes every certificate pass or fail: a real one certifies the engine, not the changed answer."""
    report = type("Report", (), {"ok": ok})()
    monkeypatch.setattr(pergrad, "certify", lambda *args, quiet: report)


def test_an_ordinary_program_is_exact() -> None:
    assert judge(PLAIN).kind == "exact"


def test_a_batch_mean_is_refused() -> None:
    outcome = judge(MIXED)
    assert outcome.kind == "refused"
    assert "Error: " in outcome.why


@pytest.mark.parametrize("row", range(4))
def test_one_wrong_row_is_found(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    def change(found: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
        found["a0.weight"][row] *= 1 + 1e-5
        return found

    replacing(monkeypatch, change)
    certifying(monkeypatch, ok=False)
    outcome = judge(PLAIN)
    assert outcome.kind == "wrong"
    assert "a0.weight" in outcome.why


def test_rows_in_another_order_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    replacing(monkeypatch, lambda found, model: {name: g.flip(0) for name, g in found.items()})
    certifying(monkeypatch, ok=False)
    assert judge(PLAIN).kind == "wrong"


def test_a_missing_parameter_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    replacing(monkeypatch, lambda found, model: {"a0.weight": found["a0.weight"]})
    certifying(monkeypatch, ok=False)
    assert judge(PLAIN).kind == "wrong"


def test_a_crash_is_not_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    replacing(monkeypatch, lambda found, model: found["no such parameter"])
    assert judge(PLAIN).kind == "crash"


def test_a_changed_parameter_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    @torch.no_grad()
    def change(found: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
        model.get_parameter("a2.weight").add_(1e-6)
        return found

    replacing(monkeypatch, change)
    assert judge(PLAIN).kind == "state"


def test_a_moved_generator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(found: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
        torch.rand(1)
        return found

    replacing(monkeypatch, change)
    assert judge(PLAIN).kind == "state"


def test_wrong_norms_and_sums_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for quantity in (pergrad.Norms, pergrad.ClippedSum):
        with monkeypatch.context() as patch:
            own = quantity.result.fget  # type: ignore[attr-defined]

            def result(self: Any, own: Any = own) -> Any:
                found = own(self)
                if isinstance(found, dict):
                    return {name: 1.01 * t for name, t in found.items()}
                return 1.01 * found

            patch.setattr(quantity, "result", property(result))
            certifying(patch, ok=False)
            assert judge(PLAIN).kind == "wrong"


def test_a_program_that_plain_autograd_cannot_run_is_invalid() -> None:
    assert judge(Program(Sizes(2, 3, 4), "vec", (Step("activation", 0),))).kind == "invalid"


def test_the_default_dtype_is_as_before() -> None:
    judge(PLAIN)
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(("ok", "kind"), [(True, "exact"), (False, "alarm")])
def test_a_certificate_that_rejects_a_right_answer_is_an_alarm(
    monkeypatch: pytest.MonkeyPatch, ok: bool, kind: str
) -> None:
    certifying(monkeypatch, ok=ok)
    assert judge(PLAIN).kind == kind


@pytest.mark.parametrize(("ok", "kind"), [(True, "certified"), (False, "wrong")])
def test_a_wrong_answer_that_is_certified_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, ok: bool, kind: str
) -> None:
    certifying(monkeypatch, ok=ok)
    replacing(monkeypatch, lambda found, model: {name: 2 * g for name, g in found.items()})
    assert judge(PLAIN).kind == kind


def test_a_certificate_of_samples_that_meet_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    certifying(monkeypatch, ok=True)
    steps = (Step("linear", 0), Step("detached_mean", 1))
    program = Program(Sizes(4, 3, 4), "vec", steps)
    assert judge(program).kind in ("certified", "refused")  # never exact


def test_the_certificate_is_asked_for_the_random_numbers_of_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[torch.Tensor] = []
    grads = pergrad.grads

    def certify(*args: Any, quiet: bool) -> Any:
        drawn.append(torch.get_rng_state())
        return type("Report", (), {"ok": True})()

    def noting(*args: Any) -> Any:
        drawn.append(torch.get_rng_state())
        return grads(*args)

    monkeypatch.setattr(pergrad, "certify", certify)
    monkeypatch.setattr(pergrad, "grads", noting)
    assert judge(replace(PLAIN, first="grads", second="grads")).kind == "exact"
    _, answer, certificate = drawn
    assert torch.equal(answer, certificate)


@pytest.mark.parametrize(("norm", "kind"), [((), "wrong"), (("layer_norm",), "invalid")])
def test_rows_in_the_order_of_the_batch_are_wrong_unless_rounding_decides_it(
    monkeypatch: pytest.MonkeyPatch, norm: tuple[str, ...], kind: str
) -> None:
    names = ("linear", *norm, "batch_argsort")
    program = Program(Sizes(4, 3, 4), "vec", tuple(Step(n, k) for k, n in enumerate(names)))

    def by_sample(model: nn.Module, loss_fn: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        seen, named = x.clone().requires_grad_(), dict(model.named_parameters())
        rows = [
            torch.autograd.grad(loss, [seen, *named.values()], retain_graph=True)
            for loss in loss_fn(model, seen)
        ]
        rows.sort(key=lambda row: int(row[0].flatten(1).abs().sum(1).argmax()))
        stacked = [torch.stack(of_each) for of_each in zip(*rows, strict=True)]
        return dict(zip(named, stacked[1:], strict=True))

    monkeypatch.setattr(pergrad, "grads", by_sample)
    assert judge(program).kind == kind


def test_gradients_that_are_rounding_are_not_judged() -> None:
    """Equal numbers are normalised twice, so that the second norm is of what rounding left of the first."""
    program = next(islice(draw(1119, mixing=False), 13426, None))
    assert [step.name for step in program.steps].count("layer_norm") == 2
    outcome = judge(program)
    assert (outcome.kind, outcome.why) == ("invalid", "rounding decides the gradients")
