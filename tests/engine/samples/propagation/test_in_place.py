"""In-place functions: which they are, what they compute apart, and the gradients through them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pergrad
from pergrad.engine.samples.propagation.in_place import (
    only_moves,
    out_of_place,
    writes_in_place,
)
from pergrad.errors import PergradError
from tests.engine.exactness import Case, Formula, assert_exact, numbers, of
from tests.engine.samples.propagation.calls import named, of_torch

WRITES = (
    "add_ mul_ relu_ clamp_ zero_ copy_ masked_fill_ index_add_ __iadd__ __isub__ __imul__".split()
)
READS = "add mul relu __add__ __sub__ __getitem__ __radd__ clone __len__ sum sinc".split()


@pytest.mark.parametrize("name", [*WRITES, "__setitem__"])
def test_functions_that_overwrite_their_first_argument_are_found_by_name(name: str) -> None:
    if name != "__isub__":  # one and the same function as another
        assert writes_in_place(getattr(Tensor, name))
    assert writes_in_place(torch.relu_)
    assert writes_in_place(F.relu_)


@pytest.mark.parametrize("name", READS)
def test_functions_that_overwrite_nothing_are_not_taken_for_such(name: str) -> None:
    assert not writes_in_place(getattr(Tensor, name))
    assert out_of_place(getattr(Tensor, name)) is None


PURE = {
    "add_": (numbers(2, 3), 2.5),
    "mul_": (numbers(3),),
    "relu_": (),
    "clamp_": (-0.5, 0.5),
    "sigmoid_": (),
    "masked_fill_": (torch.tensor([True, False, True]), 9.0),
    "index_add_": (0, torch.tensor([1, 1]), numbers(2, 3)),
    "__iadd__": (numbers(2, 3),),
    "__imul__": (numbers(3),),
    "__itruediv__": (2.0,),
    "copy_": (numbers(3),),
}


@pytest.mark.parametrize("name", PURE)
def test_the_pure_form_computes_what_the_function_writes_and_writes_nothing(name: str) -> None:
    func: Any = getattr(Tensor, name)
    pure = out_of_place(func)
    assert pure is not None
    args = PURE[name]
    if name == "add_":
        args = args[:1]
    before = numbers(2, 3)
    target = before.clone()
    found = pure(target, *args)
    assert torch.equal(target, before)
    assert found is not target
    func(target, *args)
    assert torch.equal(found, target)


def test_an_assignment_to_an_index_is_made_on_a_copy() -> None:
    put = out_of_place(Tensor.__setitem__)
    assert put is not None
    before = numbers(3, 4)
    target, expected = before.clone(), before.clone()
    expected[1:, ::2] = 7.0
    assert torch.equal(put(target, (slice(1, None), slice(None, None, 2)), 7.0), expected)
    assert torch.equal(target, before)


def test_a_copy_has_the_shape_and_type_of_its_target() -> None:
    copied = out_of_place(Tensor.copy_)
    assert copied is not None
    target = torch.full((2, 3), float("nan"), dtype=torch.float32)
    target = target.nan_to_num(5.0)
    found = copied(target, numbers(3), non_blocking=True)
    assert found.dtype is torch.float32
    assert found.shape == (2, 3)
    target.copy_(source := numbers(3))
    assert torch.equal(copied(torch.ones(2, 3), source), target)


@pytest.mark.parametrize("func", [Tensor.normal_, Tensor.uniform_])
def test_what_has_no_pure_form_has_none(func: Callable[..., Any]) -> None:
    assert writes_in_place(func)
    assert out_of_place(func) is None or not hasattr(Tensor, func.__name__[:-1])


@pytest.mark.parametrize("func", [Tensor.__ior__, Tensor.__ilshift__, Tensor.__ixor__])
def test_operators_fall_back_on_the_operator_that_writes_nothing(func: Callable[..., Any]) -> None:
    assert writes_in_place(func)
    assert out_of_place(func) is getattr(Tensor, f"__{func.__name__[3:]}")


def test_names_that_end_in_two_underscores_are_not_in_place() -> None:
    own = named("nothing_like_it__")
    assert not writes_in_place(own)
    assert out_of_place(own) is None
    assert writes_in_place(named("nothing_like_it_"))


def test_a_function_without_an_out_of_place_form_runs_on_a_copy() -> None:
    pure = out_of_place(Tensor.zero_)
    assert pure is not None
    assert pure.__name__ == "zero"
    t = numbers(3)
    before = t.clone()
    assert not pure(t).any()
    assert torch.equal(t, before)


def test_the_name_of_a_function_that_is_not_of_torch_says_nothing() -> None:
    def add_(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    assert not writes_in_place(add_)
    assert out_of_place(add_) is None
    assert writes_in_place(of_torch(add_))
    assert out_of_place(of_torch(add_)) is not None


# -- the gradients through them

D = 4


def written_row(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = m.w * x[:, 1]
    return y * m.v


def squared_then_overwritten(m: Any, x: Tensor) -> Tensor:
    y = x * 1.0
    y.mul_(m.w)  # its gradient needs y as it was
    y.add_(m.v)
    y *= m.w
    return y


def copied(m: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y.copy_(m.w)
    return y * x


def derived_in_place(m: Any, x: Tensor) -> Tensor:
    w = m.w.clone()
    w.mul_(m.v)
    w += m.v
    return x * w


def constant_becomes_a_weight(m: Any, x: Tensor) -> Tensor:
    w = torch.zeros(D, dtype=x.dtype)
    w.add_(m.w)
    w[1] = m.v[2]
    return x * w


def set_rows_of_a_constant(m: Any, x: Tensor) -> Tensor:
    table = torch.zeros(2, D, dtype=x.dtype)
    table[0] = m.w
    table[1] = m.v
    return x @ table.T


def weight_into_samples_by_a_mask(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y.masked_fill_(x > 0, 0.0)
    y[:, 2:] = m.w[2:]
    return y * x


WAYS = {
    f.__name__.replace("_", " "): Case(lambda f=f: Formula(f, w=numbers(D), v=numbers(D)), of((D,)))
    for f in (
        squared_then_overwritten,
        copied,
        derived_in_place,
        constant_becomes_a_weight,
        set_rows_of_a_constant,
        weight_into_samples_by_a_mask,
    )
}
WAYS["written row"] = Case(lambda: Formula(written_row, w=numbers(), v=numbers(D)), of((D,)))


@pytest.mark.parametrize("size", [1, D, 3])
@pytest.mark.parametrize("name", WAYS)
def test_gradients_through_a_write_are_those_of_the_loop(name: str, size: int) -> None:
    assert_exact(WAYS[name], size)


def test_values_written_are_those_of_the_plain_model() -> None:
    model, x = Formula(squared_then_overwritten, w=numbers(D), v=numbers(D)), numbers(3, D)
    with pergrad.record(model, pergrad.Norms()):
        found = model(x)
        found.sum().backward()
    assert torch.equal(found, model(x))


def test_a_parameter_overwritten_in_place_is_refused_and_keeps_its_value() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.w.mul_(m.v)
        return x * m.w

    assert_refused(forward, "a parameter")


@pytest.mark.parametrize(
    "view", [lambda w: w[1:], lambda w: w.view(2, 2)[0], lambda w: w.view(2, 2).t()]
)
def test_a_parameter_overwritten_through_a_view_is_refused(
    view: Callable[[Tensor], Tensor],
) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        view(m.w).mul_(m.v[0])
        return x * m.w

    assert_refused(forward, "a view of it")


def assert_refused(forward: Callable[..., Tensor], what: str) -> None:
    model = Formula(forward, w=numbers(D), v=numbers(D))
    before = model.w.detach().clone()
    with (
        pytest.raises(PergradError, match=f"the function changes {what} in place"),
        pergrad.record(model, pergrad.Norms()),
    ):
        model(numbers(3, D)).sum().backward()
    assert torch.equal(model.w, before)


def test_a_write_keeps_the_dtype_of_its_target() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        w = m.w.float()
        w.mul_(m.v)
        assert w.dtype is torch.float32
        return x * w.double()

    model, x = Formula(forward, w=numbers(D), v=numbers(D)), numbers(3, D)
    with pergrad.record(model, pergrad.Grads()) as grads:
        model(x).sum().backward()
    expected = (x * model.v).detach()
    torch.testing.assert_close(grads.result["w"], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "name", "t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_ detach_".split()
)
def test_functions_that_only_move_return_a_view_out_of_place(name: str) -> None:
    assert only_moves(getattr(Tensor, name))


@pytest.mark.parametrize(
    "name", "mul_ copy_ zero_ resize_ resize_as_ requires_grad_ __iadd__ __setitem__ t".split()
)
def test_functions_that_write_or_return_no_view_do_not_only_move(name: str) -> None:
    assert not only_moves(getattr(Tensor, name))
