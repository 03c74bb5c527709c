"""Class 9: parameters with hooks, made or replaced in the forward, and complex ones."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.soundness.judge import Cases

__all__ = ["CASES"]

CASES = Cases()


@CASES.exact(prepare=lambda m, x: m.a.weight.register_hook(lambda g: g * 0))
def hook_that_scales(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


@CASES.refused(prepare=lambda m, x: m.a.weight.register_post_accumulate_grad_hook(lambda p: None))
def hook_after_accumulation(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


@CASES.refused()
def hook_registered_in_the_forward(m: Any, x: Tensor) -> Tensor:
    m.a.weight.register_hook(lambda g: g * 2)
    return m.b(m.a(x))


@CASES.refused()
def hook_registered_after_a_use(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    m.a.weight.register_hook(lambda g: g * 2)
    return m.b(h)


@CASES.refused()
def hook_after_accumulation_registered_in_the_forward(m: Any, x: Tensor) -> Tensor:
    m.a.weight.register_post_accumulate_grad_hook(lambda p: None)
    return m.b(m.a(x))


@CASES.exact()
def hook_after_accumulation_of_an_input(m: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    x.register_post_accumulate_grad_hook(lambda p: None)
    return m.b(m.a(x))


def _hook_on_the_node(m: Any, x: Tensor) -> None:
    m.node = m.a.weight.expand_as(m.a.weight).grad_fn.next_functions[0][0]  # without it, it is gone
    m.node.register_prehook(lambda gradients: (gradients[0] * 2,))


@CASES.refused(prepare=_hook_on_the_node)
def hook_on_the_node_behind(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


class Doubled(Tensor):
    """Doubles products with a matrix."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is Tensor.matmul else result


class Centred(Tensor):
    """Subtracts the mean over the batch from the results of layers."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result - result.mean(0) if func is F.linear else result


def _of(kind: type[Tensor]) -> dict[str, Any]:
    return {"own": nn.Parameter(torch.randn(3, 3).as_subclass(kind))}


@CASES.exact(parts=lambda: _of(Doubled))
def parameter_of_a_class_that_changes_results(m: Any, x: Tensor) -> Tensor:
    return (m.b((m.a(x) @ m.own).tanh()) @ m.own.t().exp()).as_subclass(Tensor)


@CASES.exact()
def input_of_a_class_that_changes_results(m: Any, x: Tensor) -> Tensor:
    return (m.a(x.as_subclass(Doubled)) @ m.w).as_subclass(Tensor)


@CASES.refused(parts=lambda: _of(Centred))
def parameter_of_a_class_that_mixes(m: Any, x: Tensor) -> Tensor:
    return F.linear(m.a(x), m.own).as_subclass(Tensor)


@CASES.refused()
def layer_made_in_the_forward(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "c"):
        m.c = nn.Linear(3, 3)
    return m.c(m.a(x))


@CASES.refused()
def parameter_made_anew(m: Any, x: Tensor) -> Tensor:
    m.w = nn.Parameter(m.w.detach() * 2)
    return m.a(x) @ m.w


@CASES.refused()
def layer_weight_made_anew(m: Any, x: Tensor) -> Tensor:
    m.a.weight = nn.Parameter(m.a.weight.detach() * 2)
    return m.a(x)


@CASES.exact(parts=lambda: {"cw": nn.Parameter(torch.randn(3, 3, dtype=torch.complex128))})
def complex_parameter(m: Any, x: Tensor) -> Tensor:
    return torch.view_as_real(x.to(torch.complex128) @ m.cw).flatten(1)


@CASES.exact()
def layer_frozen_for_a_while(m: Any, x: Tensor) -> Tensor:
    m.b.requires_grad_(False)
    h = m.b(m.a(x))
    m.b.requires_grad_(True)
    return h + m.b(x)


@CASES.exact()
def weights_as_numbers(m: Any, x: Tensor) -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # torch advises to detach them
        return m.a(x) * float(m.w[0, 0]) + m.b(x) * int(m.w.sum() * 10)


@CASES.exact()
def derived_weights_are_no_leaves(m: Any, x: Tensor) -> Tensor:
    first, second = m.w * 2, m.w.T
    assert not first.is_leaf
    assert not second.is_leaf
    assert m.w.is_leaf
    return m.a(x) @ first @ second


@CASES.exact()
def casts_to_their_own_type_are_themselves(m: Any, x: Tensor) -> Tensor:
    derived = m.w * 2
    assert m.w.to(x.dtype) is m.w
    assert derived.to(x) is derived
    assert m.w.contiguous() is m.w
    return m.a(x) @ m.w.to(x.dtype) @ derived.to(x)


@CASES.refused()
def node_of_a_derived_weight(m: Any, x: Tensor) -> Tensor:
    w = m.w * 2
    return m.a(x) @ (w if w.grad_fn is not None else m.b.weight)


@CASES.refused()
def base_of_a_view_of_a_weight(m: Any, x: Tensor) -> Tensor:
    w = m.w.T
    return m.a(x) @ (w if w._base is m.w else m.b.weight)


@CASES.refused()
def view_of_a_weight(m: Any, x: Tensor) -> Tensor:
    w = m.w.T
    return m.a(x) @ (w if w._is_view() else m.b.weight)


@CASES.refused()
def gradient_retained_by_a_derived_weight(m: Any, x: Tensor) -> Tensor:
    w = m.w * 2
    w.retain_grad()
    return m.a(x) @ w


@CASES.exact()
def places_of_samples(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).sin()
    h.retain_grad()
    assert not h.is_leaf
    assert h.retains_grad
    assert not h._is_view()
    assert h.grad_fn is not None
    return m.b(h)


@CASES.refused()
def sparse_weight_beside_samples(m: Any, x: Tensor) -> Tensor:
    return torch.sparse.mm(m.w.to_sparse(), m.a(x).T).T


@CASES.exact()
def sparse_weight_made_dense_again(m: Any, x: Tensor) -> Tensor:
    return m.a(x) @ (m.w.to_sparse() * 2).to_dense()


@CASES.exact()
def weight_scaled_by_a_detached_statistic(m: Any, x: Tensor) -> Tensor:
    mean, norm = m.a(x).abs().mean().detach(), m.a(x).norm().detach()
    return m.a(x) @ (m.w * mean / norm)


@CASES.refused()
def weight_scaled_by_a_statistic(m: Any, x: Tensor) -> Tensor:
    return m.a(x) @ (m.w * m.a(x).abs().mean())
