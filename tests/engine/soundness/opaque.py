"""Class 2: opaque functions and hooks that mix samples, forwards or backwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook
from torch.utils.checkpoint import checkpoint

from tests.engine.soundness.judge import Cases

__all__ = ["CASES"]

CASES = Cases()


def centre_gradients(_: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if g is None else g - g.mean(0) for g in inputs)


@torch.library.custom_op("pergrad_tests::relu", mutates_args=())
def centred_relu(x: Tensor) -> Tensor:
    return x - x.mean(0)


centred_relu.register_autograd(lambda ctx, g: g - g.mean(0))


class Centre(torch.autograd.Function):
    """Subtracts the mean over the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - g.mean(0)


class CentreBack(torch.autograd.Function):
    """Centres gradients only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - g.mean(0)


class NumpyCentre(torch.autograd.Function):
    """Subtracts the mean over the batch, by numpy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        a = x.detach().numpy()
        return torch.from_numpy(a - a.mean(0))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - g.mean(0)


class CentredView(torch.autograd.Function):
    """Returns a view, and centres its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - g.mean(0)


class ReversedView(torch.autograd.Function):
    """Returns a view, and reverses its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class Normalizing(torch.autograd.Function):
    """Normalizes the gradient of the whole batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / g.norm()


centred_view, reversed_view = CentredView.apply, ReversedView.apply


@CASES.refused()
def custom_operator_named_relu(m: Any, x: Tensor) -> Tensor:
    return x + m.b(centred_relu(m.a(x)))


@CASES.refused()
def centre(m: Any, x: Tensor) -> Tensor:
    return m.b(Centre.apply(m.a(x)))


@CASES.refused()
def centre_in_the_backward_only(m: Any, x: Tensor) -> Tensor:
    return m.b(CentreBack.apply(m.a(x)))


@CASES.refused()
def numpy_centre(m: Any, x: Tensor) -> Tensor:
    return m.b(NumpyCentre.apply(m.a(x)))


@CASES.refused()
def numpy_centre_residual(m: Any, x: Tensor) -> Tensor:
    return x + m.b(NumpyCentre.apply(m.a(x)))


@CASES.refused()
def vmap_over_features(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.vmap(lambda c: c - c.mean(), in_dims=1, out_dims=1)(m.a(x)))


@CASES.refused()
def tensor_hook_that_centres(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(lambda g: g - g.mean(0))
    return x + m.b(h)


@CASES.exact()
def tensor_hook_that_clamps(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return x + m.b(h)


@CASES.exact()
def tensor_hook_that_looks(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(lambda g: None)
    return x + m.b(h)


def centre_in_place(gradient: Tensor) -> None:
    gradient.sub_(gradient.mean(0))


@CASES.refused()
def tensor_hook_that_centres_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(centre_in_place)
    return x + m.b(h)


@CASES.refused(
    prepare=lambda m, x: m.b.register_full_backward_hook(lambda _, g, __: centre_in_place(g[0]))
)
def module_hook_that_centres_in_place(m: Any, x: Tensor) -> Tensor:
    return x + m.b(m.a(x))


@CASES.refused()
def node_hook_that_reverses_samples(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).sin()
    h.grad_fn.register_hook(lambda of_inputs, of_outputs: (of_inputs[0].flip(0),))
    return x + m.b(h)


@CASES.refused()
def node_hook_before_that_reverses_samples(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.grad_fn.register_prehook(lambda gradients: (gradients[0].flip(0),))
    return x + m.b(h)


@CASES.exact()
def node_hooks_that_look(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.grad_fn.register_hook(lambda *_: None)
    h.grad_fn.register_prehook(lambda *_: None)
    return x + m.b(h)


@CASES.refused(prepare=lambda m, x: m.b.register_full_backward_hook(centre_gradients))
def module_hook_that_centres(m: Any, x: Tensor) -> Tensor:
    return x + m.b(m.a(x))


@CASES.exact(prepare=lambda m, x: m.b.register_full_backward_hook(lambda *_: None))
def module_hook_that_looks(m: Any, x: Tensor) -> Tensor:
    return x + m.b(m.a(x))


def hooked(hook: Any, *, before: bool = False) -> nn.Module:
    """Returns a layer that is no part of the model, with a backward hook."""
    layer = nn.Tanh()
    if before:
        layer.register_full_backward_pre_hook(hook)
    else:
        layer.register_full_backward_hook(hook)
    return layer


@CASES.refused()
def hook_of_a_module_outside_that_centres(m: Any, x: Tensor) -> Tensor:
    layer = hooked(centre_gradients)
    return x + m.b(layer(m.a(x)))


@CASES.refused()
def hook_of_a_module_outside_that_centres_in_place(m: Any, x: Tensor) -> Tensor:
    layer = hooked(lambda _, g, __: centre_in_place(g[0]))
    return x + m.b(layer(m.a(x)))


@CASES.refused()
def hook_before_of_a_module_outside_that_reverses_samples(m: Any, x: Tensor) -> Tensor:
    layer = hooked(lambda _, g: (g[0].flip(0),), before=True)
    return x + m.b(layer(m.a(x)))


@CASES.exact()
def hook_of_a_module_outside_that_looks(m: Any, x: Tensor) -> Tensor:
    looks, returns = hooked(lambda *_: None), hooked(lambda _, g, __: g)
    before = hooked(lambda *_: None, before=True)
    return x + m.b(before(returns(looks(m.a(x)))))


@CASES.refused()
def hook_of_a_checkpointed_module_that_centres(m: Any, x: Tensor) -> Tensor:
    layer = hooked(centre_gradients)
    return x + checkpoint(lambda h: m.b(layer(h)), m.a(x), use_reentrant=False)


@CASES.refused()
def hook_registered_in_the_forward_that_centres(m: Any, x: Tensor) -> Tensor:
    handle = m.b.register_full_backward_hook(centre_gradients)
    try:
        return x + m.b(m.a(x))
    finally:
        handle.remove()


@CASES.refused()
def hook_of_all_modules_that_centres(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    handle = register_module_full_backward_hook(centre_gradients)
    try:
        return x + m.b(h)
    finally:
        handle.remove()


@CASES.refused()
def hook_of_a_node_behind_that_reverses_samples(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).sin() * 2
    behind = h.grad_fn.next_functions[0][0]
    behind.register_hook(lambda of_inputs, of_outputs: (of_inputs[0].flip(0),))
    return x + m.b(h)


@CASES.refused()
def view_that_centres_gradients(m: Any, x: Tensor) -> Tensor:
    return x + m.b(CentredView.apply(m.a(x)))


@CASES.exact()
def view_that_reverses_gradients(m: Any, x: Tensor) -> Tensor:
    return x + m.b(ReversedView.apply(m.a(x)))


@CASES.refused()
def normalizes_gradients(m: Any, x: Tensor) -> Tensor:
    return x + m.b(Normalizing.apply(m.a(x)))


@CASES.refused()
def apply_bound_before_centres(m: Any, x: Tensor) -> Tensor:
    return x + m.b(centred_view(m.a(x)))


@CASES.exact()
def apply_bound_before_reverses(m: Any, x: Tensor) -> Tensor:
    return x + m.b(reversed_view(m.a(x)))


@CASES.exact(loss_fn=lambda m, x: m(x).logsumexp(1))
def logsumexp_losses(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


@CASES.exact()
def function_of_torch_that_keeps_samples_apart(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(2)
    return x + m.b(torch.distributions.Dirichlet(m.a(x).exp() + 1).rsample())


@CASES.exact()
def parts_of_the_batch_by_functions_without_a_handler(m: Any, x: Tensor) -> Tensor:
    first, others = torch.vsplit(m.a(x), [1])
    rest = torch.ops.aten.slice.Tensor(m.b(others), 0, 0, 3)
    return torch.cat([m.b(first), rest])


@CASES.refused()
def part_of_the_batch_beside_another(m: Any, x: Tensor) -> Tensor:
    first, others = torch.vsplit(m.a(x), [2])
    return torch.cat([first * others, others])
