"""What is refused although its samples do not meet is computed sample by sample, with one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.engine.looping.fallback import Runner
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.recording import is_recording
from pergrad.errors import FallbackWarning, MixedSamplesError, PergradError, ScopeError
from pergrad.quantities import Grads
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import Formula, assert_all_near, numbers, state_of
from tests.engine.looping.refused import OUT, SIZE, D, Net, batch, loss, refused


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


@contextmanager
def falling_back() -> Iterator[None]:
    """Expects exactly one warning, that a loop was taken."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        yield
    assert [w.category for w in caught] == [FallbackWarning]


def test_refused_without_it_and_exact_with_it() -> None:
    model, (x, y) = refused(Net()), batch()
    with pytest.raises(PergradError, match="backward hook"):
        pergrad.grads(model, loss, x, y)
    with falling_back():
        found = pergrad.grads(model, loss, x, y, fallback="loop")
    assert_all_near(found, loop_grads(model, loss, x, y))


def test_the_warning_says_why_and_what_it_cost_where_it_was_called() -> None:
    model, (x, y) = refused(Net()), batch()
    with pytest.warns(FallbackWarning) as caught:
        pergrad.norms(model, loss, x, y, fallback="loop")
    (warning,) = caught
    message = str(warning.message)
    assert f"{SIZE} backward passes" in message
    assert "times as long as one plain step" in message
    assert "a backward hook of Linear changes gradients" in message
    assert warning.filename == __file__


def test_nothing_is_looped_that_can_be_recorded() -> None:
    model, (x, y) = Net(), batch()
    found = pergrad.grads(model, loss, x, y, fallback="loop")  # a warning would be an error
    assert_all_near(found, loop_grads(model, loss, x, y))


@pytest.mark.parametrize("certify", [False, True])
def test_compiled_steps_warn_once_and_do_not_record_again(certify: bool) -> None:
    plain, (x, y) = Net(), batch()
    model, grads = refused(plain), pergrad.Grads()
    calls = 0

    def counted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return loss(model, x, y)

    step = pergrad.compiled(
        model, counted, grads, backend="eager", fallback="loop", certify=certify
    )
    with falling_back():
        for _ in range(3):
            calls = 0
            losses = step(x, y)
            assert_near(losses, loss(plain, x, y).detach(), "losses")
            assert_all_near(grads.result, loop_grads(plain, loss, x, y))
    assert step.graphs == 0
    assert calls == SIZE + 1  # the batch once, to compare with


def test_a_batch_that_mixes_after_all_is_refused_by_a_compiled_step() -> None:
    model, (x, y) = refused(Net()), batch()
    is_mixing = False

    def maybe(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return loss(model, x - x.mean(0) if is_mixing else x, y)

    step = pergrad.compiled(model, maybe, pergrad.Norms(), backend="eager", fallback="loop")
    with falling_back():
        step(x, y)
    is_mixing = True
    with pytest.raises(PergradError):
        step(x, y)


def test_certify_and_verify_check_the_loop() -> None:
    model, (x, y) = refused(Net(0.5)), batch()
    with falling_back():
        certified = pergrad.certify(model, loss, x, y, quiet=True, fallback="loop")
    assert certified.ok
    assert {row.how for row in certified.rows} == {"loop"}
    with falling_back():
        assert pergrad.verify(model, loss, x, y, quiet=True, fallback="loop").ok


def test_a_loop_in_half_precision_is_proved_in_a_wider_one() -> None:
    model, (x, y) = refused(Net().bfloat16()), batch()
    with falling_back():
        report = pergrad.certify(model, loss, x.bfloat16(), y, quiet=True, fallback="loop")
    assert report.ok
    assert {row.precision for row in report.rows} == {"torch.float32"}


MIXING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "batch norm": lambda m, x: m.a(m.norm(x)),
    "mean": lambda m, x: m.a(x - x.mean(0)),
    "weak": lambda m, x: m.a(x + 1e-6 * x.mean(0)),
    "gradients alone": lambda m, x: m.a(x) + (m.a(x).mean(0) - m.a(x).mean(0).detach()),
    "shifted": lambda m, x: m.a(x.roll(1, 0)),
}


@pytest.mark.parametrize(
    ("name", "dropout"),
    [(name, False) for name in MIXING]
    + [(name, True) for name in MIXING if name != "gradients alone"],  # which no forward shows
)
def test_the_refusal_stands_where_samples_meet(name: str, dropout: bool) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.dropout(MIXING[name](m, x))

    parts = {"norm": nn.BatchNorm1d(D), "dropout": nn.Dropout(0.5 if dropout else 0.0)}
    model = refused(Formula(forward, a=nn.Linear(D, OUT), **parts).double())
    x, y = batch()
    before, seed = state_of(model), torch.get_rng_state()
    with pytest.raises(PergradError) as caught:
        pergrad.grads(model, loss, x, y, fallback="loop")
    (note,) = caught.value.__notes__
    assert note.startswith('fallback="loop" does not help')
    assert state_of(model) == before
    assert torch.equal(torch.get_rng_state(), seed)


def test_errors_of_the_model_itself_are_raised_as_they_are() -> None:
    def broken(model: nn.Module, x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pergrad.grads(Net(), broken, batch()[0], fallback="loop")


def test_out_of_memory_is_no_reason_to_loop() -> None:
    def full(model: nn.Module, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        pergrad.grads(Net(), full, batch()[0], fallback="loop")
    assert not hasattr(caught.value, "__notes__")


def test_within_a_recording_nothing_is_looped() -> None:
    model, (x, y) = Net(), batch()
    with pergrad.record(model, pergrad.Norms()):
        with pytest.raises(ScopeError, match="nested"):
            pergrad.grads(model, loss, x, y, fallback="loop")
        loss(model, x, y).sum().backward()


def test_inputs_that_the_model_changes_are_no_inputs_of_a_second_run() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x[0, 0] += 1
        return m.a(x).mean(0) + m.a(x)

    model, (x, y) = Formula(forward, a=nn.Linear(D, OUT)).double(), batch()
    with pytest.raises(PergradError) as caught:
        pergrad.grads(model, loss, x.detach(), y, fallback="loop")
    assert "in place" in caught.value.__notes__[0]


def test_only_known_fallbacks_are_taken() -> None:
    with pytest.raises(PergradError, match="fallback must be None or 'loop', got 'vmap'"):
        pergrad.grads(Net(), loss, *batch(), fallback="vmap")  # type: ignore[arg-type]


def test_a_runner_says_why_it_looped_and_keeps_silent_if_asked() -> None:
    runner, (x, y), grads = Runner("loop", warns=False), batch(), Grads()
    runner.run(refused(Net()), loss, (x, y), [grads], Options())
    assert runner.why is not None
    assert "UnsupportedFunctionError" in runner.why
    runner.run(Net(), loss, (x, y), [grads], Options())
    assert runner.why is None


def test_mixed_samples_are_named_as_before() -> None:
    model = nn.Sequential(nn.Linear(D, OUT), nn.BatchNorm1d(OUT)).double()
    with pytest.raises(MixedSamplesError, match="BatchNorm in training mode"):
        pergrad.grads(model, loss, *batch(), fallback="loop")


def test_crashes_of_functions_that_no_recording_can_run_are_looped() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        if is_recording():
            raise TypeError("not under a mode")
        return m.a(x)

    model, (x, y) = Formula(forward, a=nn.Linear(D, OUT)).double(), batch()
    with falling_back():
        found = pergrad.grads(model, loss, x, y, fallback="loop")
    assert_all_near(found, loop_grads(model, loss, x, y))


def test_lists_of_samples_are_run_one_by_one() -> None:
    def forward(m: Any, images: list[Tensor]) -> Tensor:
        return torch.stack([m.a(image).mean(0) for image in images])

    model = refused(Formula(forward, a=nn.Linear(D, OUT)).double())
    images = [numbers(k + 1, D).requires_grad_() for k in range(SIZE)]

    def of_images(model: nn.Module, images: list[Tensor]) -> Tensor:
        return model(images).pow(2).sum(1)

    with falling_back():
        found = pergrad.grads(model, of_images, images, fallback="loop", batch_size=SIZE)
    for n, image in enumerate(images):
        expected = torch.autograd.grad(of_images(model, [image]).sum(), list(model.parameters()))
        for name, g in zip(found, expected, strict=True):
            assert_near(found[name][n], g, name)
