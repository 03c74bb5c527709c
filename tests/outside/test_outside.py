"""The harness of the models of other libraries, without the libraries."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.errors import PergradError
from tests.outside import judging
from tests.outside.case import Case, Library, Subject, noise, of, prepared
from tests.outside.judging import BAD, Row, judge, time_of
from tests.outside.rendering import RESULTS, markdown, tally, timed
from tests.outside.rows import all_cases, store, stored
from tests.outside.running import rows_of

HERE = Path(__file__).parent


class _Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class _Loud(nn.Module):
    """Fails in a recording only, as a crash of ours would."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if torch.overrides._len_torch_function_stack() > 1:  # beside the mode that raises casts
            raise KeyError("boom")
        return self.linear(x)


def _case(build: Any, **facts: Any) -> Case:
    return Case("here", "model", build, **facts)


def _linear(batch: int) -> Subject:
    return of(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), noise(batch, 4))


def _mixed(batch: int) -> Subject:
    return of(nn.Sequential(nn.Linear(4, 3), _Mixing()), noise(batch, 4))


def test_a_model_whose_samples_do_not_meet_is_exact_and_proved() -> None:
    row = judge(_case(_linear))
    assert (row.verdict, row.meets, row.certificate, row.dtype) == (
        "exact",
        False,
        "proved",
        "float64",
    )
    assert row.error is not None
    assert row.error < 1e-9
    assert row.parameters == 15


def test_a_refusal_is_right_where_the_samples_meet() -> None:
    row = judge(_case(_mixed))
    assert (row.verdict, row.meets) == ("refused", True)
    assert "reduces over the batch" in row.reason
    batch_norm = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    row = judge(_case(lambda b: of(batch_norm, noise(b, 4), train=True)))
    assert (row.verdict, row.meets) == ("refused", True)


def test_a_refusal_without_a_reason_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise PergradError("no")

    monkeypatch.setattr(pergrad, "grads", refuse)
    assert judge(_case(_linear)).verdict == "over-refused"


def test_a_wrong_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = pergrad.grads

    def shifted(*args: Any, **options: Any) -> dict[str, Tensor]:
        return {name: g.roll(1, 0) for name, g in right(*args, **options).items()}

    monkeypatch.setattr(pergrad, "grads", shifted)
    assert judge(_case(_linear)).verdict == "wrong"


def test_an_answer_is_wrong_where_the_samples_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    def summed(model: nn.Module, loss_fn: Any, *batch: Any, **options: Any) -> dict[str, Tensor]:
        return {name: torch.zeros(3, *p.shape) for name, p in model.named_parameters()}

    monkeypatch.setattr(pergrad, "grads", summed)
    assert judge(_case(_mixed)).verdict == "wrong"


def test_a_crash_is_told_apart_from_a_refusal() -> None:
    row = judge(_case(lambda b: of(_Loud(), noise(b, 4))))
    assert row.verdict == "crash"
    assert "boom" in row.reason


def test_a_model_that_does_not_run_is_not_judged() -> None:
    row = judge(_case(lambda b: of(nn.Linear(4, 3), noise(b, 5))))
    assert row.verdict == "unrun"
    assert "shapes" in row.reason


def test_a_model_that_is_another_in_a_second_run_is_not_judged() -> None:
    runs = iter(range(100))
    drawn = Subject(nn.Linear(4, 3), lambda m, x: m(x).sum(1) * next(runs), (noise(3, 4),))
    assert "second run" in judge(_case(lambda b: drawn)).reason


def test_statistics_of_inputs_are_told_apart_from_wrong_answers() -> None:
    row = judge(_case(lambda b: of(nn.Sequential(_Mixing(), nn.Linear(4, 3)), noise(b, 4))))
    assert (row.verdict, row.meets) == ("of the batch", True)
    assert "mixes samples" in row.certificate


def test_parameters_leave_their_initial_values_and_take_the_default_dtype() -> None:
    model = prepared(nn.LayerNorm(4))
    assert not torch.equal(model.weight, torch.ones(4))
    with judging.default_dtype(torch.float64):
        assert prepared(nn.BatchNorm1d(4)).running_mean.dtype == torch.float64


def test_steps_are_timed_in_turn() -> None:
    row = time_of(_case(_linear), batch=4, repeats=1)
    assert row.verdict == "timed"
    assert row.plain
    assert row.recorded
    assert row.rungs == {"rule": 2}


def test_a_case_over_its_time_or_without_a_result_is_a_crash() -> None:
    library = Library("torch")
    cases = [Case("torch", "slow", _linear), Case("torch", "dead", _linear)]

    def one(case: Case) -> Row:
        if case.name == "dead":
            raise SystemExit(3)
        time.sleep(60)
        raise AssertionError

    found = list(rows_of(library, cases, seconds=0.5, one=one))
    assert [row.verdict for row in found] == ["crash", "crash"]
    assert "0 s" in found[0].reason
    assert "3" in found[1].reason


def test_a_library_that_is_missing_is_said_to_be() -> None:
    library = Library("no-such-library")
    library.add("model", _linear)
    (row,) = rows_of(library, library.cases)
    assert row.verdict == "unrun"
    assert "no_such_library" in row.reason


def test_rows_are_stored_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first, second, *_ = all_cases()
    store(Row(second.library, second.name, verdict="exact", error=1e-15), path)
    store(Row(first.library, first.name, verdict="refused", reason="a | b", meets=True), path)
    store(Row(second.library, second.name, verdict="sized"), path)
    assert [row.verdict for row in stored(path).values()] == ["refused", "sized"]
    text = markdown(list(stored(path).values()))
    assert "a \\| b" in text
    assert "1 sized, 1 refused" in text


def test_cases_have_names_of_their_own() -> None:
    keys = [(case.library, case.name) for case in all_cases()]
    assert len(keys) == len(set(keys))


def test_every_case_has_a_row_and_the_table_is_that_of_the_rows() -> None:
    found = stored()
    missing = [
        f"{case.library}/{case.name}"
        for case in all_cases()
        if (case.library, case.name) not in found
    ]
    assert not missing, "run `make outside`"
    assert RESULTS.read_text() == markdown(list(found.values())), (
        "run python -m tests.outside.table --render"
    )


def test_table_has_the_promised_models_and_nothing_bad() -> None:
    judged = [row for row in stored().values() if not row.is_timed]
    assert len(judged) >= 300
    assert len({row.library for row in judged}) >= 15
    assert not [row.name for row in judged if row.verdict in BAD]


def test_declared_meetings_are_those_that_the_losses_show() -> None:
    found = stored()
    for case in all_cases():
        if case.meets:
            assert found[case.library, case.name].meets, f"{case.library}/{case.name}"


def test_every_library_is_required_and_pinned() -> None:
    names = {_plain(case.library) for case in all_cases()}
    required = {
        _plain(line)
        for line in (HERE / "requirements.txt").read_text().splitlines()
        if line[0] != "#"
    }
    root = HERE.parents[1]
    pins = [
        line
        for line in (root / "constraints-outside.txt").read_text().splitlines()
        if line[:1].isalpha()
    ]
    pinned = {_plain(line.partition("==")[0]) for line in pins}
    assert names <= required <= pinned
    own = {
        _plain(line.partition("==")[0]): line
        for line in (root / "constraints.txt").read_text().splitlines()
    }
    for line in pins:  # what both environments have is the same
        if _plain(line.partition("==")[0]) in ("torch", "numpy", "transformers", "peft"):
            assert own[_plain(line.partition("==")[0])] == line


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def test_slow_rows_come_first() -> None:
    fast, slow = (
        Row("a", "fast", plain=1.0, recorded=1.1),
        Row("a", "slow", plain=1.0, recorded=2.0),
    )
    assert timed([fast, Row("a", "short", plain=0.01, recorded=1.0), slow]) == [slow, fast]
    assert tally([fast]) == "1 unrun"
