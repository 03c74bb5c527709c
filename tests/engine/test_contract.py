"""`call_for_per_sample_grads` and what a module may do inside and around its forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import pergrad
from pergrad.testing import loop_grads
from tests.engine.loop_check import (
    EXACT,
    Reduction,
    assert_grad_samples,
    check,
    double,
    reduce,
    weighted,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_module_without_parameters_gives_its_plain_output() -> None:
    x = double(4, 3, 5)
    module = nn.InstanceNorm1d(3)
    assert_close(pergrad.call_for_per_sample_grads(module)(x), module(x))


def test_fully_frozen_module_gives_its_plain_output_and_input_gradient() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4)).double()
    model.requires_grad_(False)
    x = double(5, 3).requires_grad_()
    cotangent = double(5, 4)
    (pergrad.call_for_per_sample_grads(model)(x) * cotangent).sum().backward()
    (plain,) = torch.autograd.grad((model(x) * cotangent).sum(), x)
    assert_close(x.grad, plain, **EXACT)
    assert all(not hasattr(parameter, "grad_sample") for parameter in model.parameters())


def small_convnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 4, 3, stride=2, padding="valid", bias=False),
        nn.InstanceNorm2d(4, affine=True),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(4 * 3 * 3, 8),
        nn.ReLU(inplace=True),
        nn.LayerNorm(8),
        nn.Linear(8, 5),
    ).double()


@pytest.mark.parametrize("needs_grad", [False, True], ids=["input", "input with grad"])
@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
def test_convnet_with_inplace_relus(loss_reduction: Reduction, needs_grad: bool) -> None:
    check(small_convnet(), double(4, 3, 16, 16), loss_reduction, needs_grad=needs_grad)


@pytest.mark.parametrize("batch", [1, 3, 4, 6, 16, 40])
def test_batch_size_may_equal_any_other_size(batch: int) -> None:
    check(small_convnet(), double(batch, 3, 16, 16), needs_grad=True)


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Linear(4, 4), (4, 4)),
        (lambda: nn.Linear(4, 4), (4, 4, 4, 4)),
        (lambda: nn.Linear(5, 1), (1, 1, 5)),
        (lambda: nn.Conv1d(3, 3, 3), (3, 3, 3)),
        (lambda: nn.Conv2d(2, 2, 2, groups=2), (2, 2, 2, 2)),
        (lambda: nn.LayerNorm((3, 3)), (3, 3, 3)),
        (lambda: nn.GroupNorm(2, 4), (4, 4, 4)),
        (lambda: nn.InstanceNorm1d(4, affine=True), (4, 4, 4)),
    ],
    ids=["linear", "linear 4-d", "linear 1", "conv1d", "conv2d", "layer", "group", "instance"],
)
def test_all_sizes_equal(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    check(build().double(), double(*shape), "mean", needs_grad=True)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 4)
        self.right = nn.Linear(5, 4, bias=False)

    def forward(self, left: Tensor, *, right: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(self.left(left)) * self.right(right) * scale


@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
def test_module_called_with_keywords_only(loss_reduction: Reduction) -> None:
    model = TwoInputs().double()
    left, right, cotangent = double(6, 3), double(6, 5), double(6, 4)

    def losses(model: Any, left: Tensor, right: Tensor, cotangent: Tensor) -> Tensor:
        return (model(left=left, right=right, scale=2.0) * cotangent).sum(1)

    expected = loop_grads(model, losses, left, right, cotangent)
    wrapped = pergrad.call_for_per_sample_grads(model, loss_reduction=loss_reduction)
    reduce(losses(wrapped, left, right, cotangent), loss_reduction).backward()
    assert_grad_samples(model, expected)


class Nested(nn.Module):
    """Takes its tensors from a nested structure, and gives them back in one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        first, second = inputs["pair"]
        return {"out": [self.linear(first), self.linear(second).relu()], "label": "kept"}


def test_inputs_and_outputs_may_be_nested() -> None:
    model = Nested().double()
    first, second = double(5, 3).requires_grad_(), double(5, 2, 3)

    def losses(model: Any, first: Tensor, second: Tensor) -> Tensor:
        output = model({"pair": (first, second)})
        assert output["label"] == "kept"
        return (output["out"][0] ** 2).sum(1) + (output["out"][1] ** 3).sum((1, 2))

    expected = loop_grads(model, losses, first.detach(), second)
    losses(pergrad.call_for_per_sample_grads(model), first, second).sum().backward()
    assert_grad_samples(model, expected)
    (plain,) = torch.autograd.grad(losses(model, first, second).sum(), first)
    assert_close(first.grad, plain, **EXACT)


class UsedTwice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Linear(4, 4), (5, 4)),
        (lambda: nn.Linear(4, 4), (5, 3, 4)),
        (lambda: nn.Conv2d(3, 3, 3, padding=1), (5, 3, 4, 4)),
        (lambda: nn.LayerNorm(4), (5, 4)),
        (lambda: nn.GroupNorm(2, 4), (5, 4, 3)),
        (lambda: nn.InstanceNorm1d(4, affine=True), (5, 4, 3)),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), (5, 4)),
    ],
    ids=["linear", "linear 3-d", "conv2d", "layer_norm", "group_norm", "instance_norm", "nested"],
)
@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
def test_module_used_twice_in_one_forward(
    build: Callable[[], nn.Module], shape: tuple[int, ...], loss_reduction: Reduction
) -> None:
    check(UsedTwice(build()).double(), double(*shape), loss_reduction, needs_grad=True)


class TiedAutoencoder(nn.Module):
    """One weight under two names: the decoder is the encoder's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(index)))


def test_weight_tied_between_two_modules() -> None:
    check(TiedAutoencoder().double(), torch.randint(6, (4, 5)))


@pytest.mark.parametrize("same_wrapper", [True, False])
@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
def test_two_calls_before_one_backward_add_up(
    loss_reduction: Reduction, same_wrapper: bool
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    first, second = double(5, 3), double(5, 7, 3)

    def losses(model: Any, first: Tensor, second: Tensor, other: Any = None) -> Tensor:
        other = model if other is None else other
        return (model(first) ** 2).sum(1) + (other(second) ** 3).sum((1, 2))

    expected = loop_grads(model, losses, first, second)
    wrapped = pergrad.call_for_per_sample_grads(model, loss_reduction=loss_reduction)
    other = wrapped
    if not same_wrapper:
        other = pergrad.call_for_per_sample_grads(model, loss_reduction=loss_reduction)
    reduce(losses(wrapped, first, second, other), loss_reduction).backward()
    assert_grad_samples(model, expected)


@pytest.mark.parametrize("sizes", [(4, 6), (4, 1), (1, 4)], ids=str)
def test_two_calls_of_different_batch_sizes_are_refused(sizes: tuple[int, int]) -> None:
    # A batch of one would broadcast over the other call's rows, and look like an answer.
    model = nn.Linear(3, 2).double()
    wrapped = pergrad.call_for_per_sample_grads(model)

    def step() -> None:
        (wrapped(double(sizes[0], 3)).sum() + wrapped(double(sizes[1], 3)).sum()).backward()

    with pytest.raises(RuntimeError):
        step()


def test_call_that_is_not_used_in_the_loss_adds_nothing() -> None:
    model = nn.Linear(3, 2).double()
    x, cotangent = double(4, 3), double(4, 2)
    expected = loop_grads(model, weighted, x, cotangent)
    wrapped = pergrad.call_for_per_sample_grads(model)
    wrapped(double(4, 3))
    weighted(wrapped, x, cotangent).sum().backward()
    assert_grad_samples(model, expected)


def test_part_of_the_model_may_stay_unused() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(3, 2)
            self.unused = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Branches().double()
    x = double(4, 3)
    expected = loop_grads(model.used, lambda model, x: model(x).sum(1), x)
    pergrad.call_for_per_sample_grads(model)(x).sum().backward()
    for name, parameter in model.used.named_parameters():
        assert_close(parameter.grad_sample, expected[name], **EXACT)
    for parameter in model.unused.parameters():
        rows = getattr(parameter, "grad_sample", None)
        assert rows is None or not rows.any()
        assert parameter.grad is None


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool, wrap_all: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU())
        self.second = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        self.use_reentrant = use_reentrant
        self.wrap_all = wrap_all

    def forward(self, x: Tensor) -> Tensor:
        def rerun(block: nn.Module, x: Tensor) -> Tensor:
            return checkpoint(block, x, use_reentrant=self.use_reentrant)

        hidden = rerun(self.first, x) if self.wrap_all else self.first(x)
        return rerun(self.second, hidden + 1.0)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved tensors", "reentrant"])
@pytest.mark.parametrize("wrap_all", [False, True], ids=["one block", "every block"])
@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
def test_checkpointing_inside_the_module(
    loss_reduction: Reduction, wrap_all: bool, use_reentrant: bool
) -> None:
    model = Checkpointed(use_reentrant=use_reentrant, wrap_all=wrap_all).double()
    x, cotangent = double(5, 2, 4).requires_grad_(), double(5, 2, 3)
    plain = Checkpointed(use_reentrant=False, wrap_all=False).double()
    plain.load_state_dict(model.state_dict())
    expected = loop_grads(plain, weighted, x.detach(), cotangent)
    wrapped = pergrad.call_for_per_sample_grads(model, loss_reduction=loss_reduction)
    reduce(weighted(wrapped, x, cotangent), loss_reduction).backward()
    assert_grad_samples(model, expected)
    loss = reduce(weighted(plain, x, cotangent), loss_reduction)
    (plain_grad,) = torch.autograd.grad(loss, x)
    assert_close(x.grad, plain_grad, **EXACT)


def test_checkpointing_of_an_input_without_grad() -> None:
    check(Checkpointed(use_reentrant=False, wrap_all=True).double(), double(5, 2, 4))


def test_backward_may_run_after_the_model_was_used_otherwise() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, cotangent = double(5, 3), double(5, 2)
    expected = loop_grads(model, weighted, x, cotangent)
    loss = weighted(pergrad.call_for_per_sample_grads(model), x, cotangent).sum()
    with torch.no_grad():
        model(double(9, 3))
    torch.autograd.grad(model(double(7, 3)).sum(), list(model.parameters()))
    loss.backward()
    assert_grad_samples(model, expected)


def test_model_is_untouched_by_the_call() -> None:
    model = small_convnet()
    parameters = dict(model.named_parameters())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    pergrad.call_for_per_sample_grads(model)(double(4, 3, 16, 16)).sum().backward()
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert all(not parameter._backward_hooks for parameter in model.parameters())
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())
    assert all(set(vars(p)) <= {"grad_sample"} for p in model.parameters())
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[key], state[key]) for key in state)


def test_given_batch_size_lets_arguments_have_other_sizes() -> None:
    class WithPositions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.linear(x) * scale

    model = WithPositions().double()
    x, scale, cotangent = double(5, 4, 3), double(4, 2), double(5, 4, 2)

    def losses(model: Any, x: Tensor, cotangent: Tensor) -> Tensor:
        return (model(x, scale) * cotangent).sum((1, 2))

    expected = loop_grads(model, losses, x, cotangent)
    wrapped = pergrad.call_for_per_sample_grads(model, batch_size=5)
    losses(wrapped, x, cotangent).sum().backward()
    assert_grad_samples(model, expected)


def test_batch_may_be_the_second_dimension() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    x, cotangent = double(5, 6, 3).requires_grad_(), double(5, 6, 2)

    def losses(model: Any, x: Tensor, cotangent: Tensor) -> Tensor:
        return (model(x) * cotangent).sum((0, 2))

    expected = loop_grads(model, losses, x.detach(), cotangent, batch_dim=1)
    wrapped = pergrad.call_for_per_sample_grads(model, batch_first=False)
    losses(wrapped, x, cotangent).sum().backward()
    assert_grad_samples(model, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grad_sample_has_the_dtype_of_the_parameter(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    pergrad.call_for_per_sample_grads(model)(torch.randn(5, 3, dtype=dtype)).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad_sample.dtype == dtype
        assert parameter.grad_sample.shape == (5, *parameter.shape)


def test_functional_use_of_own_parameters() -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(double(4, 3))
            self.gain = nn.Parameter(double(4))

        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(F.linear(x, weight=self.matrix), (4,), weight=self.gain)

    check(Raw(), double(5, 2, 3), needs_grad=True)


def test_two_backward_passes_of_one_call_add_up() -> None:
    model, x = nn.Linear(3, 2).double(), double(4, 3)
    expected = loop_grads(model, lambda m, x: m(x).square().sum(1), x)
    loss = pergrad.call_for_per_sample_grads(model)(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for name, p in model.named_parameters():
        assert_close(p.grad_sample, 2 * expected[name], **EXACT)
