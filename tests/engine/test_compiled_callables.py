"""Functions and modules of torch.compile are exact in a recording; so is one in compiled code, or refused."""

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.errors import ScopeError
from pergrad.testing import assert_near, loop_grads

# The compiler looks at `.grad` of the tensors that a compiled function goes on with.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def data() -> Tensor:
    return torch.randn(4, 3, dtype=torch.float64)


def by_method(model: nn.Module, backend: str) -> nn.Module:
    own = copy.deepcopy(model)
    own.compile(backend=backend)
    return own


def by_submodule(model: Any, backend: str) -> nn.Module:
    own = copy.deepcopy(model)
    own[0] = torch.compile(own[0], backend=backend)
    return own


def compiled_loss(backend: str) -> Any:
    return torch.compile(losses, backend=backend)


CALLABLES: dict[str, Callable[[nn.Module, str], tuple[Any, Any]]] = {
    "loss": lambda m, backend: (m, compiled_loss(backend)),
    "model": lambda m, backend: (torch.compile(m, backend=backend), losses),
    "model.compile()": lambda m, backend: (by_method(m, backend), losses),
    "submodule": lambda m, backend: (by_submodule(m, backend), losses),
    "both": lambda m, backend: (torch.compile(m, backend=backend), compiled_loss(backend)),
}


def recorded(model: nn.Module, loss_fn: Any, x: Tensor) -> dict[str, Tensor]:
    with pergrad.record(model, pergrad.Grads()) as grads:
        loss_fn(model, x).sum().backward()
    return grads.result


def contract(model: nn.Module, loss_fn: Any, x: Tensor) -> dict[str, Tensor]:
    call = pergrad.call_for_per_sample_grads(model)
    loss_fn(lambda x: call(x), x).sum().backward()
    found = {name: getattr(p, "grad_sample") for name, p in model.named_parameters()}  # noqa: B009
    for p in model.parameters():
        setattr(p, "grad_sample", None)  # noqa: B010  # compiled code cannot delete it
    return found


def traced(model: nn.Module, loss_fn: Any, x: Tensor) -> dict[str, Tensor]:
    grads = pergrad.Grads()
    step = pergrad.compiled(model, loss_fn, grads, backend="eager")
    for _ in range(3):
        step(x)
    assert step.graphs == 1
    return grads.result


ENTRIES: dict[str, Callable[..., dict[str, Tensor]]] = {
    "record": recorded,
    "grads": pergrad.grads,
    "contract": contract,
    "compiled": traced,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", CALLABLES)
def test_compiled_callables_are_exact(name: str, entry: str, backend: str) -> None:
    model, x = plain(), data()
    expected = loop_grads(model, losses, x)
    other, loss_fn = CALLABLES[name](model, backend)
    found = ENTRIES[entry](other, loss_fn, x)
    assert list(found) == [key for key, _ in other.named_parameters()]
    for grads, (key, wanted) in zip(found.values(), expected.items(), strict=True):
        assert_near(grads, wanted, key)
    assert_near(loss_fn(other, x), losses(model, x))  # compiled as before


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_verify_takes_compiled_callables(backend: str) -> None:
    model: Any = torch.compile(plain(), backend=backend)
    assert pergrad.verify(model, compiled_loss(backend), data())


def test_the_first_torch_compile_may_be_in_the_block() -> None:
    model, x = plain(), data()
    with pergrad.record(model, pergrad.Norms()) as norms:
        torch.compile(losses, backend="eager")(model, x).sum().backward()
    assert_near(norms.result, pergrad.norms(model, losses, x))


def test_a_module_may_be_called_by_its_compiled_wrapper() -> None:
    model, x = plain(), data()
    wrapper: Any = torch.compile(model, backend="eager")
    with pergrad.record(model, pergrad.Norms()) as norms:
        losses(wrapper, x).sum().backward()
    assert_near(norms.result, pergrad.norms(model, losses, x))


INSIDE: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "grads": lambda m, x: pergrad.grads(m, losses, x)["0.weight"] * 1,
    "norms": lambda m, x: pergrad.norms(m, losses, x * 2 / 2) + 0,
    "contract": lambda m, x: contract(m, losses, x)["0.weight"],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", INSIDE)
def test_calls_inside_of_compiled_functions_run_eagerly(name: str, backend: str) -> None:
    model, call = plain(), INSIDE[name]
    compiled = torch.compile(lambda x: call(model, x), backend=backend)
    for samples in (4, 4, 3, 2):
        x = data()[:samples]
        assert_near(compiled(x), call(model, x))


def test_a_compiled_step_runs_inside_of_a_compiled_function() -> None:
    model, norms = plain(), pergrad.Norms()
    step = pergrad.compiled(model, losses, norms, backend="eager")

    def train(x: Tensor) -> Tensor:
        return step(x) * 1

    for _ in range(4):
        x = data()
        assert_near(torch.compile(train, backend="eager")(x), losses(model, x).detach())
        assert_near(norms.result, pergrad.norms(model, losses, x))
    assert step.graphs == 1


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_a_block_inside_of_a_compiled_function_is_refused(backend: str) -> None:
    model, x = plain(), data()

    def train(x: Tensor) -> Tensor:
        x = x * 1
        with pergrad.record(model, pergrad.Norms()) as norms:
            losses(model, x).sum().backward()
        return norms.result

    with pytest.raises(ScopeError, match="cannot open a block inside of a function that torch"):
        torch.compile(train, backend=backend)(x)
    assert_near(torch.compiler.disable(train)(x), pergrad.norms(model, losses, x))


def test_compiling_goes_on_after_the_block_and_after_errors() -> None:
    model, x, seen = plain(), data(), []

    def backend(graph: Any, _: Any) -> Any:
        seen.append(graph)
        return graph.forward

    loss_fn = torch.compile(losses, backend=backend)
    with pergrad.record(model, pergrad.Norms()):
        loss_fn(model, x).sum().backward()
    with pytest.raises(ValueError, match="mine"), pergrad.record(model, pergrad.Norms()):
        raise ValueError("mine")
    assert seen == []
    loss_fn(model, x)
    assert len(seen) == 1


def test_recordings_of_two_threads_leave_the_compiler_as_it_was() -> None:
    model, x, errors = plain(), data(), []
    others = [copy.deepcopy(model) for _ in range(2)]
    expected = pergrad.norms(model, losses, x)

    def work(own: nn.Module) -> None:
        try:
            for _ in range(20):
                assert_near(pergrad.norms(own, losses, x), expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(own,)) for own in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    test_compiling_goes_on_after_the_block_and_after_errors()


def test_recording_a_compiled_model_adds_no_graph_and_hardly_any_time() -> None:
    torch.manual_seed(0)
    eager = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model, x = copy.deepcopy(eager), torch.randn(4, 6, 16)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x).sum().backward()
    counters = torch._dynamo.utils.counters
    before = copy.deepcopy(counters)

    def seconds(called: Any) -> float:
        start = time.perf_counter()
        with pergrad.record(called, pergrad.Norms(), keep_grad=True) as found:
            called(x).square().mean().backward()
        taken = time.perf_counter() - start
        torch.testing.assert_close(found.result, expected)
        return taken

    expected = pergrad.norms(eager, lambda m, x: m(x).square().mean((1, 2)), x)
    plain = seconds(eager)
    assert seconds(compiled) < plain + 0.5
    compiled(x).sum().backward()
    assert counters == before
