"""The certificate finds every planted error, in any precision, and raises no alarm on right answers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import pergrad
from pergrad.engine.checking.certificate import Certificate
from pergrad.engine.checking.reports import CertifyReport
from pergrad.errors import PergradError
from pergrad.factors import OuterProduct
from pergrad.quantities import Quantity
from pergrad.reductions import Directions
from pergrad.rules import RULES
from pergrad.runtime import internals
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import Formula, numbers, state_of
from tests.engine.wrong_rule import Scaled, doubled_rule, planted

SIZE, T, D, OUT, WORDS = 5, 6, 8, 3, 11


def loss(model: Callable[..., Any], *batch: Any) -> Tensor:
    return (model(*batch) + 0.5).pow(2).flatten(1).sum(1)


def quietly(model: nn.Module, *batch: Any, **options: Any) -> CertifyReport:
    return pergrad.certify(model, loss, *batch, quiet=True, **options)


def every_quantity() -> list[Quantity]:
    return [
        *(pergrad.Norms(), pergrad.Grads(), pergrad.Gram(), pergrad.Projection(16)),
        *(pergrad.ClippedSum(1.0), pergrad.ClippedSum({"0*": 1.0, "*": 0.5}, memory="high")),
        *(pergrad.SecondMoment(), pergrad.Variance(), pergrad.NoiseScale()),
        pergrad.Projection(16, method="two_sided"),
    ]


# -- right answers


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.2, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(D, OUT))


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Unflatten(1, (1, T)), nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()),
        *(nn.Dropout2d(0.3), nn.Conv2d(4, 4, 3, stride=2), nn.BatchNorm2d(4).eval(), nn.Flatten()),
    )


def tied() -> nn.Module:
    a, b = nn.Linear(D, D), nn.Linear(D, D)
    b.weight = a.weight
    return nn.Sequential(a, nn.Tanh(), nn.Dropout(), b)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, OUT))
    model[0].weight.requires_grad_(False)
    return model


def checkpointed(use_reentrant: bool) -> nn.Module:
    inner = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Dropout(), nn.Linear(D, D))

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.out(checkpoint(m.inner, m.first(x), use_reentrant=use_reentrant))

    return Formula(forward, first=nn.Linear(D, D), inner=inner, out=nn.Linear(D, OUT))


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "transformer": transformer,
    "convolutions": convolutions,
    "lstm": lambda: Formula(
        lambda m, x: m.a(x)[0], a=nn.LSTM(D, D, 2, batch_first=True, dropout=0.3)
    ),
    "tied": tied,
    "frozen": frozen,
    "checkpoint": lambda: checkpointed(False),
    "reentrant checkpoint": lambda: checkpointed(True),
    "spectral norm": lambda: spectral_norm(nn.Linear(D, OUT)),
    "weight norm": lambda: weight_norm(nn.Linear(D, OUT)),
    "unused": lambda: Formula(lambda m, x: m.a(x), a=nn.Linear(D, OUT), b=nn.Linear(D, OUT)),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_right_answers_raise_no_alarm_in_any_dtype(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = RIGHT[name]().to(dtype), numbers(SIZE, T, D).to(dtype)
    before, values = state_of(model), [t.clone() for t in (*model.parameters(), *model.buffers())]
    report = quietly(model, x)
    assert report.ok, str(report)
    assert report.notes == ()
    proved = {row.precision for row in report.rows}
    assert proved <= {"torch.float64"} if dtype == torch.float64 else proved <= {"torch.float32"}
    assert state_of(model) == before
    if name != "spectral norm":  # a step of its power iteration is part of the recorded run
        now = [*model.parameters(), *model.buffers()]
        assert all(torch.equal(a, b) for a, b in zip(now, values, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_right_answers_raise_no_alarm_under_autocast(name: str, dtype: torch.dtype) -> None:
    if name == "lstm" and dtype == torch.float16:
        pytest.skip("torch has no float16 LSTM under autocast on this device")
    torch.manual_seed(0)
    model, x = RIGHT[name](), numbers(SIZE, T, D).float()
    with torch.autocast("cpu", dtype):
        report = quietly(model, x)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    "options", [{}, {"loss_reduction": "mean"}, {"params": "2.*"}, {"offload": True}]
)
def test_every_quantity_is_checked_by_samples_with_any_option(options: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, OUT)).double()
    names = (
        ["2.weight", "2.bias"] if "params" in options else [n for n, _ in model.named_parameters()]
    )
    dots = pergrad.Dots({names[0]: torch.randn_like(dict(model.named_parameters())[names[0]])})
    report = quietly(model, numbers(SIZE, D), quantities=[*every_quantity(), dots], **options)
    assert report.ok, str(report)
    assert [row.name for row in report.rows] == names
    assert len(report.samples) == 2


def test_weights_of_samples_are_part_of_the_proof() -> None:
    model, weights = nn.Linear(D, OUT).double(), torch.rand(SIZE).double()
    assert quietly(model, numbers(SIZE, D), sample_weights=weights, quantities=every_quantity()).ok


def test_gradients_that_are_zero_but_for_rounding_are_no_error() -> None:
    def constant(m: Any, x: Tensor) -> Tensor:
        return m.a(x).softmax(-1).sum(-1)

    for dtype in DTYPES:
        model, x = Formula(constant, a=nn.Linear(D, OUT)).to(dtype), numbers(SIZE, D).to(dtype)
        report = pergrad.certify(model, lambda m, x: m(x), x, quiet=True)
        assert report.ok, f"{dtype}: {report}"


def test_a_quantity_that_reports_no_samples_costs_no_backward_for_them() -> None:
    report = quietly(
        nn.Linear(D, OUT).double(), numbers(SIZE, D), quantities=[pergrad.SecondMoment()]
    )
    assert report.ok
    assert report.samples == ()
    assert report.backwards == 1


def _casting(m: Any, x: Tensor) -> Tensor:
    """Computes some functions in float32, as models of transformers do."""
    h = m.a(x).float()
    return m.b((h - h.mean(-1, keepdim=True)).softmax(-1).to(x.dtype)) * m.scaled(x[:, :4])


@pytest.mark.parametrize("seed", range(5))
def test_a_float64_model_that_computes_in_float32_inside_is_no_error(seed: int) -> None:
    torch.manual_seed(seed)
    parts = {"a": nn.Linear(D, D), "b": nn.Linear(D, 3), "scaled": Scaled()}
    model, x = Formula(_casting, **parts).double(), numbers(SIZE, D)
    report = quietly(model, x)
    assert report.ok, str(report)
    with planted(0.01, 2):
        assert not quietly(model, x).ok


def _times_a_number(m: Any, x: Tensor) -> Tensor:
    """Multiplies by one number that is computed in float32, as differential transformers do."""
    scale = (m.a.weight * m.b.weight).sum(dtype=torch.float32).exp()
    return m.c(x) * scale.to(x.dtype)


@pytest.mark.parametrize("seed", range(40))
def test_a_number_in_float32_that_happens_to_round_alike_twice_is_no_error(seed: int) -> None:
    torch.manual_seed(seed)
    a, b = (nn.Linear(3, 1, bias=False) for _ in range(2))
    model = Formula(_times_a_number, a=a, b=b, c=nn.Linear(D, OUT)).double()
    report = quietly(model, numbers(SIZE, D), seed=seed)
    assert report.ok, str(report)


# -- wrong ones


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sample", [0, 100, 255])
def test_one_wrong_sample_of_256_is_found_in_any_dtype(sample: int, dtype: torch.dtype) -> None:
    torch.manual_seed(sample)
    model, x = Scaled(dtype), numbers(256, 4).to(dtype)
    assert quietly(model, x, quantities=[]).ok
    with planted(1.0, sample):
        report = quietly(model, x, quantities=[])
    assert {row.name: row.verdict for row in report.rows} == {
        "scale": "wrong",
        "map.weight": "ok",
        "map.bias": "ok",
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_wrong_sample_of_256_is_found_under_autocast(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Scaled(torch.float32), numbers(256, 4).float()
    with torch.autocast("cpu", dtype):
        assert quietly(model, x, quantities=[]).ok
        with planted(1.0, 17):
            assert not quietly(model, x, quantities=[]).ok


# The smallest errors that docs/howto/certify.md promises to find: of all samples, and of one of 256 whose
# gradient is of the usual size.
FOUND = {torch.float64: (3e-8, 1e-5), torch.float32: (3e-4, 0.1)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["all samples", "one sample"])
def test_an_error_of_the_promised_size_is_found(kind: str, dtype: torch.dtype) -> None:
    error = FOUND.get(dtype, FOUND[torch.float32])[kind == "one sample"]
    for seed in range(5):
        torch.manual_seed(seed)
        model, x = Scaled(dtype), numbers(256, 4).to(dtype)
        usual = pergrad.norms(model, loss, x).sort().indices[200]  # larger than most
        with planted(error, None if kind == "all samples" else int(usual)):
            assert not quietly(model, x, quantities=[], seed=seed).ok


# The same for an error of the path in half precision alone, which float32 cannot see, in 19 of 20 runs: (of
# all samples, of one of 8, of one of 256).
HALVES = [torch.bfloat16, torch.float16]
FOUND_IN_HALVES = {torch.bfloat16: (0.2, 0.75, 6.0), torch.float16: (0.05, 0.15, 1.0)}


@pytest.mark.parametrize("is_cast", [False, True], ids=["parameters", "autocast"])
@pytest.mark.parametrize("dtype", FOUND_IN_HALVES, ids=str)
@pytest.mark.parametrize("kind", ["all samples", "one of 8", "one of 256"])
def test_an_error_of_the_half_precision_path_alone_is_found(
    kind: str, dtype: torch.dtype, is_cast: bool
) -> None:
    kinds = ["all samples", "one of 8", "one of 256"]
    error, size = FOUND_IN_HALVES[dtype][kinds.index(kind)], 8 if kind == "one of 8" else 256
    found = 0
    for seed in range(6):
        torch.manual_seed(seed)
        own = torch.float32 if is_cast else dtype
        model, x = Scaled(own), numbers(size, 4).to(own)
        usual = pergrad.norms(model, loss, x).sort().indices[size * 200 // 256]
        sample = None if kind == "all samples" else int(usual)
        with torch.autocast("cpu", dtype, enabled=is_cast):
            assert quietly(model, x, quantities=[], seed=seed).ok
            with planted(error, sample, only_in=HALVES):
                report = quietly(model, x, quantities=[], seed=seed)
        wrong = {row.name for row in report.rows if row.verdict == "wrong"}
        assert wrong <= {"scale"}, f"seed {seed}: {report}"
        found += len(wrong)
    assert found >= 5


def test_a_wrong_drawn_sample_of_the_half_precision_path_is_found_by_its_norm() -> None:
    torch.manual_seed(0)
    model, x = Scaled(torch.float32), numbers(64, 4).float()
    for p in model.map.parameters():
        p.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16), planted(0.3, 5, only_in=HALVES):
        reports = [quietly(model, x, seed=seed) for seed in range(60)]
    assert any(5 in report.samples for report in reports)
    assert all(not r.ok for r in reports if 5 in r.samples)


def test_an_error_of_the_float32_path_alone_is_found() -> None:
    torch.manual_seed(0)
    model, x = Scaled(torch.float32), numbers(256, 4).float()
    with planted(0.01, only_in=[torch.float32]):
        assert not quietly(model, x, quantities=[]).ok


def _normalized_constant(m: Any, x: Tensor) -> Tensor:
    """Normalises rows of equal numbers: their deviations from the mean are rounding, times 1 / √ε."""
    return m.n(m.a(x).sum(-1, keepdim=True) + torch.zeros(D, dtype=x.dtype)) * m.b(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_terms_that_cancel_but_for_rounding_are_no_error(dtype: torch.dtype) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        parts = {"a": nn.Linear(D, D), "n": nn.LayerNorm(D), "b": nn.Linear(D, D)}
        model, x = Formula(_normalized_constant, **parts).to(dtype), numbers(SIZE, D).to(dtype)
        report = quietly(model, x, seed=seed)
        assert report.ok, f"seed {seed}: {report}"


def test_the_factor_that_explains_an_error_is_named() -> None:
    with doubled_rule():
        report = quietly(Scaled(), numbers(SIZE, 4))
    assert "scale: the gradients are off by a factor of 2" in report.problems
    assert "1 parameters wrong" in str(report)


class OffNorms(pergrad.Norms):
    """Norms of which one is off by a per cent."""

    wrong = 3

    def finish(self) -> Tensor:
        found = super().finish()
        found[self.wrong] *= 1.01
        return found


def test_wrong_reports_of_drawn_samples_are_found() -> None:
    model, x = nn.Linear(D, OUT).double(), numbers(SIZE, D)
    reports = [quietly(model, x, quantities=[OffNorms()], seed=seed) for seed in range(10)]
    assert {report.ok for report in reports} == {True, False}
    assert all(report.ok is (3 not in report.samples) for report in reports)
    assert all(
        "OffNorms of sample 3 is off by 1.0e-02" in r.problems[0] for r in reports if not r.ok
    )


def _made_out_of_sight(m: Any, x: Tensor) -> Tensor:
    """The parameters of `a` get no gradient by the engine: a tensor that it did not see made."""
    with internals.DisableTorchFunction():
        h = m.a(x)
    return m.b(h)


def _detached_mean(m: Any, x: Tensor) -> Tensor:
    h = m.b(m.a(x))
    return h - h.detach().mean(0)


class _Centre(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - g.mean(0)


WRONG: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "made out of sight": _made_out_of_sight,
    "a detached mean": _detached_mean,
    "a function that mixes": lambda m, x: m.b(_Centre.apply(m.a(x))),
    "a product over the batch": lambda m, x: torch.tensordot(
        torch.arange(25.0, dtype=x.dtype).view(5, 5), m.b(m.a(x)), 1
    ),
    "another order": lambda m, x: m.b(m.a(x))[torch.arange(len(x)).flip(0)],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_plain_autograd_sees_otherwise_is_refused_or_found(name: str) -> None:
    model = Formula(WRONG[name], a=nn.Linear(D, D), b=nn.Linear(D, OUT)).double()
    try:
        report = quietly(model, numbers(SIZE, D))
    except pergrad.PergradError:
        return
    assert not report.ok


# -- large matrices, which are compared in random directions first


def _large(x: Tensor, weight: Tensor) -> Tensor:
    if has_torch_function((x, weight)):
        return handle_torch_function(_large, (x, weight), x, weight)
    return F.linear(x, weight)


def large(dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    model = Formula(
        lambda m, x: _large(m.a(x).tanh(), m.b.weight), a=nn.Linear(64, 128), b=nn.Linear(128, 256)
    )
    return model.to(dtype), numbers(64, 64).to(dtype)


@contextmanager
def wrong_input(change: Callable[[Tensor], None]) -> Iterator[None]:
    """Within, the rule of `_large` takes other inputs than there were."""

    @pergrad.implements_per_sample_grads(_large)
    def rule(grad_output: Tensor, x: Tensor, weight: Tensor) -> dict[str, OuterProduct]:
        x = x.clone()
        change(x)
        return {"weight": OuterProduct(grad_output, x)}

    try:
        yield
    finally:
        del RULES[_large]


class _Calls:
    """Counts comparisons of all entries that followed a doubt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, own = 0, Certificate._whole

        def counted(*args: Any) -> Any:
            self.count += 1
            return own(*args)

        monkeypatch.setattr(Certificate, "_whole", counted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_directions_prove_large_matrices_without_another_run(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, seen, of = _Calls(monkeypatch), [], Directions.of_factor
    monkeypatch.setattr(Directions, "of_factor", lambda *a: seen.append(1) or of(*a))
    for seed in range(5):
        torch.manual_seed(seed)
        with wrong_input(lambda x: None):
            report = quietly(*large(dtype), seed=seed)
        assert report.ok, str(report)
    assert (whole.count, len(seen)) == (0, 5)


def _all(x: Tensor, error: float) -> None:
    x.mul_(1 + error)


def _one_sample(x: Tensor, error: float) -> None:
    x[5] *= 1 + error


def _one_entry(x: Tensor, error: float) -> None:
    x[5, 0, 7] += error * x.abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [_all, _one_sample, _one_entry])
def test_errors_of_large_matrices_are_found(
    kind: Callable[[Tensor, float], None], dtype: torch.dtype
) -> None:
    least = FOUND[dtype][kind is not _all]
    for seed in range(5):
        torch.manual_seed(seed)
        with wrong_input(lambda x: kind(x, least)):
            report = quietly(*large(dtype), quantities=[], seed=seed)
        assert [row.name for row in report.rows if row.verdict == "wrong"] == ["b.weight"]
    with wrong_input(lambda x: _all(x, 1.0)):
        report = quietly(*large(dtype))
    assert "b.weight: the gradients are off by a factor of 2" in report.problems


@pytest.mark.parametrize(("factor", "is_ok"), [(1.001, True), (3.0, False)])
def test_a_doubt_is_settled_by_all_entries_but_not_against_the_step_itself(
    factor: float, is_ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, of = _Calls(monkeypatch), Directions.of_factor

    def off(self: Directions, given: Any) -> Any:
        found: Any = of(self, given)
        return OuterProduct(found.grad_output * factor, found.input)

    monkeypatch.setattr(Directions, "of_factor", off)
    model, x = nn.Linear(128, 128), numbers(64, 128).float()
    assert quietly(model, x).ok is is_ok
    assert whole.count == 1


def test_quantities_that_report_sums_and_autocast_compare_all_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*args: Any) -> Any:
        raise AssertionError("in directions")

    monkeypatch.setattr(Directions, "of_factor", refused)
    model, x = nn.Linear(128, 128), numbers(64, 128).float()
    for quantity in (pergrad.Sum(), pergrad.ClippedSum(1.0), pergrad.SecondMoment()):
        assert quietly(model, x, quantities=[pergrad.Norms(), quantity]).ok
    with torch.autocast("cpu", torch.bfloat16):
        assert quietly(model, x).ok
    with pytest.raises(AssertionError, match="in directions"):
        quietly(model, x)


def test_two_backward_passes_in_directions_are_certified() -> None:
    model, x = nn.Linear(128, 128), numbers(64, 128).float()
    with pergrad.record(model, pergrad.Projection(4), certify=True):
        out = model(x)
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()


# -- what cannot be certified


def fixed_dtype(m: Any, x: Tensor) -> Tensor:
    return F.linear(m.a(x).to(torch.bfloat16), m.b.weight)


def own_autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.b(m.a(x))


@pytest.mark.parametrize(
    ("forward", "message"),
    [(fixed_dtype, "cannot be repeated in torch.float32"), (own_autocast, "although it was cast")],
)
def test_a_model_that_stays_in_half_precision_is_refused(forward: Any, message: str) -> None:
    model = Formula(forward, a=nn.Linear(D, D), b=nn.Linear(D, OUT)).bfloat16()
    with pytest.raises(pergrad.PergradError, match=message):
        quietly(model, numbers(SIZE, D).bfloat16())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_gradients_that_are_not_finite_prove_nothing() -> None:
    x = numbers(SIZE, D)
    x[1] = torch.inf
    with pytest.raises(pergrad.PergradError, match="not finite"):
        quietly(nn.Linear(D, OUT).double(), x)


def test_a_step_that_draws_otherwise_when_it_is_repeated_is_refused() -> None:
    calls: list[int] = []

    def drawn_by_count(m: Any, x: Tensor) -> Tensor:
        calls.append(1)
        return m.a(x) * (1 + len(calls))

    model = Formula(drawn_by_count, a=nn.Linear(D, OUT)).double()
    with pytest.raises(pergrad.PergradError, match="the losses differ from those"):
        quietly(model, numbers(SIZE, D))


class _Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-0.1, 0.1)


@pytest.mark.parametrize("way", ["function", "hook"])
def test_right_gradients_of_a_nonlinear_backward_are_refused_and_not_called_wrong(way: str) -> None:
    """The gradient of a weighted batch is no weighted sum there, so that it proves nothing."""
    x = numbers(SIZE, D)
    is_function = way == "function"
    model = Formula(
        lambda m, x: m.b(_Clamped.apply(m.a(x)) if is_function else m.a(x)),
        a=nn.Linear(D, D),
        b=nn.Linear(D, OUT),
    ).double()
    if not is_function:
        model.a.weight.register_hook(lambda g: g / g.norm())
    for name, rows in loop_grads(model, loss, x).items():
        assert_near(pergrad.grads(model, loss, x)[name], rows, name)
    with pytest.raises(pergrad.PergradError, match=r"'a\.weight'.* is not linear in the losses"):
        quietly(model, x)


def test_a_plain_step_that_cannot_be_repeated_is_refused() -> None:
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    m = Formula(
        lambda m, x: checkpoint(
            lambda t: m.b(m.a(t).exp()), x, use_reentrant=False, context_fn=contexts
        ),
        a=nn.Linear(D, D),
        b=nn.Linear(D, OUT),
    ).double()
    with pytest.raises(
        pergrad.PergradError, match="cannot be repeated, as its certificate needs: "
    ):
        quietly(m, numbers(SIZE, D))


class TiedInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.second.weight = self.first.weight
        return self.second(self.first(x).tanh())


def test_a_weight_that_the_forward_ties_to_another_is_certified() -> None:
    model, x = TiedInForward().double(), torch.randn(4, 3, dtype=torch.float64)
    report = pergrad.certify(model, lambda m, x: m(x).square().sum(1), x, quiet=True)
    assert report.ok
    assert {row.name: row.verdict for row in report.rows}["second.weight"] == "untouched"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_error_of_a_right_parameter_in_halves_is_that_of_the_proof(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    report = pergrad.certify(
        model, lambda m, x: m(x).square().sum(1), numbers(8, 6).to(dtype), quiet=True
    )
    assert report.ok
    assert all(row.error < 1e-5 for row in report.rows), report
    assert {row.precision for row in report.rows} <= {"torch.float32", "torch.float64"}


def test_outputs_without_the_dimension_of_the_samples_are_refused() -> None:
    model = Formula(lambda m, x: m.a(x).sum((0, 2)), a=nn.Linear(3, 2)).double()
    with (
        pytest.raises(
            PergradError, match=r"cannot find the 5 samples in an output of shape \(5,\)"
        ),
        pergrad.record(model, pergrad.Norms(), batch_first=False, certify=True),
    ):
        model(numbers(4, 5, 3)).sum().backward()
