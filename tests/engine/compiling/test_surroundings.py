"""A compiled step leaves no tensor of its trace behind; it repeats what the step does, or is not compiled."""

import threading
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.torch_version import TorchVersion

import pergrad
from pergrad.engine.compiling.surroundings import Surroundings, _Globals
from pergrad.quantities import Batch
from pergrad.reductions import SampleGradients
from pergrad.runtime import internals
from pergrad.runtime.containers import holds_traced
from pergrad.testing import assert_near

KEPT: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


def data() -> Tensor:
    return torch.randn(4, 3, dtype=torch.float64)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.double()


class Twice(Base):
    """One module under three names, and a weight under two."""

    def __init__(self) -> None:
        super().__init__()
        self.c = self.a
        self.inner = nn.Sequential(self.a, nn.Tanh())
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.c(x).tanh()) + self.inner(x)


class InAList(Base):
    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.a.weight]
        self.by_name: dict[str, Any] = {"b": (self.b.weight,), "bias": self.b.bias}

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.a(x), self.weights[0], self.by_name["bias"]) + self.b(x)


class InATuple(Base):
    def __init__(self) -> None:
        super().__init__()
        self.weights = (self.a.weight,)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.b(x), self.weights[0])


class Assigns(Base):
    """Assigns a buffer and plain tensors anew in each forward."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.last: Tensor | None = None
        self.both: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.last = h = self.a(x).tanh()
        self.both = {"h": h, "of": [1, h + 1]}
        return self.b(h) + self.mean


class Counts(Base):
    calls: int = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.b(self.a(x)) * self.calls


class Appends(Base):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.seen.append(h.detach())
        return self.b(h) * len(self.seen)


class AppendsToADeque(Appends):
    def __init__(self) -> None:
        super().__init__()
        self.seen = deque(maxlen=2)


class Averages(Base):
    """A running sum that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x.detach().mean(0)
        return self.b(self.a(x)) + self.total


class InAnObject(Base):
    def __init__(self) -> None:
        super().__init__()
        self.log = type("Log", (), {})()

    def forward(self, x: Tensor) -> Tensor:
        self.log.last = self.a(x)
        return self.b(self.log.last)


def parametrized() -> nn.Module:
    model = Twice()
    parametrize.register_parametrization(model.inner[0], "bias", nn.Tanh())
    parametrizations.orthogonal(model.b, "weight")
    return model


class Seeds(Base):
    """Draws the same numbers in each call, from a generator of its own."""

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        return self.b(self.a(x) * torch.rand(3, generator=generator, dtype=x.dtype))


class SeedsAll(Base):
    """Draws the same numbers in each call, and leaves the random state as it was."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            mask = torch.rand_like(x)
        return self.b(self.a(x) * mask)


class InAThread(Base):
    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        h = self.a(x)
        thread = threading.Thread(target=lambda: found.append(h.sin()))
        thread.start()
        thread.join()
        return self.b(found[0])


class Hooked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a.weight.register_hook(lambda g: g.clamp(-0.1, 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and the graphs that are compiled
    "registered twice": (Twice, 1),
    "weights in containers": (InAList, 1),
    "a weight in a tuple": (InATuple, 0),
    "assigns tensors": (Assigns, 1),
    "counts": (Counts, 0),
    "appends to a list": (Appends, 0),
    "appends to a deque": (AppendsToADeque, 0),
    "a sum that is no buffer": (Averages, 0),
    "an object with attributes": (InAnObject, 0),
    "parametrized": (parametrized, 1),
    "recurrent": (lambda: _Recurrent().double(), 1),
    "seeds a generator": (Seeds, 0),
    "seeds all generators": (SeedsAll, 0),
    "computes in a thread": (InAThread, 0),
    "a hook on a parameter": (Hooked, 0),
}


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.GRU(3, 3, batch_first=True)
        self.same = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.same(x.unsqueeze(1))[0].squeeze(1)


def traced_in(model: nn.Module) -> list[str]:
    return [
        f"{name}.{key}"
        for name, m in model.named_modules()
        for entries in (vars(m), internals.parameters_of(m), internals.buffers_of(m))
        for key, value in entries.items()
        if key != "_modules" and holds_traced(value)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_steps_give_what_recorded_ones_give_and_leave_no_traced_tensor(name: str) -> None:
    build, graphs = MODELS[name]
    torch.manual_seed(1)
    model = build()
    torch.manual_seed(1)
    plain = build()
    found, wanted = pergrad.Grads(), pergrad.Grads()
    step = pergrad.compiled(model, losses, found, backend="eager")
    before = dict(model.named_parameters(remove_duplicate=False))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore" if not graphs else "error", message="pergrad.compiled")
        for _ in range(4):
            x = data()
            step(x)
            wanted.reset()
            with pergrad.record(plain, wanted):
                losses(plain, x).sum().backward()
            for key, expected in wanted.result.items():
                assert_near(found.result[key], expected)
            assert traced_in(model) == []
    assert step.graphs == graphs
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    assert all(after[key] is p for key, p in before.items())
    for key in ("mean", "last", "both", "total", "seen", "calls"):
        if hasattr(plain, key):
            torch.testing.assert_close(getattr(model, key), getattr(plain, key))


class SetsData(Base):
    """Assigns to `.data`, of which a trace would not know."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        if self.of == "input":
            x = x.clone()
            x.data = 2 * x.data
        h = self.a(x)
        if self.of == "weight":
            self.b.weight.data = F.normalize(self.b.weight.data)
        if self.of == "activation":
            h.data = h.data.clamp(-0.2, 0.2)
        return self.b(h)


@pytest.mark.parametrize("of", ["input", "activation", "weight"])
def test_a_step_that_assigns_to_data_runs_uncompiled(of: str) -> None:
    model, grads, x = SetsData(of), pergrad.Grads(), data()
    step = pergrad.compiled(model, losses, grads, backend="eager")
    expected = pergrad.grads(model, losses, x)
    step(x)
    with pytest.warns(UserWarning, match="it assigns to the `.data`"):
        step(x)
    step(x)
    for name, rows in expected.items():
        assert_near(grads.result[name], rows, name)


def test_a_hook_on_a_parameter_after_the_trace_is_noticed() -> None:
    model, grads, x = Twice(), pergrad.Grads(), data()
    step = pergrad.compiled(model, losses, grads, backend="eager")
    for _ in range(3):
        step(x)
    model.a.weight.register_hook(lambda g: 2 * g)
    with pytest.warns(UserWarning, match="a parameter has a hook"):
        step(x)
    for name, expected in pergrad.grads(model, losses, x).items():
        assert_near(grads.result[name], expected, name)


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 12),
    reason="torch 2.11 traces no generator: such a step runs uncompiled, with a warning",
)
def test_a_generator_of_the_model_goes_on_in_a_graph() -> None:
    class Draws(Base):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            drawn = torch.rand(3, generator=self.generator, dtype=x.dtype)
            return self.b(self.a(x) * drawn)

    model, norms, x = Draws(), pergrad.Norms(), data()
    step = pergrad.compiled(model, losses, norms, backend="eager")
    for seed in range(3):
        model.generator.manual_seed(seed)
        step(x)
        model.generator.manual_seed(seed)
        assert_near(norms.result, pergrad.norms(model, losses, x))
    assert step.graphs == 1


def test_assigned_attributes_are_those_of_the_last_step() -> None:
    model, norms = Assigns(), pergrad.Norms()
    step = pergrad.compiled(model, losses, norms, backend="eager")
    for _ in range(3):
        x = data()
        step(x)
    assert model.last is not None
    assert_near(model.last, model.a(x).tanh().detach())
    assert isinstance(model.get_buffer("mean"), Tensor)


@pytest.mark.parametrize("name", ["list", "nonlocal", "global", "method", "partial"])
def test_variables_of_the_loss_function_keep_no_traced_tensor(name: str) -> None:
    log: list[Tensor] = []
    last: Tensor | None = None

    class Losses:
        last: Tensor | None = None

        def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
            self.last = model(x)
            return self.last.square().sum(1)

        def method(self, model: nn.Module, x: Tensor) -> Tensor:
            return self(model, x)

    keeper = Losses()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal last
        found = model(x)
        if name == "list":
            log.append(found)
        elif name == "nonlocal":
            last = found
        elif name == "global":
            KEPT["last"] = found
        return found.square().sum(1)

    called: Any = {"method": keeper.method, "partial": keeper}.get(name, loss_fn)
    model, norms = Twice(), pergrad.Norms()
    step = pergrad.compiled(model, called, norms, backend="eager")
    step(data())
    with pytest.warns(UserWarning, match="a compiled step would not do"):
        step(data())
    assert not holds_traced([log, last, KEPT, keeper])
    x = data()
    step(x)
    assert_near(norms.result, pergrad.norms(model, losses, x))
    KEPT.clear()


def test_a_parameter_in_a_variable_of_the_loss_function_is_recorded() -> None:
    model, found = Twice(), pergrad.Grads()
    weight = model.a.weight

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return F.linear(model(x), weight).square().sum(1)

    step = pergrad.compiled(model, loss_fn, found, backend="eager")
    for _ in range(3):
        x = data()
        step(x)
        for key, expected in pergrad.grads(model, loss_fn, x).items():
            assert_near(found.result[key], expected)
    assert step.graphs == 1


def test_an_error_in_the_trace_leaves_the_model_as_it_was() -> None:
    class Fails(Assigns):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            if holds_traced(x):
                raise ValueError("not now")
            return found

    model, norms = Fails(), pergrad.Norms()
    before = dict(vars(model.a)["_parameters"])
    step = pergrad.compiled(model, losses, norms, backend="eager")
    step(data())
    with pytest.warns(UserWarning, match="not now"):
        step(data())
    assert traced_in(model) == []
    assert all(vars(model.a)["_parameters"][key] is p for key, p in before.items())


def test_a_replaced_tensor_that_is_no_buffer_is_noticed() -> None:
    class Scales(Base):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(3, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) * self.scale

    model, norms = Scales(), pergrad.Norms()
    step = pergrad.compiled(model, losses, norms, backend="eager")
    for _ in range(3):
        step(data())
    assert step.graphs == 1
    model.scale = torch.full((3,), 2.0, dtype=torch.float64)
    x = data()
    with pytest.warns(UserWarning, match="was replaced by another"):
        step(x)
    assert_near(norms.result, pergrad.norms(model, losses, x))


class _Own(pergrad.Norms):
    """Norms, and a state that a subclass keeps in `end`."""

    def __init__(self) -> None:
        self.kept: Any = None

    def end(self) -> None:
        super().end()
        self.keep(self.result.sum())

    def keep(self, total: Tensor) -> None: ...


class Lists(_Own):
    def __init__(self) -> None:
        self.kept = []

    def keep(self, total: Tensor) -> None:
        self.kept.append(total)


class Nested(Lists):
    def __init__(self) -> None:
        self.kept = {"all": [()]}

    def keep(self, total: Tensor) -> None:
        self.kept["all"].append((total,))


class Sets(Lists):
    def __init__(self) -> None:
        self.kept = set()

    def keep(self, total: Tensor) -> None:
        self.kept = {total}


class Sums(_Own):
    def keep(self, total: Tensor) -> None:
        self.kept = total if self.kept is None else self.kept + total


class CountsSteps(_Own):
    def keep(self, total: Tensor) -> None:
        self.kept = (self.kept or 0) + 1


class Cleared(Lists):
    """A list from `__init__` that each block begins anew."""

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self.kept.clear()

    def consume(self, name: str, gradients: SampleGradients) -> None:
        super().consume(name, gradients)
        self.kept.append(gradients.squared_norms())


QUANTITIES = {Lists: 0, Nested: 0, Sets: 0, Sums: 0, CountsSteps: 0, Cleared: 1, _Own: 1}


@pytest.mark.parametrize("kind", QUANTITIES)
def test_states_of_quantities_are_those_of_recorded_steps(kind: type[_Own]) -> None:
    model, found, wanted = Twice(), kind(), kind()
    step = pergrad.compiled(model, losses, found, backend="eager")
    with warnings.catch_warnings():
        if not QUANTITIES[kind]:
            warnings.filterwarnings("ignore", message="pergrad.compiled")
        for _ in range(4):
            x = data()
            step(x)
            wanted.reset()
            with pergrad.record(model, wanted):
                losses(model, x).sum().backward()
            assert not holds_traced(vars(found))
            if kind is Sets:
                found.kept, wanted.kept = list(found.kept), list(wanted.kept)
            torch.testing.assert_close(found.kept, wanted.kept)
    assert step.graphs == QUANTITIES[kind]


def test_a_quantity_that_accumulates_is_named_in_the_warning() -> None:
    model, quantity = Twice(), Lists()
    step = pergrad.compiled(model, losses, quantity, backend="eager")
    step(data())
    with pytest.warns(UserWarning, match="'kept' of Lists accumulates"):
        step(data())


def test_globals_of_torchs_own_functions_are_left_alone() -> None:
    """The compiler's state is reached from compiled callables; a trace changes it."""
    surroundings = Surroundings(nn.Linear(2, 2), [losses, torch.fx.wrap, torch.compile])
    holders = [h for h in surroundings._holders if isinstance(h, _Globals)]
    names = {h.container["__name__"] for h in holders}
    assert __name__ in names
    assert not [name for name in names if name.partition(".")[0] == "torch"]
