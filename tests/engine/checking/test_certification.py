"""`certify`, and certify=True: right steps pass with the same results, wrong and unprovable ones raise."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

import pergrad
from pergrad.errors import PergradError
from pergrad.testing import loop_grads
from tests.engine.exactness import Formula, assert_all_near, numbers, state_of, total
from tests.engine.wrong_rule import Scaled, doubled_rule, planted

SIZE, T, D, OUT = 5, 6, 4, 3
Step = Callable[..., Tensor]


def loss(model: Callable[..., Any], *batch: Any) -> Tensor:
    return (model(*batch) + 0.5).pow(3).flatten(1).sum(1)


def linear() -> nn.Module:
    return nn.Linear(D, OUT).double()


# -- certify


def test_the_table_has_a_row_per_parameter_the_verdict_and_the_cost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = pergrad.certify(linear(), loss, numbers(SIZE, D))
    assert capsys.readouterr().out == f"{report}\n"
    header, weight, bias, verdict = str(report).splitlines()
    assert header.split()[0] == "parameter"
    assert weight.split()[0] == "weight"
    assert weight.endswith("ok")
    assert bias.split()[0] == "bias"
    assert verdict.startswith("certified: 2 parameters, 5 samples; 6 forward and 3 backward passes")
    assert report.seconds > 0


def test_rounds_of_exchanges_grow_as_the_logarithm_of_the_batch() -> None:
    model = linear()
    forwards = [pergrad.certify(model, loss, numbers(n, D), quiet=True).forwards for n in (64, 256)]
    assert forwards == [2 + 8, 2 + 11]


def test_a_seed_repeats_the_draws() -> None:
    model, x = linear(), numbers(SIZE, D)
    first, second = (pergrad.certify(model, loss, x, seed=3, quiet=True) for _ in range(2))
    assert first.samples == second.samples
    assert [row.error for row in first.rows] == [row.error for row in second.rows]


def test_certify_leaves_model_gradients_and_random_state_as_they_were() -> None:
    model, x = nn.Sequential(linear(), nn.Dropout()), numbers(SIZE, D)
    model[0].weight.grad = kept = torch.ones_like(model[0].weight)
    before, state = state_of(model)[1:], torch.get_rng_state()
    pergrad.grads(model, loss, x)
    plain = torch.get_rng_state()
    torch.set_rng_state(state)
    pergrad.certify(model, loss, x, quiet=True)
    assert torch.equal(torch.get_rng_state(), plain)
    assert state_of(model)[1:] == before
    assert model[0].weight.grad is kept


def test_a_gpt2_with_dropout_is_certified_in_training_mode() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=T, bos_token_id=0, eos_token_id=0
    )
    model, ids = GPT2LMHeadModel(config).train(), torch.randint(11, (SIZE, T))

    def next_word(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].transpose(1, 2)
        return F.cross_entropy(logits, ids[:, 1:], reduction="none").sum(1)

    report = pergrad.certify(model, next_word, ids, quiet=True)
    assert report.ok, str(report)
    assert report.notes == ()
    assert all(m.training for m in model.modules())


def test_samples_may_be_the_second_dimension() -> None:
    def last(model: Any, x: Tensor) -> Tensor:
        return model(x)[0].pow(3).sum((0, 2))

    model = nn.GRU(D, OUT).double()
    report = pergrad.certify(model, last, numbers(T, SIZE, D), batch_first=False, quiet=True)
    assert report.ok, str(report)
    assert report.batch_size == SIZE


@pytest.mark.parametrize("certify", [pergrad.certify, pergrad.grads, pergrad.norms])
def test_a_scalar_loss_is_refused_with_the_next_step(certify: Any) -> None:
    options = {"quiet": True} if certify is pergrad.certify else {"certify": True}
    with pytest.raises(PergradError, match=r"returns a scalar.*reduction='none'"):
        certify(linear(), lambda m, x: loss(m, x).sum(), numbers(SIZE, D), **options)


def test_losses_of_another_number_than_the_batch_are_refused() -> None:
    def frames(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).flatten(0, 1).sum(1)

    with pytest.raises(PergradError):
        pergrad.certify(linear(), frames, numbers(SIZE, 2, D), quiet=True)


# -- grads and norms


def test_certified_calls_return_what_they_return_without() -> None:
    model, x = nn.Sequential(linear(), nn.Tanh()), numbers(SIZE, D)
    assert_all_near(
        pergrad.grads(model, loss, x, certify=True), loop_grads(model, lambda *a: loss(*a).sum(), x)
    )
    assert torch.equal(pergrad.norms(model, loss, x, certify=True), pergrad.norms(model, loss, x))


@pytest.mark.parametrize("call", [pergrad.grads, pergrad.norms])
def test_certified_calls_raise_with_the_table_where_a_rule_is_wrong(call: Any) -> None:
    with doubled_rule(), pytest.raises(PergradError, match=r"scale .* wrong"):
        call(Scaled(), loss, numbers(SIZE, D), certify=True)


# -- record


def recorded(model: nn.Module, step: Step, *batch: Any, **options: Any) -> pergrad.Norms:
    with pergrad.record(model, pergrad.Norms(), certify=True, **options) as norms:
        step(model, *batch).backward()
    return norms


def step(model: Callable[..., Any], *batch: Any) -> Tensor:
    return total(model(*batch))


def _checkpointed(use_reentrant: bool) -> nn.Module:
    return Formula(
        lambda m, x: m.b(checkpoint(m.a, m.first(x), use_reentrant=use_reentrant)),
        first=nn.Linear(D, D),
        a=nn.Sequential(nn.Linear(D, D), nn.Dropout()),
        b=nn.Linear(D, OUT),
    ).double()


def _twice(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(x)) + total(model(2 * x))


def _recurrent(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(model(x).tanh()))


def _autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x.float())
    return output.float().pow(2).sum()


def _heads() -> nn.Module:
    parts = {"body": nn.Linear(D, OUT), "head": nn.Linear(OUT, 2)}
    return Formula(lambda m, x: {"h": (h := m.body(x)), "y": m.head(h)}, **parts).double()


RIGHT: dict[str, tuple[Callable[[], nn.Module], Step, tuple[int, ...], dict[str, Any]]] = {
    "linear": (linear, step, (SIZE, D), {}),
    "one sample": (linear, step, (1, D), {}),
    "a mean": (
        linear,
        lambda m, x: m(x).pow(2).sum(1).mean(),
        (SIZE, D),
        {"loss_reduction": "mean"},
    ),
    "dropout": (lambda: nn.Sequential(linear(), nn.Dropout()), step, (SIZE, D), {}),
    "checkpoint": (lambda: _checkpointed(False), step, (SIZE, D), {}),
    "reentrant checkpoint": (lambda: _checkpointed(True), step, (SIZE, D), {}),
    "two outputs": (_heads, step, (SIZE, D), {}),
    "two calls": (linear, _twice, (SIZE, D), {}),
    "one call on another": (lambda: nn.Linear(D, D).double(), _recurrent, (SIZE, D), {}),
    "autocast": (lambda: nn.Sequential(nn.Linear(D, 8), nn.Dropout()), _autocast, (SIZE, D), {}),
    "samples second": (lambda: nn.GRU(D, OUT).double(), step, (T, SIZE, D), {"batch_first": False}),
    "spectral norm in training": (lambda: spectral_norm(linear()), step, (SIZE, D), {}),
    "sample weights": (linear, step, (SIZE, D), {"sample_weights": torch.rand(SIZE)}),
    "some parameters": (linear, step, (SIZE, D), {"params": "weight"}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_passes_and_leaves_nothing(name: str) -> None:
    torch.manual_seed(0)
    build, run, shape, options = RIGHT[name]
    model, x = build(), numbers(*shape)
    before = state_of(model)
    assert recorded(model, run, x, **options).result.any()
    assert state_of(model) == before


@pytest.mark.parametrize("name", ["dropout", "spectral norm in training"])
def test_random_state_and_buffers_are_what_the_step_alone_leaves(name: str) -> None:
    torch.manual_seed(0)
    build, run, shape, _ = RIGHT[name]
    model, x = build(), numbers(*shape)
    buffers = [b.clone() for b in model.buffers()]
    state, left = torch.get_rng_state(), []
    for certify in (False, True):
        torch.set_rng_state(state)
        for b, value in zip(model.buffers(), buffers, strict=True):
            b.copy_(value)
        with pergrad.record(model, pergrad.Norms(), certify=certify):
            run(model, x).backward()
        left.append([torch.get_rng_state(), *(b.clone() for b in model.buffers())])
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_one_wrong_sample_of_256_raises(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Scaled(dtype), numbers(256, D).to(dtype)
    recorded(model, step, x)
    with planted(1.0, 30), pytest.raises(PergradError, match=r"scale .* wrong"):
        recorded(model, step, x)


def test_a_wrong_rule_is_found_in_each_of_two_calls() -> None:
    with doubled_rule(), pytest.raises(PergradError, match="factor of 2"):
        recorded(Scaled(), _twice, numbers(SIZE, D))


def _outside(model: Any, x: Tensor) -> Tensor:
    return F.linear(model(x), model.weight.T).pow(2).sum()


def _mean_outside_of_sight() -> nn.Module:
    return Formula(lambda m, x: ((h := m.map(x)) - h.detach().mean(0)) ** 2, map=linear())


# What the step is, on which model, and what the error must say.
REFUSED: dict[str, tuple[Callable[[], nn.Module], Step, str]] = {
    "a scalar": (
        lambda: Formula(lambda m, x: m.map(x).pow(3).sum(), map=linear()),
        lambda m, x: m(x),
        "the module returns a scalar",
    ),
    "no samples in the output": (
        lambda: Formula(lambda m, x: m.map(x).flatten(), map=linear()),
        step,
        r"cannot find the 5 samples in an output of shape \(15,\)",
    ),
    "parameters outside": (linear, _outside, "'weight' is used outside of the module"),
    "mixed samples": (_mean_outside_of_sight, step, "mixes samples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_or_proves_nothing_raises_and_leaves_nothing(name: str) -> None:
    build, run, message = REFUSED[name]
    model = build()
    before = state_of(model)
    with pytest.raises(PergradError, match=message):
        recorded(model, run, numbers(SIZE, D).clone())
    assert state_of(model) == before


def test_the_error_of_the_caller_is_not_replaced() -> None:
    model = linear()
    before = state_of(model)
    with pytest.raises(ZeroDivisionError), pergrad.record(model, pergrad.Norms(), certify=True):
        _ = 1 / 0
    assert state_of(model) == before


def test_verify_and_certify_together_are_refused() -> None:
    with pytest.raises(PergradError, match="pass only certify=True"):
        recorded(linear(), step, numbers(SIZE, D), verify=True)


def test_inputs_that_were_changed_after_the_call_are_refused() -> None:
    x = numbers(SIZE, D)

    def changed(m: nn.Module, x: Tensor) -> Tensor:
        out = m(x)  # of a copy, so that the graph does not mind
        x.add_(1)
        return total(out)

    with pytest.raises(PergradError, match="changed in place"):
        recorded(Formula(lambda m, x: m.map(x.clone()), map=linear()), changed, x)
