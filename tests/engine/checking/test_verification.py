"""`pergrad.verify`: right models pass, wrong rules and mixed samples are found, nothing is changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BatchEncoding, GPT2Config, GPT2LMHeadModel

import pergrad
from pergrad.engine.checking.reports import VerifyReport
from tests.engine.exactness import Formula, numbers, state_of
from tests.engine.wrong_rule import Scaled, doubled_rule

SIZE, T, D, OUT, WORDS = 5, 6, 4, 3, 7


def loss(model: Callable[..., Any], *batch: Any) -> Tensor:
    return (model(*batch) + 0.5).pow(3).flatten(1).sum(1)


def quietly(model: nn.Module, loss_fn: Any, *batch: Any, **options: Any) -> VerifyReport:
    return pergrad.verify(model, loss_fn, *batch, quiet=True, **options)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.GELU(), nn.Linear(D, OUT)).double()


def words() -> Tensor:
    return torch.randint(WORDS, (SIZE, T))


def tokens() -> nn.Module:
    """An embedding whose weight is also the head's."""
    embedding, head = nn.Embedding(WORDS, D), nn.Linear(D, WORDS, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(D, D), head).double()


def centred(model: nn.Module, x: Tensor) -> Tensor:
    """Samples mixed out of sight of autograd."""
    h = model.part(x)
    return h - h.detach().mean(0)


# -- right models


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_right_model_is_ok_in_every_dtype(dtype: torch.dtype) -> None:
    model, x = network().to(dtype), numbers(SIZE, D).to(dtype)
    report = quietly(model, loss, x)
    assert report.ok
    assert {row.verdict for row in report.rows} == {"ok"}
    assert [row.name for row in report.rows] == [name for name, _ in model.named_parameters()]
    assert [row.shape for row in report.rows] == [tuple(p.shape) for p in model.parameters()]
    assert {row.how for row in report.rows} == {"rule"}


@pytest.mark.parametrize("reduce", [lambda t: t, Tensor.sum, Tensor.mean], ids=["B", "sum", "mean"])
def test_loss_may_be_a_sum_a_mean_or_one_for_each_sample(reduce: Callable[..., Tensor]) -> None:
    loss_reduction = "mean" if reduce is Tensor.mean else "sum"
    report = quietly(
        network(),
        lambda m, x: reduce(loss(m, x)),
        numbers(SIZE, D),
        loss_reduction=loss_reduction,
    )
    assert report.ok


def test_wrong_reduction_is_found() -> None:
    taken_for = {"loss_reduction": "sum"}
    report = quietly(network(), lambda m, x: loss(m, x).mean(), numbers(SIZE, D), **taken_for)
    assert not report.ok
    assert quietly(network(), lambda m, x: loss(m, x).mean(), numbers(SIZE, D)).ok


def test_tied_weights_have_one_row() -> None:
    report = quietly(tokens(), loss, words())
    assert report.ok
    assert [row.name for row in report.rows] == ["0.weight", "1.weight", "1.bias"]


@pytest.mark.parametrize("size", [3, T])
def test_gpt2_is_ok(size: int) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=T, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).double()
    batch = {"input_ids": torch.randint(11, (size, T)), "use_cache": False}

    def next_word(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        logits = model(**batch).logits[:, :-1].transpose(1, 2)
        return F.cross_entropy(logits, batch["input_ids"][:, 1:], reduction="none").sum(1)

    report = quietly(model, next_word, batch)
    assert report.ok, str(report)
    assert len(report.rows) == len(list(model.parameters()))
    assert report.notes  # dropout
    assert all(m.training for m in model.modules())


def test_samples_may_be_the_second_dimension() -> None:
    model = nn.GRU(D, OUT).double()
    report = quietly(
        model, lambda m, x: m(x)[0].pow(3).sum(), numbers(T, SIZE, D), batch_first=False
    )
    assert report.ok
    assert report.samples[-1] == SIZE - 1


def test_batch_may_be_a_structure() -> None:
    batch = {"x": numbers(SIZE, D), "more": [(torch.rand(SIZE), 2.0), None]}

    def weighted(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        weight, power = batch["more"][0]
        return weight * model(batch["x"]).abs().pow(power).sum(1)

    assert quietly(network(), weighted, batch).ok


@pytest.mark.parametrize("samples", [1, 2, 4, SIZE, 100])
def test_samples_run_alone_are_spread_over_the_batch(samples: int) -> None:
    report = quietly(network(), loss, numbers(SIZE, D), samples=samples)
    assert report.ok
    assert len(report.samples) == min(samples, SIZE)
    assert report.samples[0] == 0
    assert samples == 1 or report.samples[-1] == SIZE - 1


def test_batch_of_one_is_ok() -> None:
    report = quietly(network(), loss, numbers(1, D))
    assert report.ok
    assert report.samples == (0,)


def test_parameters_that_no_sample_touches_are_named() -> None:
    model = Formula(lambda m, x: m.used(x), used=network(), unused=nn.Linear(D, D))
    report = quietly(model, loss, numbers(SIZE, D))
    assert report.ok
    assert report.untouched == ("unused.weight", "unused.bias")


# -- what is wrong is found


def test_wrong_rule_is_found() -> None:
    model, x = Scaled(), numbers(SIZE, D)
    assert quietly(model, loss, x).ok
    with doubled_rule():
        report = quietly(model, loss, x)
    assert not report.ok
    assert {row.name: row.verdict for row in report.rows} == {
        "scale": "wrong",
        "map.weight": "ok",
        "map.bias": "ok",
    }
    assert next(row.error for row in report.rows if row.name == "scale") > 0.4
    assert "1 parameters wrong" in str(report)


def test_batch_may_be_what_a_tokenizer_gives() -> None:
    encoding = BatchEncoding({"input_ids": torch.arange(12).view(4, 3) % 7})
    model = Formula(
        lambda m, given: m.table(given["input_ids"]).sum((1, 2)), table=nn.Embedding(7, 2)
    ).double()
    assert pergrad.verify(model, lambda m, given: m(given), encoding, quiet=True).ok


def test_refusal_of_the_engine_is_a_problem_of_the_report() -> None:
    model = nn.Sequential(nn.Linear(D, OUT), nn.BatchNorm1d(OUT)).double()
    report = quietly(model, loss, numbers(SIZE, D))
    assert not report.ok
    assert report.rows == ()
    assert "BatchNorm in training mode" in report.problems[0]
    assert report.problems[0] in str(report)


# -- the report


def test_report_is_printed_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = network(), numbers(SIZE, D)
    report = pergrad.verify(model, loss, x)
    assert capsys.readouterr().out == f"{report}\n"
    quietly(model, loss, x)
    assert capsys.readouterr().out == ""


def test_table_has_a_header_a_row_per_parameter_and_the_verdict() -> None:
    report = quietly(network(), loss, numbers(SIZE, D))
    header, *rows, last = str(report).splitlines()
    assert header.split() == "parameter shape how error verdict".split()
    assert [line.split()[0] for line in rows] == [row.name for row in report.rows]
    assert last.startswith(f"all right: {len(rows)} parameters")


# -- nothing is changed


def test_dropout_is_noted_and_modes_and_random_state_are_left() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Dropout(), nn.Linear(D, OUT).eval()).double()
    modes = [m.training for m in model.modules()]
    x = numbers(SIZE, D)
    before = torch.get_rng_state()
    report = quietly(model, loss, x)
    assert torch.equal(torch.get_rng_state(), before)
    assert [m.training for m in model.modules()] == modes == [True] * 3 + [False]
    assert report.ok
    assert "eval mode" in report.notes[0]
    assert f"note: {report.notes[0]}" in str(report)


def test_model_without_random_numbers_is_checked_in_its_own_mode() -> None:
    seen: set[bool] = set()
    model = Formula(lambda m, x: (seen.add(m.training), m.part(x))[1], part=network())
    assert quietly(model, loss, numbers(SIZE, D)).notes == ()
    assert seen == {True}


def _raising(model: nn.Module, x: Tensor) -> Tensor:
    raise ZeroDivisionError


@pytest.mark.parametrize("name", ["right", "mixing", "words", "refused", "raising"])
def test_model_is_left_as_it_was(name: str) -> None:
    build: dict[str, Callable[[], nn.Module]] = {
        "right": network,
        "mixing": lambda: Formula(centred, part=network()),
        "words": tokens,
        "refused": lambda: nn.Sequential(network(), nn.Softmax(0)),
        "raising": lambda: Formula(_raising, part=network()),
    }
    model = build[name]()
    model.register_buffer("constant", torch.ones(SIZE))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = [str(part) for part in state_of(model)]
    values = [t.clone() for t in model.state_dict().values()]
    try:
        quietly(model, loss, words() if name == "words" else numbers(SIZE, D))
    except ZeroDivisionError:
        assert name == "raising"
    assert [str(part) for part in state_of(model)] == before
    torch.testing.assert_close(list(model.state_dict().values()), values, rtol=0, atol=0)


# -- what is not yet right


def attention(m: nn.Module, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x))


def _float_attention() -> tuple[Any, ...]:
    parts = {name: nn.Linear(D, D) for name in "qkv"}
    return Formula(attention, **parts), loss, torch.randn(SIZE, T, D)


def _float_instance_norm() -> tuple[Any, ...]:
    model = nn.Sequential(nn.Conv1d(2, OUT, 3), nn.InstanceNorm1d(OUT))
    return model, loss, torch.randn(SIZE, 2, 9)


def _positions() -> tuple[Any, ...]:
    parts = {"word": nn.Embedding(WORDS, D), "place": nn.Embedding(SIZE, D)}
    model = Formula(lambda m, i: m.word(i) + m.place(torch.arange(i.shape[1])), **parts)
    return model.double(), loss, torch.randint(WORDS, (SIZE, SIZE))


def _probabilities() -> tuple[Any, ...]:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy(model(x), y, reduction="sum")

    model = nn.Sequential(nn.Linear(D, 1), nn.Sigmoid()).double()
    return model, step, numbers(SIZE, D), torch.rand(SIZE, 1).double()


def _labels_of_second_dimension() -> tuple[Any, ...]:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x)[1][0], y, reduction="none")

    batch = numbers(T, SIZE, D), torch.randint(OUT, (SIZE,))
    return nn.GRU(D, OUT).double(), step, *batch


FALSE_ALARMS: dict[str, tuple[Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "a key's bias, whose gradient is rounding error": (_float_attention, {}),
    "a bias before instance norm": (_float_instance_norm, {}),
    "as many positions as samples": (_positions, {}),
    "a loss that refuses NaN": (_probabilities, {}),
    "labels (B,) of samples in the second dimension": (
        _labels_of_second_dimension,
        {"batch_first": False},
    ),
}


@pytest.mark.parametrize("name", FALSE_ALARMS)
def test_right_model_raises_no_alarm(name: str) -> None:
    torch.manual_seed(0)
    build, options = FALSE_ALARMS[name]
    report = quietly(*build(), **options)
    assert report.ok, str(report)


def test_gradient_of_the_input_is_untouched() -> None:
    x = numbers(SIZE, D).requires_grad_()
    quietly(network(), loss, x)
    assert x.grad is None


# -- reasons, and no false alarms


def test_a_mean_taken_for_a_sum_is_named() -> None:
    taken_for = {"loss_reduction": "sum"}
    report = quietly(network(), lambda m, x: loss(m, x).mean(), numbers(SIZE, D), **taken_for)
    (problem,) = report.problems
    assert "and 3 others: off by 1/5, exactly one by the batch size: is the loss a mean?" in problem


def test_the_factor_of_a_wrong_rule_is_named() -> None:
    with doubled_rule():
        report = quietly(Scaled(), loss, numbers(SIZE, D))
    assert report.problems == ("scale: off by a factor of 2",)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_that_are_zero_but_for_rounding_are_no_error(dtype: torch.dtype) -> None:
    model = Formula(lambda m, x: m.part(x).softmax(-1).sum(-1), part=nn.Linear(D, OUT)).to(dtype)
    for _ in range(5):
        report = quietly(model, lambda m, x: m(x), numbers(SIZE, D).to(dtype))
        assert report.ok, str(report)


def test_batch_norm_of_one_sample_with_transposed_gradients_is_no_error() -> None:
    """Torch's own backward of it is wrong for a sample alone."""

    def rows_first(m: Any, x: Tensor) -> Tensor:  # (n, c, h, w) -> (h, n, w * c) -> (n, h, out)
        return m.out(m.norm(m.conv(x)).permute(2, 0, 3, 1).flatten(2)).transpose(0, 1)

    model = Formula(
        rows_first, conv=nn.Conv2d(1, OUT, 1), norm=nn.BatchNorm2d(OUT), out=nn.Linear(5 * OUT, OUT)
    )
    report = quietly(model.double().eval(), loss, numbers(SIZE, 1, 4, 5))
    assert report.ok, str(report)


@pytest.mark.parametrize("kind", [AssertionError, pergrad.PergradError, ValueError])
def test_a_problem_has_a_reason_even_if_the_error_has_no_message(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise kind

    monkeypatch.setattr("pergrad.engine.looping.fallback.run_recorded", fail)
    report = quietly(network(), loss, numbers(SIZE, D))
    assert report.problems == (f"{kind.__name__}, without a message",)


def test_an_error_of_the_model_itself_is_raised() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        quietly(network(), loss, numbers(SIZE, D + 1))


def test_a_model_without_parameters_to_verify_is_not_right() -> None:
    model = nn.Linear(2, 1).requires_grad_(False)
    report = pergrad.verify(model, lambda m, x: m(x).sum(1), torch.ones(3, 2), quiet=True)
    assert not report.ok
    assert report.problems == ("the model has no parameter that requires grad",)
    assert report.rows == ()
