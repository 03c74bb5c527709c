"""Nothing left behind: no state after errors, no memory after steps, nothing between threads."""

import gc
import threading
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.errors import UnseenUseError
from pergrad.testing import assert_near, loop_grads
from tests.engine.failing import FailsBetween


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def squares(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (model(x) ** 2).flatten(1).sum(1)


# -- after an error


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_error_leaves_model_and_input_as_they_were(where: str, needs_grad: bool) -> None:
    model, x = FailsBetween().double(), data(5, 4).requires_grad_(needs_grad)
    model.fails = where
    with pytest.raises(KeyError, match=where):
        pergrad.call_for_per_sample_grads(model)(x).sum().backward()
    model.fails = None
    assert not vars(x)
    assert x.grad is None
    assert not torch.overrides._get_current_function_mode_stack()
    for p in model.parameters():
        assert not vars(p), "no half-filled grad_sample"
        assert not p._backward_hooks
        assert p.grad is None
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    expected = loop_grads(model, squares, x.detach())
    squares(pergrad.call_for_per_sample_grads(model), x.detach()).sum().backward()
    for name, p in model.named_parameters():
        assert_near(p.grad_sample, expected[name], name)


# -- memory


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 16, 3),
    )


class Tied(nn.Module):
    """Embedding, a recurrent layer, attention, a derived weight: everything that might hold on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, index: Tensor) -> Tensor:
        x, _ = self.rnn(self.embed(index))
        x, _ = self.attention(x, x, x)
        return (x * self.scale) @ self.embed.weight.t()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "convnet": (convnet, lambda: torch.randn(3, 2, 4, 4)),
    "tied": (Tied, lambda: torch.randint(8, (3, 5))),
}


def by_call(model: nn.Module, x: Tensor) -> None:
    pergrad.call_for_per_sample_grads(model)(x).sum().backward()
    for p in model.parameters():
        p.grad_sample = None  # type: ignore[attr-defined]


def by_record(model: nn.Module, x: Tensor) -> None:
    with pergrad.record(model, pergrad.Grads()):
        model(x).sum().backward()


def by_error(model: nn.Module, x: Tensor) -> None:
    def fail() -> None:
        with pergrad.record(model, pergrad.Grads()):
            model(x).sum().backward()
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        fail()


def by_forward_alone(model: nn.Module, x: Tensor) -> None:
    pergrad.call_for_per_sample_grads(model)(x)


STEPS = {f.__name__: f for f in (by_call, by_record, by_error, by_forward_alone)}


def live_objects() -> Counter[str]:
    """Count tensors and whatever pergrad defines. (torch's pytrees leave small cycles of their own.)"""
    kinds = (type(o) for o in gc.get_objects())
    return Counter(
        k.__name__
        for k in kinds
        if issubclass(k, Tensor) or str(k.__module__).startswith("pergrad")
    )


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", MODELS)
def test_steps_leave_nothing_behind_without_the_garbage_collector(name: str, step: str) -> None:
    build, inputs = MODELS[name]
    model, x = build(), inputs()
    for _ in range(2):
        STEPS[step](model, x)
    before = live_objects()
    for _ in range(3):
        STEPS[step](model, x)
    assert live_objects() - before == Counter()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("step", ["by_call", "by_record"])
def test_memory_does_not_grow_over_a_hundred_steps(step: str) -> None:
    model, x = convnet(), torch.randn(3, 2, 4, 4)
    tracemalloc.start()
    try:
        sizes = []
        for k in range(100):
            STEPS[step](model, x)
            if k in (9, 99):
                sizes.append((live_objects(), tracemalloc.get_traced_memory()[0]))
    finally:
        tracemalloc.stop()
    (objects, size), (objects_after, size_after) = sizes
    assert objects_after - objects == Counter()
    assert size_after - size < 90 * 3000, (
        "bytes of Python objects; torch's pytrees leave 2 kB a step"
    )


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", MODELS)
def test_activations_are_freed_with_the_step(name: str, step: str) -> None:
    build, inputs = MODELS[name]
    model, x = build(), inputs()
    activations: list[weakref.ref[Tensor]] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        output = output if isinstance(output, Tensor) else output[0]
        activations.append(weakref.ref(output))

    for module in list(model.children())[:2]:
        module.register_forward_hook(keep)
    STEPS[step](model, x)
    assert activations
    assert all(ref() is None for ref in activations)


@pytest.mark.usefixtures("_no_collector")
def test_graph_is_freed_as_the_backward_runs() -> None:
    model, x = convnet(), torch.randn(3, 2, 4, 4)
    activations: list[weakref.ref[Tensor]] = []
    model[0].register_forward_hook(lambda _, __, y: activations.append(weakref.ref(y)))
    output = pergrad.call_for_per_sample_grads(model)(x)
    assert activations
    output.sum().backward()
    assert all(ref() is None for ref in activations)  # though `output` is still here


# -- threads


def test_two_threads_record_two_models_at_once() -> None:
    models = [
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(),
        nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2)).double(),
    ]
    batches = [data(5, 4), data(3, 4)]
    expected = [loop_grads(m, squares, x) for m, x in zip(models, batches, strict=True)]
    barrier = threading.Barrier(2, timeout=60)
    failures: list[BaseException] = []

    def work(k: int) -> None:
        model, x = models[k], batches[k]
        try:
            for step in range(10):
                with pergrad.record(model, pergrad.Grads()) as grads:
                    barrier.wait()
                    output = model(x)
                    barrier.wait()  # both forwards are done before either backward
                    (output**2).sum().backward()
                    barrier.wait()
                for name, rows in expected[k].items():
                    assert_near(grads.result[name], rows, f"thread {k}, step {step}, {name}")
        except BaseException as error:  # also what pytest raises: the main thread must hear of it
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_two_threads_record_one_model_at_once() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    batches = [data(5, 4), data(3, 4)]
    expected = [loop_grads(model, squares, x) for x in batches]
    barrier = threading.Barrier(2, timeout=60)
    failures: list[BaseException] = []

    def work(k: int) -> None:
        try:
            for _ in range(10):
                with pergrad.record(model, pergrad.Grads()) as grads:
                    barrier.wait()
                    output = model(batches[k])
                    barrier.wait()
                    (output**2).sum().backward()
                    barrier.wait()
                for name, rows in expected[k].items():
                    assert_near(grads.result[name], rows, f"thread {k}, {name}")
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_one_thread_records_while_another_trains_the_same_way_as_ever() -> None:
    recorded, plain = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
    x = data(5, 4)
    started, finish = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def record() -> None:
        try:
            with pergrad.record(recorded, pergrad.Grads()):
                output = recorded(x)
                started.set()
                finish.wait(60)
                output.sum().backward()
        except BaseException as error:  # the main thread must hear of it
            failures.append(error)
            started.set()

    thread = threading.Thread(target=record)
    thread.start()
    started.wait(60)
    plain(x).sum().backward()
    finish.set()
    thread.join()
    assert not failures, failures
    assert plain.weight.grad is not None
    assert_near(plain.weight.grad, x.sum(0).expand(3, 4))
    assert not vars(plain.weight)


# -- uses out of sight


def test_graph_built_before_recording_is_refused() -> None:
    model, x = nn.Linear(4, 3).double(), data(5, 4)
    penalty = (model.weight**2).sum()
    with (
        pytest.raises(UnseenUseError, match="'weight'"),
        pergrad.record(model, pergrad.Grads()),
    ):
        (model(x).sum() + penalty).backward()
    assert model.weight.grad is None


class Doubling(torch.autograd.Function):
    """x @ w.T, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class ByFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return Doubling.apply(self.first(x), self.weight)


@pytest.mark.parametrize("shape", [(5, 4), (5, 2, 4)], ids=str)
def test_autograd_function_on_a_parameter_is_right_or_refused(shape: tuple[int, ...]) -> None:
    model, x = ByFunction().double(), data(*shape)
    try:
        found = pergrad.grads(model, squares, x)
    except pergrad.PergradError as error:
        assert "'weight'" in str(error)  # noqa: PT017
        return
    expected = loop_grads(model, squares, x)
    for name, rows in expected.items():
        assert_near(found[name], rows, name)


class ByScript(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch._C._nn.linear(self.linear(x), self.weight)


def test_functions_called_past_python_are_right_or_refused() -> None:
    model, x = ByScript().double(), data(5, 4)
    found = pergrad.grads(model, squares, x)
    for name, rows in loop_grads(model, squares, x).items():
        assert_near(found[name], rows, name)


def hidden_use(model: nn.Module, x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return x @ model.weight.t()


def test_use_out_of_sight_of_the_recorder_is_refused() -> None:
    model, x = nn.Linear(4, 3).double(), data(5, 4)
    with (
        pytest.raises(UnseenUseError, match="out of sight"),
        pergrad.record(model, pergrad.Grads()),
    ):
        (model(x) + hidden_use(model, x)).sum().backward()
    assert model.weight.grad is None
    assert not model.weight._backward_hooks
