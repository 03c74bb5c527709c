"""Python functions of torch run by their bodies, and backwards that a mode sees into."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary
from torch.utils.checkpoint import checkpoint

from pergrad.engine.intercepting.composites import (
    checks_overrides,
    is_composite,
    run_backward,
    without_override_check,
)
from tests.engine.exactness import Case, Formula, assert_exact, numbers, of


class Seen(TorchFunctionMode):
    """Writes down the names of the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Refuses(TorchFunctionMode):
    """Lets no function that asks through."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(func)


@pytest.mark.parametrize("func", [F.normalize, F.cosine_similarity, torch.einsum, torch.norm])
def test_python_functions_are_composites_and_builtins_are_not(func: Any) -> None:
    assert is_composite(func) is (type(func).__name__ == "function")


def test_builtins_and_methods_are_no_composites() -> None:
    assert is_composite(F.normalize)
    assert not is_composite(torch.add)
    assert not is_composite(Tensor.add)
    assert not is_composite(F.linear)


def test_the_body_computes_what_the_function_computes_and_its_calls_are_seen() -> None:
    x = numbers(3, 4)
    body = without_override_check(F.normalize)
    with Seen() as whole:
        F.normalize(x, p=3.0, dim=0)
    with Seen() as seen:
        found = body(x, p=3.0, dim=0)
    assert whole.names[0] == "normalize"
    assert "normalize" not in seen.names
    assert seen.names
    assert torch.equal(found, F.normalize(x, p=3.0, dim=0))


def asks(x: Tensor, power: int = 2, *, by: float = 3.0) -> Tensor:
    if has_torch_function_unary(x):
        return handle_torch_function(asks, (x,), x, power, by=by)  # type: ignore[no-any-return]
    return x**power * by


def test_defaults_by_position_and_by_name_stay_with_the_body() -> None:
    x = numbers(3)
    body = without_override_check(asks)
    with Seen() as seen:
        assert torch.equal(body(x), x**2 * 3)
        assert torch.equal(body(x, 3, by=2.0), x**3 * 2)
    assert "asks" not in seen.names
    assert body.__name__ == "asks"
    with pytest.raises(AssertionError), Refuses():
        asks(x)


def test_closures_stay_with_the_body() -> None:
    factor = 7.0

    def scaled(x: Tensor) -> Tensor:
        if has_torch_function_unary(x):
            return handle_torch_function(scaled, (x,), x)  # type: ignore[no-any-return]
        return x * factor

    x = numbers(3)
    assert torch.equal(without_override_check(scaled)(x), x * 7)


def test_the_function_itself_still_asks() -> None:
    without_override_check(asks)
    x = numbers(3)
    with Seen() as seen:
        asks(x)
    assert seen.names[0] == "asks"


# -- backwards


def twice_differentiable() -> tuple[Tensor, Tensor]:
    x = numbers(4).requires_grad_()
    return x, (x**3).sum()


def test_a_backward_gives_what_torch_gives() -> None:
    x, y = twice_differentiable()
    run_backward(torch.autograd.backward, Seen(), (y,), {"retain_graph": True})
    torch.testing.assert_close(x.grad, 3 * x.detach() ** 2)
    (grad,) = run_backward(torch.autograd.grad, Seen(), (y, [x]), {})
    torch.testing.assert_close(grad, 3 * x.detach() ** 2)


def test_the_mode_sees_what_the_engine_calls_back_and_nothing_before() -> None:
    x = numbers(4).requires_grad_()
    y = checkpoint(lambda t: torch.sin(t) * 2, x, use_reentrant=False)
    mode = Seen()
    run_backward(torch.autograd.backward, mode, (y.sum(),), {})
    assert "sin" in mode.names
    assert "backward" not in mode.names
    assert "ones_like" not in mode.names
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


def test_a_backward_does_not_hand_itself_to_a_mode_that_is_on() -> None:
    x, y = twice_differentiable()
    with Seen() as outer:
        run_backward(torch.autograd.backward, Seen(), (y,), {})
    assert "backward" not in outer.names
    assert x.grad is not None


def test_without_the_name_of_the_engine_the_mode_sees_the_whole_backward() -> None:
    """What happens should torch rename it: a few more functions are seen, and the result is the same."""
    names = {**torch.autograd.backward.__globals__}
    engine = names.pop("_engine_run_backward")
    names["_run"] = engine
    code = torch.autograd.backward.__code__
    renamed = tuple("_run" if n == "_engine_run_backward" else n for n in code.co_names)
    function = type(asks)
    other = function(
        code.replace(co_names=renamed), names, "backward", torch.autograd.backward.__defaults__
    )
    x = numbers(4).requires_grad_()
    y = checkpoint(lambda t: torch.sin(t) * 2, x, use_reentrant=False)
    mode = Seen()
    run_backward(other, mode, (y.sum(),), {})
    assert "sin" in mode.names
    assert "backward" not in mode.names
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


# -- with weights in them

D = 4
WAYS = {
    "normalize": lambda m, x: F.linear(x, m.w) * F.normalize(x, dim=-1) @ F.normalize(m.w, dim=0),
    "cosine": lambda m, x: F.cosine_similarity(x, m.v.unsqueeze(0)),
    "partial": lambda m, x: functools.partial(F.softmax, dim=-1)(x * m.v),
    "norm": lambda m, x: torch.norm(x * m.v, dim=-1) * torch.norm(m.w),
    "gelu, dropout": lambda m, x: F.dropout(F.gelu(x * m.v), 0.0),
    "glu": lambda m, x: F.glu(x @ m.w),
}


@pytest.mark.parametrize("size", [1, D])
@pytest.mark.parametrize("name", WAYS)
def test_gradients_through_composites_are_those_of_the_loop(name: str, size: int) -> None:
    case = Case(lambda: Formula(WAYS[name], w=numbers(D, D), v=numbers(D)), of((D,)))
    assert_exact(case, size)


def test_functions_that_ask_for_overrides_are_told_by_the_names_they_use() -> None:
    def asks(x: Tensor) -> Tensor:
        return handle_torch_function(asks, (x,), x) if has_torch_function_unary(x) else x

    def asks_elsewhere(x: Tensor) -> Tensor:
        return x if torch.overrides.is_tensor_like(x) else torch.sin(x)

    assert checks_overrides(asks)
    assert checks_overrides(F.normalize) == (
        "has_torch_function_variadic" in F.normalize.__code__.co_names
    )
    assert not checks_overrides(asks_elsewhere)
    assert not checks_overrides(torch.sin)
