"""Products with a loss are recognised by the function that wrote them, and by no other."""

import types

import pytest
import torch

from pergrad.runtime import trainers


def function_of(module: str, name: str) -> types.FunctionType:
    """A function of that module that multiplies, as far as its caller can see."""
    source = f"def {name}(ask):\n    return ask()"
    scope: dict[str, object] = {"__name__": module}
    exec(source, scope)
    found = scope[name]
    assert isinstance(found, types.FunctionType)
    return found


@pytest.mark.parametrize(("where", "what"), trainers._KNOWN.items())
def test_known_functions_are_recognised(where: tuple[str, str], what: str) -> None:
    assert function_of(*where)(trainers.scaling_trainer) == what


def test_what_a_known_function_calls_is_not() -> None:
    outer = function_of("transformers.trainer", "training_step")
    inner = function_of("my_project", "compute_loss")
    assert outer(lambda: inner(trainers.scaling_trainer)) is None


def test_scaler_of_torch_is_where_it_is_looked_for() -> None:
    kind = torch.amp.GradScaler
    assert (kind.scale.__module__, kind.scale.__name__) in trainers._KNOWN
