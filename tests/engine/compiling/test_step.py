"""Compiled steps give what recorded ones give, and know when to be compiled anew, or not at all."""

import warnings
import weakref
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pergrad
from pergrad.quantities import Batch
from pergrad.reductions import SampleGradients
from pergrad.runtime import internals
from pergrad.testing import assert_near


class Tied(nn.Module):
    """A tied embedding, a convolution, a norm, dropout and a buffer that counts calls."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.mix = nn.Conv1d(6, 6, 3, padding=1)
        self.norm = nn.LayerNorm(6)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, words: Tensor) -> Tensor:
        self.calls += 1
        h = self.mix(self.table(words).mT).mT
        return F.linear(self.drop(self.norm(h.tanh())), self.table.weight)


def losses(model: nn.Module, words: Tensor, labels: Tensor) -> Tensor:
    logits = model(words)
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return each.view(len(words), -1).sum(1)


def batch(samples: int = 3, length: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randint(11, (samples, length)), torch.randint(11, (samples, length))


def every_quantity(model: nn.Module) -> list[pergrad.Quantity]:
    direction = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    return [
        pergrad.Grads(),
        pergrad.Norms(),
        pergrad.ClippedSum(0.5),
        pergrad.ClippedSum({"table.*": 0.3, "*": 0.2}, weighting="normalize"),
        pergrad.SecondMoment(),
        pergrad.Variance(),
        pergrad.Dots(direction),
        pergrad.Gram(),
        pergrad.Projection(16),
        pergrad.NoiseScale(),
    ]


def flat(result: object) -> Tensor:
    if isinstance(result, dict):
        return torch.cat([t.flatten() for t in result.values()])
    return torch.as_tensor(result, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module", params=["inductor", "eager"])
def backend(request) -> str:
    """What runs a traced step."""
    return request.param


@pytest.fixture(scope="module")
def trained(backend: str) -> tuple[pergrad.engine.CompiledStep, Tied, list[pergrad.Quantity]]:
    """One step with all quantities, compiled once for all tests that only look at it."""
    torch.manual_seed(0)
    model = Tied().double()
    quantities = every_quantity(model)
    step = pergrad.compiled(model, losses, *quantities, backend=backend)
    words = batch()
    step(*words)
    step(*words)
    assert step.graphs == 1
    return step, model, quantities


def test_every_quantity_is_that_of_a_recorded_step(trained) -> None:
    step, model, quantities = trained
    words, labels = batch()
    loss = step(words, labels)
    expected = every_quantity(model)
    with pergrad.record(model, *expected):
        own = losses(model, words, labels)
        own.sum().backward()
    assert_near(loss, own.detach(), "loss")
    for found, wanted in zip(quantities, expected, strict=True):
        assert_near(flat(found.result), flat(wanted.result), type(found).__name__)
    assert step.graphs == 1


class Grouped(nn.Module):
    """Group norms of images, of rows of which a sample has two, and of vectors; means far from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.of_images, self.of_rows, self.of_vectors = (nn.GroupNorm(k, 4) for k in (2, 4, 1))

    def forward(self, x: Tensor) -> Tensor:  # (n, 4, 4, 4)
        h = self.of_images(x).tanh() + 3
        halves = h.flatten(2).unflatten(2, (2, 8)).movedim(2, 1).flatten(0, 1)  # (2 n, 4, 8)
        h = self.of_rows(halves).tanh() + 3
        return self.of_vectors(h.mean(2).view(len(x), 2, 4).sum(1))


def test_gradients_of_group_norms_are_those_of_a_recorded_step(backend: str) -> None:
    model = Grouped().double()
    for p in model.parameters():
        nn.init.normal_(p)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum(1)

    grads, expected = pergrad.Grads(), pergrad.Grads()
    step = pergrad.compiled(model, loss, grads, backend=backend)
    for _ in range(2):
        step(torch.randn(4, 4, 4, 4).double())
    assert step.graphs == 1
    x = 2 * torch.randn(4, 4, 4, 4).double() + 7
    step(x)
    with pergrad.record(model, expected):
        loss(model, x).sum().backward()
    for name, wanted in expected.result.items():
        assert_near(grads.result[name], wanted, name)


class Pair(NamedTuple):
    norms: Tensor
    kinds: OrderedDict[str, tuple[Tensor, str]]


class Nested(pergrad.Quantity):
    """Holds its results within other things than a dict."""

    def begin(self, batch: Batch) -> None:
        self.found: dict[str, Pair] = {}

    def consume(self, name: str, gradients: SampleGradients) -> None:
        squares = gradients.squared_norms()
        self.found[name] = Pair(squares.sqrt(), OrderedDict(square=(squares, name)))

    def end(self) -> None:
        pass


def test_a_quantity_may_hold_its_results_in_any_container(backend: str) -> None:
    model, nested = nn.Linear(3, 2), Nested()
    step = pergrad.compiled(
        model, lambda model, x: model(x).square().sum(1), nested, backend=backend
    )
    for _ in range(2):
        step(torch.randn(4, 3))
    assert step.graphs == 1
    step(torch.zeros(4, 3))
    assert list(nested.found) == ["weight", "bias"]
    norms, kinds = nested.found["bias"]
    assert isinstance(nested.found["bias"], Pair)
    assert_near(norms, (2 * model.bias.double()).norm().expand(4))
    square, name = kinds["square"]
    assert name == "bias"
    assert_near(square, norms.square())
    assert not nested.found["weight"].norms.any()


def test_weights_may_change_between_calls(trained) -> None:
    step, model, quantities = trained
    words, labels = batch()
    step(words, labels)
    before = quantities[1].result
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    quantities[2].assign()
    optimizer.step()
    step(words, labels)
    assert not torch.allclose(quantities[1].result, before)
    assert_near(quantities[1].result, pergrad.norms(model, losses, words, labels))
    other = Tied().double()
    model.load_state_dict(other.state_dict())
    step(words, labels)
    assert_near(quantities[1].result, pergrad.norms(other, losses, words, labels))
    assert step.graphs == 1


def test_buffers_are_updated(trained) -> None:
    step, model, _ = trained
    words, labels = batch()
    before = float(model.calls)
    step(words, labels)
    assert float(model.calls) == before + 1


def test_running_noise_scale_goes_on_from_call_to_call(trained) -> None:
    step, model, quantities = trained
    noise, alone = quantities[-1], pergrad.NoiseScale()
    alone._averages = noise._averages
    words, labels = batch()
    step(words, labels)
    with pergrad.record(model, alone):
        losses(model, words, labels).sum().backward()
    assert noise.running == pytest.approx(alone.running)


class Wide(nn.Module):
    """Gradients of one position, of several and of a table, each of a megabyte and more."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(700, 80)
        self.each, self.last = nn.Linear(80, 800), nn.Linear(800, 300)

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.each(self.table(words)).tanh().mean(1))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_large_results_are_those_of_single_samples_and_stay_as_they_are(
    reduction: str, backend: str
) -> None:
    model = Wide().double()

    def loss(model: nn.Module, words: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(words), labels, reduction=reduction)

    def alone(words: Tensor, labels: Tensor) -> Tensor:
        losses = [loss(model, words[n : n + 1], labels[n : n + 1]) for n in range(len(words))]
        each = [torch.autograd.grad(value, list(model.parameters())) for value in losses]
        return torch.cat([torch.stack(parts).flatten() for parts in zip(*each, strict=True)])

    batches = [(torch.randint(700, (4, 6)), torch.randint(300, (4,))) for _ in range(5)]
    grads = pergrad.Grads()
    step = pergrad.compiled(model, loss, grads, loss_reduction=reduction, backend=backend)
    found = []
    for words in batches:
        step(*words)
        found.append(grads.result)  # held, so that no later step may write there
    assert step.graphs == 1
    for words, result in zip(batches, found, strict=True):
        torch.testing.assert_close(flat(result), alone(*words))


def test_samples_that_are_not_finite_add_nothing_to_a_compiled_clipped_sum(backend: str) -> None:
    model = nn.Linear(4, 3).double()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).tanh().sum((1, 2))

    x = torch.randn(5, 20, 4, dtype=torch.float64)  # so many positions that gradients are kept
    x[1, 3] = torch.nan
    x[4, 0] = torch.inf
    clipped = pergrad.ClippedSum(0.5)
    step = pergrad.compiled(model, loss, clipped, backend=backend)
    for _ in range(2):
        step(x)
    assert step.graphs == 1
    with pergrad.record(model, pergrad.ClippedSum(0.5)) as expected:
        loss(model, x[[0, 2, 3]]).sum().backward()
    assert_near(flat(clipped.result), flat(expected.result))


def test_results_of_the_last_call_are_let_go_of_before_the_next_one_runs(backend: str) -> None:
    model, norms = nn.Linear(3, 2), pergrad.Norms()
    step = pergrad.compiled(model, lambda model, x: model(x).sum(1), norms, backend=backend)
    x = torch.randn(4, 3)
    for _ in range(3):
        step(x)
    held = weakref.ref(norms.result)
    seen = []
    (graph,) = step._graphs.values()
    call = graph.call
    object.__setattr__(graph, "call", lambda *args: (seen.append(held()), call(*args))[1])
    step(x)
    assert seen == [None]


def test_what_is_seen_once_is_not_compiled() -> None:
    model, norms = Tied(), pergrad.Norms()
    step = pergrad.compiled(model, losses, norms)
    for samples in (2, 3, 4):
        words, labels = batch(samples)
        step(words, labels)
        assert_near(norms.result, pergrad.norms(model, losses, words, labels))
    assert step.graphs == 0


def test_shapes_modes_and_frozen_parameters_have_graphs_of_their_own(backend: str) -> None:
    model, norms = nn.Linear(3, 2), pergrad.Norms()
    step = pergrad.compiled(
        model, lambda model, x: model(x).square().sum(1), norms, backend=backend
    )

    def check(x: Tensor, graphs: int) -> None:
        for _ in range(2):
            step(x)
        assert step.graphs == graphs
        expected = pergrad.norms(model, lambda model, x: model(x).square().sum(1), x)
        assert_near(norms.result, expected)

    check(torch.randn(4, 3), 1)
    check(torch.randn(5, 3), 2)
    model.bias.requires_grad_(False)
    check(torch.randn(4, 3), 3)
    model.bias.requires_grad_()
    check(torch.randn(4, 3), 3)
    model.weight.data = torch.randn(3, 2).T  # lies otherwise
    check(torch.randn(4, 3), 4)


def test_arguments_that_are_equal_but_of_another_type_have_graphs_of_their_own() -> None:
    model, norms = nn.Linear(3, 2), pergrad.Norms()

    def powers(model: nn.Module, x: Tensor, flag: object) -> Tensor:
        return model(x).sum(1) * (5 if flag is True else 1)

    step, x = pergrad.compiled(model, powers, norms, backend="eager"), torch.randn(4, 3)
    for flag in (1, True, 1.0):
        for _ in range(2):
            step(x, flag)
            assert_near(norms.result, pergrad.norms(model, powers, x, flag))
    assert step.graphs == 3


def test_dropout_draws_fresh_numbers_in_each_call(backend: str) -> None:
    model, norms = Tied(dropout=0.5), pergrad.Norms()
    step = pergrad.compiled(model, losses, norms, backend=backend)
    words, labels = batch()
    found = []
    for _ in range(4):
        step(words, labels)
        found.append(norms.result)
    assert step.graphs == 1
    assert not torch.equal(found[2], found[3])


def test_autocast_is_part_of_the_signature(backend: str) -> None:
    model, grads = nn.Linear(8, 2), pergrad.Grads()
    step = pergrad.compiled(
        model, lambda model, x: model(x).float().square().sum(1), grads, backend=backend
    )
    x = torch.randn(4, 8)
    step(x)
    with torch.autocast("cpu", torch.bfloat16):
        step(x)
        rounded = grads.result["weight"]
        step(x)
    assert step.graphs == 1
    error = (grads.result["weight"] - rounded).abs().max() / rounded.abs().max()
    assert error < 0.02


class Exactly(nn.Module):
    """A head that does not want to be rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).float()
        with torch.autocast("cpu", enabled=False):
            return self.head(h)


def test_what_is_exempt_from_autocast_is_not_rounded_in_a_compiled_step(backend: str) -> None:
    model, grads, expected = Exactly(), pergrad.Grads(), pergrad.Grads()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum(1)

    step = pergrad.compiled(model, loss, grads, backend=backend)
    x = torch.randn(4, 3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            losses = step(x.sum(1))
        assert step.graphs == 1
        with pergrad.record(model, expected):
            wanted = loss(model, x.sum(1))
            wanted.sum().backward()
    torch.testing.assert_close(losses, wanted.detach(), rtol=1e-5, atol=1e-6)
    head = grads.result["head.weight"], expected.result["head.weight"]
    torch.testing.assert_close(*head, rtol=1e-5, atol=1e-5)


class Distances(nn.Module):
    """A function without a rule, which vmap takes sample by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(6, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:  # (n, t, 3) -> (n, t, 6)
        return torch.cdist(x, self.centres)


def test_functions_that_only_vmap_takes_apart_are_traced(backend: str) -> None:
    model, grads = Distances(), pergrad.Grads()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum((1, 2))

    step = pergrad.compiled(model, loss, grads, backend=backend)
    for _ in range(3):
        x = torch.randn(4, 5, 3, dtype=torch.float64)
        step(x)
        expected = pergrad.grads(model, loss, x)
        assert_near(grads.result["centres"], expected["centres"], "centres")
    assert step.graphs == 1
    assert "vmap" in str(pergrad.explain(model, loss, x))


def test_too_many_signatures_run_uncompiled_with_one_warning() -> None:
    model, norms = nn.Linear(3, 2), pergrad.Norms()
    step = pergrad.compiled(model, lambda model, x: model(x).sum(1), norms, max_graphs=0)
    x = torch.randn(4, 3)
    step(x)
    with pytest.warns(UserWarning, match="raise max_graphs"):
        step(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x)
    assert_near(norms.result, pergrad.norms(model, lambda model, x: model(x).sum(1), x))


def test_model_that_looks_at_values_goes_on_uncompiled_and_says_why(backend: str) -> None:
    class Looking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum().item() > 0 else -x)

    model, norms = Looking(3, 2), pergrad.Norms()
    step = pergrad.compiled(model, lambda model, x: model(x).sum(1), norms, backend=backend)
    x = torch.randn(4, 3)
    step(x)
    with pytest.warns(UserWarning, match="cannot be traced and runs uncompiled"):
        step(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x)
    assert step.graphs == 0
    assert_near(norms.result, pergrad.norms(model, lambda model, x: model(x).sum(1), x))


def test_steps_are_traced_alone_where_the_compiler_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("no C++ compiler\nat all")

    monkeypatch.setattr(internals, "compile_fx", failing)
    model, norms = nn.Linear(3, 2), pergrad.Norms()
    step = pergrad.compiled(model, lambda model, x: model(x).square().sum(1), norms)
    x, shorter = torch.randn(4, 3), torch.randn(2, 3)
    step(x)
    with pytest.warns(
        UserWarning, match=r"the compiler failed.*\(RuntimeError: no C\+\+ compiler\)"
    ):
        step(x)
    for batch in (x, shorter, shorter):  # of which nobody is told again
        step(batch)
        expected = pergrad.norms(model, lambda model, x: model(x).square().sum(1), batch)
        assert_near(norms.result, expected)
    assert step.graphs == 2


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(pergrad.PergradError, match=r"backend must be one of .*, got 'aot_eager'"):
        pergrad.compiled(nn.Linear(2, 1), losses, pergrad.Norms(), backend="aot_eager")


def test_nothing_to_compute_is_refused() -> None:
    with pytest.raises(pergrad.PergradError, match="pass at least one quantity"):
        pergrad.compiled(nn.Linear(2, 1), losses)


def test_a_step_shows_its_model_its_quantities_and_how_it_runs() -> None:
    model = nn.Linear(3, 2)
    step = pergrad.compiled(
        model, lambda m, x: m(x).sum(1), pergrad.Norms(), pergrad.Sum(), backend="eager"
    )
    assert repr(step) == "<compiled step of Linear for Norms, Sum: 0 graphs by eager>"
    for _ in range(2):
        step(torch.ones(4, 3))
    assert repr(step) == "<compiled step of Linear for Norms, Sum: 1 graph by eager>"
    assert "graphs" in dir(step)
    assert not any(name.startswith("_") for name in dir(step))
