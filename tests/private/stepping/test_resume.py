"""A run that is killed and resumed is bit for bit the undisturbed one."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from pergrad.errors import PrivacyError
from pergrad.private import Adaptive, Step
from tests.private.stepping import killed
from tests.private.stepping.cases import data, losses, mlp, plan, run, seeded, sgd, weights
from tests.starting import Started

ROOT = Path(__file__).parents[3]


def start(folder: Path) -> Started:
    return Started("tests.private.stepping.killed", str(folder), cwd=ROOT)


def lines(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def finished(folder: Path) -> bool:
    process = start(folder)
    process.communicate()
    return process.returncode == 0


@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_ends_as_the_undisturbed_one(
    kills: int, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    assert finished(whole)
    moments = random.Random(kills)
    for _ in range(kills):
        process = start(broken)
        lines_before = 1 + moments.randrange(6)
        while process.printed.count("\n") < lines_before:
            assert process.returncode is None, process.communicate()
            time.sleep(0.001)
        time.sleep(moments.random() * 0.02)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert finished(broken)
    for a, b in zip(*(torch.load(f / "end.pt") for f in (whole, broken)), strict=True):
        assert torch.equal(a, b)
    assert lines(whole) == lines(broken)
    assert len(lines(whole)) == killed.STEPS + 1


def trained(folder: Path, stop: int | None, **options: Any) -> tuple[Tensor, Step]:
    """Trains up to `stop`, from a checkpoint if there is one."""
    model = mlp()
    made = plan(**options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step, loader = run(made, model, optimizer=optimizer, ledger=folder / "ledger.jsonl")
    if (folder / "run.pt").exists():
        step.load(folder / "run.pt")
    for batch in loader:
        if step(*batch).step == stop:
            step.save(folder / "run.pt")
            break
    return weights(model), step


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bands": 2},
        {"clipping": Adaptive(noise=4.0)},
        {"sampling": "shuffled", "population": 40},
    ],
)
def test_a_saved_run_goes_on_as_if_nothing_had_happened(
    options: dict[str, Any], tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    expected, _ = trained(whole, None, **options)
    trained(broken, 2, **options)
    found, step = trained(broken, 4, **options)
    found, step = trained(broken, None, **options)
    assert torch.equal(found, expected)
    assert step.number == step.spent == 6


@pytest.mark.parametrize("certify", [True, False])
def test_the_first_compiled_step_of_a_process_has_the_bits_of_later_ones(certify: bool) -> None:
    """A resumed run has its first call, which is uncompiled and rounds in another way, at another step."""
    torch.manual_seed(0)
    x, y = torch.randn(20, 64), torch.randint(3, (20,))
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.Linear(64, 3)
    )
    step, _ = run(plan(), model, backend="eager", piece_size=24, certify=certify)
    first, *later = (step.clipped_sums(x, y) for _ in range(3))
    for other in later:
        assert all(torch.equal(total, other[name]) for name, total in first.items())


def test_a_compiled_run_with_samples_that_are_not_finite_resumes_with_the_same_bits() -> None:
    """The first graph of a process is certified, which samples that are not finite must not prevent."""
    x = torch.randn(40, 64, generator=seeded(1))
    x[3::11] = torch.nan
    samples = TensorDataset(x, torch.randint(3, (40,), generator=seeded(2)))

    def trained(stops: list[int]) -> Tensor:
        state, at_stop = None, None
        for stop in stops:
            torch.manual_seed(0)
            model = torch.nn.Sequential(
                torch.nn.Linear(64, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 3)
            )
            step, loader = run(
                plan(sample_rate=0.3), model, samples=samples, backend="eager", piece_size=24
            )
            if state is not None:
                step.load_state_dict(state)
                model.load_state_dict(at_stop)
            for batch in loader:
                step(*batch)
                assert step.is_certified
                if step.number == stop:
                    break
            state, at_stop = step.state_dict(), model.state_dict()
        return weights(model)

    assert torch.equal(trained([6]), trained([1, 2, 3, 4, 5, 6]))


def test_steps_after_the_checkpoint_are_repeated_and_not_counted_again(tmp_path: Path) -> None:
    trained(tmp_path, 2)
    first, _ = trained(tmp_path, None)
    again, step = trained(tmp_path, None)
    assert torch.equal(first, again)
    assert step.spent == 6
    assert len(lines(tmp_path)) == 7


def test_a_step_that_cannot_be_repeated_is_refused_until_its_noise_is_renewed(
    tmp_path: Path,
) -> None:
    def resumed(renew: bool) -> tuple[Step, Any]:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        step, loader = run(plan(), model, optimizer=optimizer, ledger=tmp_path / "ledger.jsonl")
        step.load(tmp_path / "run.pt")
        if renew:
            step.renew_noise()
        with torch.no_grad():
            model[0].weight.add_(1e-3)  # not the model that the ledger was written with
        return step, loader

    trained(tmp_path, 2)
    trained(tmp_path, 4)
    (tmp_path / "run.pt").unlink()
    trained(tmp_path, 2)
    step, loader = resumed(renew=False)
    with pytest.raises(PrivacyError, match="step 2 was released before from another sum"):
        step(*next(iter(loader)))
    step, loader = resumed(renew=True)
    released = step(*next(iter(loader)))
    assert (released.step, released.spent) == (3, 5)
    for batch in loader:
        if step.spent == 6:
            with pytest.raises(PrivacyError, match="all of them are spent"):
                step(*batch)
            break
        step(*batch)


@pytest.mark.parametrize("is_loaded_first", [True, False])
def test_renewed_steps_release_no_batch_twice(is_loaded_first: bool, tmp_path: Path) -> None:
    """Two noisy sums of one Poisson batch tell more than those of two batches, which the account counts."""
    options: dict[str, Any] = {"sampling": "shuffled", "population": 40, "steps": 5}
    step, loader = run(plan(**options), ledger=tmp_path / "ledger.jsonl")
    released = []
    for x, y in loader:  # 5 batches of 8 of the 40 records
        step(x, y)
        released += x[:, 0].tolist()
        if step.number == 1:
            step.save(tmp_path / "run.pt")
        if step.number == 3:
            break
    model, made = mlp(), plan(**options)
    again = Step(model, sgd(model), losses, made, ledger=tmp_path / "ledger.jsonl")
    if not is_loaded_first:
        loader = made.loader(data(), seeded())
    again.load(tmp_path / "run.pt")
    again.renew_noise()
    if is_loaded_first:
        loader = made.loader(data(), seeded())
    for x, y in loader:
        again(x, y)
        released += x[:, 0].tolist()
        again.save(tmp_path / "run.pt")
        again.load(tmp_path / "run.pt")
        break
    for x, y in loader:
        again(x, y)
        released += x[:, 0].tolist()
    assert (again.number, again.spent) == (3, 5)
    assert len(released) == len({*released}) == 40


def test_a_rewound_run_that_goes_another_way_gets_other_noise() -> None:
    def noise_of(lr: float) -> list[Tensor]:
        """The noise of the steps after a checkpoint that is taken at another learning rate."""
        model = mlp()
        optimizer = sgd(model, lr=lr)
        step, loader = run(plan(sample_rate=0.5), model, optimizer=optimizer)  # no ledger
        step.load_state_dict(state)
        found = []
        for batch in loader:
            clipped = step.clipped_sums(*batch)
            before = weights(model)
            step(*batch)
            total = torch.cat([t.flatten() for t in clipped.values()])
            found.append((before - weights(model)) / lr * 8 - total)
        return found

    step, _ = run(plan(sample_rate=0.5))
    state = step.state_dict()
    first, again, other = noise_of(1.0), noise_of(1.0), noise_of(0.5)
    for a, b, c in zip(first, again, other, strict=True):
        torch.testing.assert_close(a, b)
        assert not torch.allclose(a, c, atol=1e-6)


def test_a_rewound_run_that_goes_another_way_gets_other_noise_on_its_counts() -> None:
    def bounds_of(lr: Any) -> list[float]:
        model = mlp()
        made = plan(clipping=Adaptive(noise=4.0))
        step, loader = run(made, model, optimizer=sgd(model, lr=lr))
        found = []
        for batch in loader:
            step(*batch)
            found.append(round(step._bound.sensitivity, 6))
        return found

    # So small that the counts are the same.
    first, again, other = bounds_of(1e-9), bounds_of(1e-9), bounds_of(2e-9)
    assert first == again
    assert len({*first} & {*other}) < 2
    assert bounds_of(numpy.float32(1e-9)) not in (first, bounds_of(numpy.float32(2e-9)))


def test_a_state_survives_being_saved_before_its_loader_is_made(tmp_path: Path) -> None:
    expected, _ = trained(tmp_path, None)
    (tmp_path / "ledger.jsonl").unlink()
    trained(tmp_path, 2)
    model, made = mlp(), plan()
    step = Step(model, torch.optim.Adam(model.parameters(), lr=0.1), losses, made)
    step.load(tmp_path / "run.pt")
    step.save(tmp_path / "run.pt")
    found, _ = trained(tmp_path, None)
    assert torch.equal(found, expected)


# Refusals


def test_a_checkpoint_without_batches_is_refused(tmp_path: Path) -> None:
    model = mlp()
    step = Step(model, sgd(model), losses, plan())
    with pytest.raises(PrivacyError, match="make the loader before"):
        step.save(tmp_path / "run.pt")
    assert not (tmp_path / "run.pt").exists()


def test_a_changed_plan_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, 2)
    with pytest.raises(PrivacyError, match=r"has changed .*\(max_norm was 0.5\)"):
        trained(tmp_path, None, max_norm=1.0)


def test_changed_data_are_refused_before_they_are_trained_on(tmp_path: Path) -> None:
    trained(tmp_path, 2)
    x, y = data().tensors
    for changed in (TensorDataset(x + 1e-9, y), TensorDataset(x[1:], y[1:])):
        made = plan()
        model = mlp()
        step, _ = run(made, model, samples=changed, optimizer=torch.optim.Adam(model.parameters()))
        before = weights(model)
        with pytest.raises(PrivacyError, match="not the one that this run began with"):
            step.load(tmp_path / "run.pt")
        assert torch.equal(before, weights(model))


def test_changed_data_are_refused_where_the_loader_comes_after_the_state(tmp_path: Path) -> None:
    trained(tmp_path, 2)
    model, made = mlp(), plan()
    step = Step(model, torch.optim.Adam(model.parameters()), losses, made)
    step.load(tmp_path / "run.pt")
    x, y = data().tensors
    with pytest.raises(PrivacyError, match="not the one that this run began with"):
        made.loader(TensorDataset(x[1:], y[1:]))
    step(*next(iter(made.loader(data()))))
    assert step.number == 3


def test_another_state_is_refused(tmp_path: Path) -> None:
    step, _ = run(plan())
    for state in ({}, {"format": 0}, None):
        with pytest.raises(PrivacyError, match="not the state of a private step"):
            step.load_state_dict(state)
    torch.save({"model": {}}, tmp_path / "other.pt")
    with pytest.raises(PrivacyError, match="expected \\['model', 'optimizer', 'step'\\]"):
        step.load(tmp_path / "other.pt")
    other, _ = run(plan(), cryptographic=True)
    with pytest.raises(PrivacyError, match="cryptographic=True noise"):
        step.load_state_dict(other.state_dict())


def test_bounds_in_another_order_are_another_plan(tmp_path: Path) -> None:
    """The first pattern that matches a parameter counts."""
    bounds = {"*.weight": 1.0, "0.*": 2.0, "*": 1.5}
    swapped = {"0.*": 2.0, "*.weight": 1.0, "*": 1.5}
    step, loader = run(plan(max_norm=bounds), ledger=tmp_path / "ledger.jsonl")
    step(*next(iter(loader)))
    other, others = run(plan(max_norm=swapped), ledger=tmp_path / "ledger.jsonl")
    with pytest.raises(PrivacyError, match="max_norm was"):
        other.load_state_dict(step.state_dict())
    with pytest.raises(PrivacyError, match="it differs in plan"):
        other(*next(iter(others)))


def test_a_lost_ledger_is_noticed(tmp_path: Path) -> None:
    trained(tmp_path, 2)
    (tmp_path / "ledger.jsonl").unlink()
    with pytest.raises(PrivacyError, match="ends at step 0, but the run is at step 2"):
        trained(tmp_path, None)


def test_the_ledger_of_a_run_with_another_key_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, 2)
    step, loader = run(plan(), generator=seeded(9), ledger=tmp_path / "ledger.jsonl")
    with pytest.raises(PrivacyError, match="the ledger of another run: it differs in run"):
        step(*next(iter(loader)))


def test_a_checkpoint_is_for_its_owner_alone_and_has_the_scheduler(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step, loader = run(plan(), model, optimizer=optimizer)
    for batch in loader:
        step(*batch)
        scheduler.step()
        step.save(tmp_path / "run.pt", scheduler=scheduler)
        break
    assert (tmp_path / "run.pt").stat().st_mode & 0o077 == 0
    other = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step.load(tmp_path / "run.pt", scheduler=other)
    assert other.last_epoch == 1


def test_an_error_in_the_middle_of_a_step_can_be_repeated(tmp_path: Path) -> None:
    model = mlp()
    fails = True

    class Flaky(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if fails:
                raise OSError("gone")
            return super().step(closure)

    made = plan(bands=2)
    step, loader = run(
        made, model, optimizer=Flaky(model.parameters(), lr=1.0), ledger=tmp_path / "ledger.jsonl"
    )
    batch = next(iter(loader))
    with pytest.raises(OSError, match="gone"):
        step(*batch)
    assert all(p.grad is None for p in model.parameters())
    fails = False
    step(*batch)
    calm = mlp()
    once, batches = run(plan(bands=2), calm)
    once(*next(iter(batches)))
    assert torch.equal(weights(model), weights(calm))


def test_a_step_made_again_at_another_rate_is_not_counted_once(tmp_path: Path) -> None:
    trained(tmp_path, 2)
    trained(tmp_path, 3)
    (tmp_path / "run.pt").unlink()
    (tmp_path / "ledger.jsonl").rename(tmp_path / "kept")
    trained(tmp_path, 2)
    (tmp_path / "kept").rename(tmp_path / "ledger.jsonl")
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step, loader = run(plan(), model, optimizer=optimizer, ledger=tmp_path / "ledger.jsonl")
    step.load(tmp_path / "run.pt")
    optimizer.param_groups[0]["lr"] = 0.2  # the sum is the same, its noise would be another
    with pytest.raises(PrivacyError, match="with other settings of the optimizer"):
        step(*next(iter(loader)))


def test_without_a_ledger_a_process_remembers_what_it_released(tmp_path: Path) -> None:
    model = mlp()
    step, loader = run(plan(sample_rate=0.5), model)
    batches = iter(loader)
    step(*next(batches))
    step.save(tmp_path / "run.pt")
    step(*next(batches))
    step.load(tmp_path / "run.pt")
    step._optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(PrivacyError, match="step 1 was released before"):
        step(*next(iter(loader)))
    step.renew_noise()
    released = step(*next(iter(loader)))
    assert (released.step, released.spent) == (2, 3)


def test_without_a_ledger_the_model_must_be_that_of_the_state() -> None:
    step, loader = run(plan(sample_rate=0.5))
    batches = iter(loader)
    step(*next(batches))
    state = step.state_dict()
    model = mlp()  # not what it was when the state was taken
    again, loader = run(plan(sample_rate=0.5), model)
    again.load_state_dict(state)
    batch = next(iter(loader))
    for _ in range(2):
        with pytest.raises(PrivacyError, match="not the one that this run's state was taken with"):
            again(*batch)
    model.load_state_dict(step._model.state_dict())
    again(*batch)
    assert again.number == 2


def test_a_state_with_parts_missing_is_refused() -> None:
    step, _ = run(plan())
    whole = step.state_dict()
    for name in ("plan", "key", "noise", "sampler"):
        with pytest.raises(PrivacyError, match="is not complete"):
            step.load_state_dict({k: v for k, v in whole.items() if k != name})
    step.load_state_dict({k: v for k, v in whole.items() if k != "parameters"})  # of before
