"""Tests that a compiled step gives what a recorded one gives when Python values change between its calls."""

from __future__ import annotations

import enum
import random
import types
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pergrad
from pergrad.testing import assert_near

factor = 2.0  # a global of the losses below


class Model(nn.Module):
    """Two layers in float64, and a forward that is given."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)
        self.double()

    def forward(self, *args: Any) -> Tensor:
        return self.function(self, *args)


def losses(model: nn.Module, *args: Any) -> Tensor:
    return model(*args).square().sum(1)


def x() -> Tensor:
    return torch.randn(4, 3, dtype=torch.float64)


Steps = Iterator[tuple[nn.Module, Callable[..., Tensor], tuple[Any, ...]]]
PROGRAMS: dict[str, Callable[[], Steps]] = {}


def program(function: Callable[[], Steps]) -> Callable[[], Steps]:
    PROGRAMS[function.__name__] = function
    return function


@program
def attribute_of_the_model() -> Steps:
    m = Model(lambda m, x: m.b(m.a(x) * m.k))
    for m.k in (2.0, 3.0, 2.0, True, -0.0):
        yield m, losses, (x(),)


@program
def attribute_of_a_layer() -> Steps:
    m = Model(lambda m, x: m.b(m.act(m.a(x))), act=nn.LeakyReLU(0.1))
    for m.act.negative_slope in (0.1, 0.5):
        yield m, losses, (x(),)


@program
def attribute_that_is_a_function() -> Steps:
    m = Model(lambda m, x: m.b(m.k(m.a(x))))
    for m.k in (torch.sin, torch.cos):
        yield m, losses, (x(),)


@program
def contents_of_containers_and_objects() -> Steps:
    inner = SimpleNamespace(v=1.0)
    config = SimpleNamespace(d={"l": [inner]}, s="sin", n=None)
    m = Model(lambda m, x: m.b(m.k.d["l"][0].v * getattr(torch, m.k.s)(m.a(x))), k=config)
    yield m, losses, (x(),)
    inner.v = 2.0
    yield m, losses, (x(),)
    config.s = "cos"
    yield m, losses, (x(),)
    config.d["l"].insert(0, SimpleNamespace(v=3.0))
    yield m, losses, (x(),)


@program
def attribute_of_a_class_and_in_front_of_it() -> Steps:
    class Own(Model):
        k = 2.0

    m = Own(lambda m, x: m.b(m.a(x) * m.k))
    yield m, losses, (x(),)
    Own.k = 3.0
    yield m, losses, (x(),)
    m.k = 4.0
    yield m, losses, (x(),)
    Own.forward = lambda m, x: m.a(m.b(x))  # type: ignore[method-assign]
    yield m, losses, (x(),)
    m.forward = lambda x: m.a(x)  # type: ignore[method-assign]
    yield m, losses, (x(),)


@program
def module_in_the_place_of_another() -> Steps:
    m = Model(lambda m, x: m.b(m.act(m.a(x))), act=nn.Tanh())
    for m.act in (nn.Tanh(), nn.ReLU(), nn.Identity()):
        yield m, losses, (x(),)
    m.act.__class__ = nn.Sigmoid
    yield m, losses, (x(),)


@program
def hooks_come_and_go() -> Steps:
    m = Model(lambda m, x: m.b(m.a(x).tanh()))
    yield m, losses, (x(),)
    handle = m.a.register_forward_hook(lambda module, args, output: output * 2)
    yield m, losses, (x(),)
    handle.remove()
    yield m, losses, (x(),)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: output * 2)
    try:
        yield m, losses, (x(),)
    finally:
        handle.remove()


@program
def variable_of_an_enclosing_function() -> Steps:
    k, t = 2.0, torch.tensor(2.0, dtype=torch.float64)
    m = Model(lambda m, x: m.b(m.a(x) * k))

    def scaled(model: nn.Module, x: Tensor) -> Tensor:
        return losses(model, x) * t

    yield m, scaled, (x(),)
    k = 3.0
    yield m, scaled, (x(),)
    t = t * 2
    yield m, scaled, (x(),)
    t.mul_(2)
    yield m, scaled, (x(),)


@program
def global_variable() -> Steps:
    global factor
    m = Model(lambda m, x: m.b(m.a(x)) * factor)
    factor = 2.0
    yield m, losses, (x(),)
    factor = 3.0
    yield m, losses, (x(),)


@program
def defaults_and_arguments_of_functions() -> Steps:
    def scaled(model: nn.Module, x: Tensor, k: float = 1.0) -> Tensor:
        return losses(model, x) * k

    m, part = Model(lambda m, x: m.b(m.a(x))), partial(scaled)
    yield m, part, (x(),)
    part.keywords["k"] = 2.0
    yield m, part, (x(),)
    del part.keywords["k"]
    scaled.__defaults__ = (3.0,)
    yield m, part, (x(),)


@program
def object_with_the_loss() -> Steps:
    class Task:
        temperature = 1.0

        def __init__(self) -> None:
            self.criterion = nn.CrossEntropyLoss(reduction="none")

        def loss(self, model: nn.Module, x: Tensor) -> Tensor:
            return self.criterion(
                model(x) / self.temperature, torch.zeros(len(x), dtype=torch.long)
            )

    task, m = Task(), Model(lambda m, x: m.b(m.a(x)))
    loss = task.loss
    yield m, loss, (x(),)
    task.temperature = 2.0
    yield m, loss, (x(),)
    task.criterion.label_smoothing = 0.3
    yield m, loss, (x(),)
    task.criterion.weight = torch.tensor([3.0, 1.0, 1.0], dtype=torch.float64)
    yield m, loss, (x(),)


@program
def teacher_in_the_loss() -> Steps:
    teacher = nn.Linear(3, 3).double().requires_grad_(False)

    def distance(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) - teacher(x)).square().sum(1)

    m = Model(lambda m, x: m.b(m.a(x)))
    yield m, distance, (x(),)
    teacher.weight.data.mul_(2)
    yield m, distance, (x(),)
    teacher.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64), requires_grad=False)
    yield m, distance, (x(),)
    teacher = nn.Linear(3, 3).double().requires_grad_(False)
    yield m, distance, (x(),)


@program
def numbers_that_are_read_from_tensors_and_arrays() -> Steps:
    m = Model(lambda m, x: m.b(m.a(x) * float(m.t)) * float(m.array[1]))
    m.t, m.array = torch.tensor(2.0), np.ones(3)
    yield m, losses, (x(),)
    m.t.fill_(3.0)
    yield m, losses, (x(),)
    m.array[1] = 2.0
    yield m, losses, (x(),)


@program
def function_of_torch_that_is_replaced() -> Steps:
    m, gelu = Model(lambda m, x: m.b(F.gelu(m.a(x)))), F.gelu
    yield m, losses, (x(),)
    try:
        F.gelu = lambda x: gelu(x) * 2
        yield m, losses, (x(),)
    finally:
        F.gelu = gelu


class _Equal:
    def __init__(self, k: float) -> None:
        self.k = k

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "equal"


class _Kind(enum.Enum):
    ONE, TWO = 1, 2


@program
def arguments_that_are_no_tensors() -> Steps:
    m = Model(lambda m, x, k: m.b(m.a(x) * (k.value if isinstance(k, _Kind) else k.k)))
    own = _Equal(5.0)
    for k in (_Equal(1.0), _Equal(2.0), own, _Kind.ONE, _Kind.TWO):
        yield m, losses, (x(), k)
    own.k = 6.0
    yield m, losses, (x(), own)


@program
def large_arrays_as_arguments() -> Steps:
    m, array = Model(lambda m, x, k: m.b(m.a(x) * float(k[2500]))), np.zeros(5000)
    for value in (1.0, 2.0):
        array = array.copy()
        array[2500] = value
        yield m, losses, (x(), array)


@program
def one_tensor_for_two_arguments() -> Steps:
    m = Model(lambda m, x, y: m.b(m.a(x)) if x is y else m.a(m.b(y)))
    one = x()
    yield m, losses, (one, one)
    yield m, losses, (x(), x())


@program
def parameters_that_are_tied_otherwise() -> Steps:
    m = Model(lambda m, x: m.b(m.a(x).tanh()) @ m.w, w=nn.Parameter(torch.randn(3, 3)))
    m.b.weight = m.a.weight
    yield m, losses, (x(),)
    m.b.weight = m.w
    yield m, losses, (x(),)


@program
def layer_that_is_dropped_by_pythons_random_numbers() -> Steps:
    m = Model(lambda m, x: m.b(m.a(x)) * (m.rng.random() + random.random() + np.random.rand()))
    m.rng, m.seed = random.Random(0), 0

    def seeded(model: Any, x: Tensor) -> Tensor:
        random.seed(m.seed)
        np.random.seed(m.seed)
        model.rng.seed(m.seed)
        return losses(model, x)

    for m.seed in (0, 1):
        yield m, seeded, (x(),)


@program
def checkpoint_with_dropout() -> Steps:
    m = Model(lambda m, x: checkpoint(lambda h: m.b(F.dropout(h)), m.a(x), use_reentrant=False))
    yield m, losses, (x(),)


@program
def model_that_asks_whether_it_is_traced() -> Steps:
    m = Model(lambda m, x: m.b(m.a(x)) * (1.0 if type(x) is Tensor else 5.0))
    yield m, losses, (x(),)


@program
def context_variable() -> Steps:
    m, scale = Model(lambda m, x: m.b(m.a(x))), ContextVar("scale", default=1.0)
    for value in (1.0, 2.0):
        scale.set(value)
        yield m, lambda m, x: losses(m, x) * scale.get(), (x(),)


class Slots:
    __slots__ = ("k",)

    def __init__(self, k: float) -> None:
        self.k = k


@program
def slot_of_an_object() -> Steps:
    m = Model(lambda m, x: m.b(m.a(x) * m.options.k), options=Slots(1.0))
    yield m, losses, (x(),)
    m.options.k = 2.0
    yield m, losses, (x(),)


@program
def module_in_a_variable() -> Steps:
    m, own = Model(lambda m, x: m.b(m.a(x))), types.ModuleType("own")

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return losses(model, x) * own.k

    for own.k in (1.0, 2.0):  # type: ignore[attr-defined]
        yield m, loss, (x(),)


@program
def variable_that_is_assigned_later() -> Steps:
    m = Model(lambda m, x: m.b(m.a(x)))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        try:
            return losses(model, x) * later
        except NameError:
            return losses(model, x)

    yield m, loss, (x(),)
    later = 0
    yield m, loss, (x(),)


@program
def length_of_a_large_dictionary() -> Steps:
    m = Model(lambda m, x: m.b(m.a(x) * len(m.table)), table=dict.fromkeys(range(20_000)))
    yield m, losses, (x(),)
    m.table[-1] = None
    yield m, losses, (x(),)


@program
def shape_of_a_large_tensor() -> Steps:
    m = Model(lambda m, x: m.b(m.a(x) * len(m.table)), table=torch.zeros(20_000))
    for size in (20_000, 30_000):
        m.table.data = torch.zeros(size, dtype=torch.float64)
        yield m, losses, (x(),)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_changes_between_calls_is_seen(name: str) -> None:
    torch.manual_seed(0)
    step: Any = None
    grads = pergrad.Grads()
    for model, loss, batch in PROGRAMS[name]():
        step = step or pergrad.compiled(model, loss, grads, backend="eager")
        for _ in range(3):
            torch.manual_seed(1)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="pergrad.compiled")
                step(*batch)
            torch.manual_seed(1)
            for key, expected in pergrad.grads(model, loss, *batch).items():
                assert_near(grads.result[key], expected, key)


def test_values_of_before_have_their_graph_again_and_new_ones_are_traced_at_their_second_call() -> (
    None
):
    m, norms = Model(lambda m, x: m.b(m.a(x) * m.k)), pergrad.Norms()
    m.k = 1.0
    step = pergrad.compiled(m, losses, norms, backend="eager")
    for _ in range(2):
        step(x())
    assert step.graphs == 1
    m.k = 2.0
    with pytest.warns(
        UserWarning, match=r"'k' of the module has changed since the step was traced"
    ):
        step(x())
    assert step.graphs == 1
    step(x())
    assert step.graphs == 2
    for m.k in (1.0, 2.0):
        step(x())
    assert step.graphs == 2


def test_values_that_the_step_does_not_name_may_change() -> None:
    m, norms = Model(lambda m, x: m.b(m.a(x))), pergrad.Norms()
    task = SimpleNamespace(loss=losses, epoch_of_the_trainer=0, history=[])
    step = pergrad.compiled(m, lambda m, x: task.loss(m, x), norms, backend="eager")
    for epoch in range(4):
        task.epoch_of_the_trainer = epoch
        task.history.append(epoch)
        m.note_of_the_user = epoch
        step(x())
    assert step.graphs == 1


@pytest.mark.parametrize("second", [1.0, 2.0])
def test_a_model_that_is_refused_at_its_first_call_is_never_traced(second: float) -> None:
    m = Model(lambda m, x: m.b(m.a(x)) @ m.v)
    m.v = m.a.weight.t()  # made before the recording
    step = pergrad.compiled(m, losses, pergrad.Norms(), backend="eager")
    for _ in range(3):
        with pytest.raises(pergrad.PergradError, match="summed over the batch"):
            step(x() * second)
    assert step.graphs == 0


def test_a_batch_that_shares_memory_with_what_is_written_to_runs_uncompiled() -> None:
    def doubling(m: Any, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return m.b(m.a(x)) * y

    m, grads = Model(doubling), pergrad.Grads()
    step = pergrad.compiled(m, losses, grads, backend="eager")
    for _ in range(2):
        step(x(), x())
    assert step.graphs == 1
    one = x()
    other = one.clone()
    step(one, one[:])
    for key, expected in pergrad.grads(m, losses, other, other[:]).items():
        assert_near(grads.result[key], expected, key)


def test_no_random_number_of_python_or_numpy_is_drawn_by_a_trace() -> None:
    m = Model(lambda m, x: m.b(m.a(x)))
    step = pergrad.compiled(m, losses, pergrad.Norms(), backend="eager")
    step(x())
    python, state = random.getstate(), np.random.get_state()[1].tolist()
    step(x())
    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == state


def test_a_lazy_module_that_was_never_called_is_refused_by_name() -> None:
    m = Model(lambda m, x: m.b(m.a(x)), lazy=nn.LazyLinear(3))
    step = pergrad.compiled(m, losses, pergrad.Norms(), backend="eager")
    with pytest.raises(
        pergrad.PergradError, match=r"'lazy.weight' of a lazy module has no shape yet"
    ):
        step(x())
