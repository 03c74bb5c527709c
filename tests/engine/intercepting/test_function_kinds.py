"""What the recorder does with a function: attributes, sizes, backwards, what moves nothing, the rest."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import wrap_torch_function

import pergrad
from pergrad.engine.intercepting.function_kinds import Kind, kind_of
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import Formula, numbers

PASSIVE = """
    dim element_size stride storage_offset is_contiguous is_floating_point is_complex
    is_signed data_ptr get_device __hash__ __repr__ __format__ ndimension
    is_pinned untyped_storage storage __reduce_ex__ is_nonzero
    is_inference is_same_size allclose equal __bool__ item tolist numpy
""".split()
HARMLESS = """
    detach detach_ requires_grad_ __deepcopy__ new_zeros new_ones new_empty new_full new_tensor
""".split()
LIKE = "zeros_like ones_like empty_like rand_like randn_like full_like".split()
ORDINARY = """
    add __add__ __radd__ matmul sum view clone to float t transpose unbind chunk __getitem__ expand sigmoid
""".split()
WRITING = "add_ __iadd__ __setitem__ copy_ zero_ fill_ normal_".split()


def getter(attribute: str) -> Callable[..., Any]:
    return getattr(Tensor, attribute).__get__  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", PASSIVE)
def test_what_gives_no_tensor_is_passive(name: str) -> None:
    assert kind_of(getattr(Tensor, name)) is Kind.PASSIVE


@pytest.mark.parametrize("func", [torch.result_type, torch.can_cast, torch.is_tensor, torch.equal])
def test_questions_about_tensors_are_passive(func: Callable[..., Any]) -> None:
    assert kind_of(func) is Kind.PASSIVE


@pytest.mark.parametrize("name", HARMLESS)
def test_methods_through_which_no_gradient_flows_are_harmless(name: str) -> None:
    assert kind_of(getattr(Tensor, name)) is Kind.HARMLESS


@pytest.mark.parametrize("name", LIKE)
def test_new_tensors_like_a_weight_are_harmless(name: str) -> None:
    assert kind_of(getattr(torch, name)) is Kind.HARMLESS


@pytest.mark.parametrize("name", ORDINARY)
def test_what_computes_or_moves_numbers_is_ordinary(name: str) -> None:
    assert kind_of(getattr(Tensor, name)) is Kind.ORDINARY


@pytest.mark.parametrize("name", WRITING)
def test_what_writes_in_place_may_write_to_a_buffer(name: str) -> None:
    assert kind_of(getattr(Tensor, name)) is Kind.WRITING


@pytest.mark.parametrize(
    "func", [F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm]
)
def test_what_updates_statistics_writes_to_buffers(func: Callable[..., Any]) -> None:
    assert kind_of(func) is Kind.WRITING


def test_the_name_of_a_foreign_function_makes_it_nothing_else() -> None:
    for name in ("size", "dim", "detach", "add_", "register_hook", "backward"):

        def foreign(x: Tensor) -> Tensor:
            return x * 2

        foreign.__name__ = foreign.__qualname__ = name
        assert kind_of(foreign) is Kind.ORDINARY


def test_registering_a_hook_is_told_apart() -> None:
    assert kind_of(Tensor.register_hook) is Kind.HOOK
    assert kind_of(Tensor.register_post_accumulate_grad_hook) is Kind.HOOK


def test_what_depends_on_the_graph_is_told_apart() -> None:
    asks = [getter("is_leaf"), getter("_base"), getter("retains_grad")]
    for func in (*asks, Tensor._is_view, Tensor.retain_grad):
        assert kind_of(func) is Kind.PLACE


@pytest.mark.parametrize("func", [F.linear, F.layer_norm, torch.cat, torch.einsum])
def test_functions_of_torch_are_ordinary(func: Callable[..., Any]) -> None:
    assert kind_of(func) is Kind.ORDINARY


@pytest.mark.parametrize("attribute", ["T", "mT", "H", "mH", "real", "imag"])
def test_attributes_that_are_tensors_are_functions(attribute: str) -> None:
    assert kind_of(getter(attribute)) is Kind.ORDINARY


@pytest.mark.parametrize(
    "attribute",
    ["dtype", "device", "grad", "requires_grad", "ndim", "layout"],
)
def test_other_attributes_are_passive(attribute: str) -> None:
    assert kind_of(getter(attribute)) is Kind.PASSIVE


def test_nodes_of_the_graph_are_told_apart() -> None:
    assert kind_of(getter("grad_fn")) is Kind.NODE


def test_the_data_of_a_weight_is_harmless() -> None:
    assert kind_of(getter("data")) is Kind.HARMLESS


def test_shape_and_size_are_told_apart_from_everything_else() -> None:
    assert kind_of(getter("shape")) is Kind.SHAPE
    for func in (Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__):
        assert kind_of(func) is Kind.SIZE


@pytest.mark.parametrize("attribute", ["grad", "requires_grad"])
def test_setting_an_attribute_is_passive(attribute: str) -> None:
    assert kind_of(getattr(Tensor, attribute).__set__) is Kind.PASSIVE


def test_setting_the_data_is_told_apart() -> None:
    assert kind_of(Tensor.data.__set__) is Kind.SET_DATA  # type: ignore[attr-defined]


@pytest.mark.parametrize("func", [Tensor.backward, torch.autograd.backward, torch.autograd.grad])
def test_every_way_to_run_a_backward_is_one(func: Callable[..., Any]) -> None:
    assert kind_of(func) is Kind.BACKWARD


# -- what follows from it


def test_weights_may_be_looked_at_without_a_use() -> None:
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        scale = 1 + m.w.detach().abs().sum() + m.w.data.sum() + len(m.w) + m.w.dim() + m.w.stride(0)
        scale = scale + torch.ones_like(m.w).sum() + m.w.new_zeros(2).sum() + m.w.numel()
        assert copy.deepcopy(m.w) is not m.w
        assert m.w.requires_grad
        assert m.w.dtype is torch.float64
        assert bool((m.w.detach() == m.w.data).all())
        return F.linear(x, m.w) * scale

    model, x = Formula(forward, w=numbers(3, 3)), numbers(3, 3)

    def loss(model: Any, x: Tensor) -> Tensor:
        return model(x).square().sum(1)

    with pergrad.record(model, pergrad.Grads()) as grads:
        loss(model, x).sum().backward()
    assert_near(grads.result["w"], loop_grads(model, loss, x)["w"])


def test_functions_of_the_user_that_ask_for_overrides_are_transparent() -> None:
    @wrap_torch_function(lambda x: (x,))
    def relu(x: Tensor) -> Tensor:
        return x - x.mean(0)

    assert kind_of(relu) is Kind.TRANSPARENT
    assert kind_of(F.relu) is Kind.ORDINARY
