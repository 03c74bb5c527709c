"""The batch in a module's arguments, in whatever they are wrapped."""

from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding

import pergrad
from pergrad.errors import BatchSizeError, UnsupportedFunctionError
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import Formula, assert_all_near, numbers

D = 4


@dataclass
class Pair:
    x: Tensor
    scale: float
    inner: Any = None


class Graph:
    """As torch_geometric has it: tensors are attributes of any object."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.name = "graph"


Named = namedtuple("Named", ["x"])
WRAPPED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda x: {"x": x}, lambda given: given["x"]),
    "named tuple": (Named, lambda given: given.x),
    "what a tokenizer gives": (lambda x: BatchEncoding({"x": x}), lambda given: given["x"]),
    "mapping": (lambda x: UserDict(x=x), lambda given: given["x"]),
    "read-only mapping": (lambda x: MappingProxyType({"x": x}), lambda given: given["x"]),
    "dataclass": (lambda x: Pair(x, 2.0), lambda given: given.x * given.scale),
    "dataclass in a mapping in a list": (
        lambda x: [UserDict(pair=Pair(x, 1.0))],
        lambda given: given[0]["pair"].x,
    ),
    "mapping in a dataclass": (
        lambda x: Pair(x, 1.0, UserDict(y=x + 1)),
        lambda given: given.inner["y"],
    ),
}


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", WRAPPED)
def test_samples_are_found_in_what_the_arguments_are_wrapped_in(name: str, by_name: bool) -> None:
    wrap, unwrap = WRAPPED[name]
    model = Formula(lambda m, given: torch.tanh(unwrap(given) @ m.w), w=numbers(D, D))
    model.forward = lambda given: model.function(model, given)  # type: ignore[method-assign]

    def loss(model: Callable[..., Tensor], x: Tensor) -> Tensor:
        output = model(given=wrap(x)) if by_name else model(wrap(x))
        return (output**2).sum()

    x = numbers(D, D)
    expected = loop_grads(model, loss, x)
    assert_all_near(pergrad.grads(model, loss, x), expected)
    loss(pergrad.call_for_per_sample_grads(model), x).backward()
    assert_all_near({"w": model.w.__dict__.pop("grad_sample")}, expected)
    assert not vars(x)


def test_object_with_tensors_as_attributes_is_named() -> None:
    model = Formula(lambda m, graph: graph.x @ m.w, w=numbers(D, D))
    with pytest.raises(BatchSizeError, match="a Graph, with the tensors x as attributes"):
        pergrad.grads(model, lambda m, graph: m(graph).sum(), Graph(numbers(3, D)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_refused_by_name(layout: torch.layout) -> None:
    model, rows = nn.Linear(3, 2), [torch.randn(2, 3), torch.randn(4, 3)]
    nested = torch.nested.nested_tensor(rows, layout=layout)
    with pytest.raises(UnsupportedFunctionError, match=r"a nested tensor.*owners="):
        pergrad.norms(model, lambda model, x: model(x).sum(), nested)

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        parts = [row[: n + 1] for n, row in enumerate(model(x))]
        made = torch.nested.as_nested_tensor(parts, layout=layout)
        return made.to_padded_tensor(0.0).square().sum((1, 2))

    with pytest.raises(UnsupportedFunctionError, match=r"makes a nested tensor.*owners="):
        pergrad.norms(model, loss_fn, torch.randn(4, 5, 3))


class Nests(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([row[:1] for row in x])
        return super().forward(rows.to_padded_tensor(0.0))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_that_nothing_has_seen_being_made_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedFunctionError, match=r"gets a nested tensor.*owners="):
        pergrad.norms(Nests(3, 2), lambda m, x: m(x).sum((1, 2)), torch.randn(4, 5, 3))


def test_an_inference_tensor_is_refused_as_an_argument_and_exact_as_a_constant() -> None:
    model, x = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)
    with torch.inference_mode():
        rows, shift = x.clone(), torch.randn(2, dtype=torch.float64)
    with pytest.raises(UnsupportedFunctionError, match=r"an inference tensor.*: clone it"):
        pergrad.norms(model, lambda m, x: m(x).sum(1), rows)

    def losses(m: nn.Module, x: Tensor) -> Tensor:
        return (m(x) + shift).square().sum(1)

    for name, grad in loop_grads(model, losses, x).items():
        assert_near(pergrad.grads(model, losses, x)[name], grad, name)
