"""Everything in torch.nn that has parameters, with its options, against the loop over samples."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.errors import PergradError
from pergrad.testing import loop_grads
from tests.engine.exactness import assert_all_near, assert_exact, numbers, total
from tests.engine.module_cases import CASES, WORDS, D, T

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor"),
    pytest.mark.filterwarnings("ignore:Lazy modules"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask"),
]

NAMED = {
    f"{cls.__name__}: {name}": case for cls, own in CASES.items() for name, case in own.items()
}


@pytest.mark.parametrize("size", [T, 3, 1])
@pytest.mark.parametrize("name", NAMED)
def test_per_sample_gradients_are_those_of_the_loop(name: str, size: int) -> None:
    assert_exact(NAMED[name], size)


# What a class of torch.nn may be constructed with; one that has parameters then must have a case.
GUESSES: list[tuple[Any, ...]] = [(), (4,), (4, 4), (4, 4, 2), (2, 4), (4, 4, [2])]
WITHOUT_CALL = {nn.Module, nn.Container, nn.ParameterList, nn.ParameterDict}


def has_parameters(cls: type[nn.Module]) -> bool:
    options = {"affine": True} if "affine" in inspect.signature(cls).parameters else {}
    guesses = GUESSES
    if issubclass(cls, nn.TransformerEncoder | nn.TransformerDecoder):
        guesses = [(nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 1)]
    for guess in guesses:
        try:
            module = cls(*guess, **options)
        except (TypeError, ValueError, AssertionError, RuntimeError):
            continue
        if any(True for _ in module.parameters()):
            return True
    return False


@pytest.mark.filterwarnings("ignore")  # a wrong guess may warn
def test_every_module_of_torch_that_has_parameters_has_a_case() -> None:
    classes = [c for c in vars(nn).values() if inspect.isclass(c) and issubclass(c, nn.Module)]
    having = {cls for cls in classes if cls not in WITHOUT_CALL and has_parameters(cls)}
    assert not having - CASES.keys()
    assert len(having) > 40


# The lengths of the bags differ: a loop of its own.


@pytest.mark.parametrize("lengths", [[2, 0, 3, 1], [1, 1, 1, 1], [0, 4], [3]])
@pytest.mark.parametrize("last", [False, True], ids=["offsets", "last offset"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_different_lengths(lengths: list[int], last: bool, mode: str) -> None:
    torch.manual_seed(0)
    model = nn.EmbeddingBag(WORDS, 3, mode=mode, include_last_offset=last).double()
    bags = [torch.randint(WORDS, (length,)) for length in lengths]
    index = torch.cat(bags)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    offsets = ends if last else ends[:-1]

    rows = []
    for own in bags:
        out = model(own, torch.tensor([0, len(own)] if last else [0]))
        rows += torch.autograd.grad(total(out), model.weight)
    got = pergrad.grads(model, lambda model: total(model(index, offsets)), batch_size=len(lengths))
    assert_all_near(got, {"weight": torch.stack(rows)})


@pytest.mark.parametrize("lazy", [nn.LazyLinear, nn.LazyConv1d], ids=lambda cls: cls.__name__)
def test_lazy_module_is_refused_before_its_first_call(lazy: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    model = (lazy(3) if lazy is nn.LazyLinear else lazy(3, 2)).double()
    x = numbers(3, D, T)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return total(model(x))

    with pytest.raises(PergradError, match="lazy"):
        pergrad.grads(model, loss, x)
    model(x)
    assert_all_near(pergrad.grads(model, loss, x), loop_grads(model, loss, x))
