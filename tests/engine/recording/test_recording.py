"""`record` and `grads`: what they give, what they refuse, and what they leave of a model's life."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pergrad
from pergrad.engine.intercepting.tracker import TAG
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.recording import Recording
from pergrad.errors import BatchSizeError, ScopeError
from pergrad.testing import assert_near, loop_grads
from tests.engine.failing import FailsBetween


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).double()


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def losses(model: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def batch(size: int = 4) -> tuple[Tensor, Tensor]:
    return data(size, 4), torch.arange(size) % 3


def assert_all_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, grads in expected.items():
        assert_near(found[name], grads, name)


def recorded(model: nn.Module, loss: Callable[[], Tensor], **options: Any) -> dict[str, Tensor]:
    with pergrad.record(model, pergrad.Grads(), **options) as grads:
        loss().backward()
    result: dict[str, Tensor] = grads.result
    return result


# -- results


@pytest.mark.parametrize("size", [4, 1, 5])
@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
def test_recorded_grads_equal_the_loop(loss_reduction: Any, size: int) -> None:
    model, (x, y) = mlp(), batch(size)
    found = recorded(
        model,
        lambda: F.cross_entropy(model(x), y, reduction=loss_reduction),
        loss_reduction=loss_reduction,
    )
    assert_all_near(found, loop_grads(model, losses, x, y))
    assert all(p.grad is None for p in model.parameters())


def test_samples_may_be_the_second_dimension() -> None:
    model, x, cotangent = mlp(), data(6, 4, 4), data(6, 4, 3)

    def loss(model: nn.Module, x: Tensor, cotangent: Tensor) -> Tensor:
        return (model(x) * cotangent).sum((0, 2))

    found = pergrad.grads(model, loss, x, cotangent, batch_first=False)
    assert_all_near(found, loop_grads(model, loss, x, cotangent, batch_dim=1))


def test_frozen_parameters_are_left_out() -> None:
    model, (x, y) = mlp(), batch()
    model[0].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    found = pergrad.grads(model, losses, x, y)
    assert "0.weight" not in found
    assert "3.bias" not in found
    assert_all_near(found, loop_grads(model, losses, x, y))


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(2, 2)
        self.seen = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.seen(x)  # but the loss does not depend on it
        return self.used(x)


def test_parameters_that_the_loss_does_not_reach_have_zeros() -> None:
    model, (x, y) = WithUnused().double(), batch()
    found = pergrad.grads(model, losses, x, y)
    assert_all_near(found, loop_grads(model, losses, x, y))
    assert not found["unused.weight"].any()
    assert not found["seen.bias"].any()


def test_tied_weights_have_one_entry() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    model[2].weight = model[0].weight
    x = data(5, 4)
    found = pergrad.grads(model, lambda model, x: (model(x) ** 2).sum(1), x)
    assert_all_near(found, loop_grads(model, lambda model, x: (model(x) ** 2).sum(1), x))


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, *, x: Tensor, scale: float) -> Tensor:
        return self.inner(x) * scale


def test_module_may_be_called_by_keywords_only() -> None:
    model, (x, y) = ByKeyword(), batch()

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(scale=2.0, x=x), y, reduction="none")

    assert_all_near(pergrad.grads(model, loss, x, y), loop_grads(model, loss, x, y))


def test_module_may_be_called_twice() -> None:
    model, (x, _) = mlp(), batch()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * model(2 * x)).sum(1)

    assert_all_near(pergrad.grads(model, loss, x), loop_grads(model, loss, x))


def test_two_backwards_in_one_block_add_up() -> None:
    model, (x, y) = mlp(), batch()
    with pergrad.record(model, pergrad.Grads()) as grads:
        (model(x) ** 2).sum().backward()
        losses(model, x, y).sum().backward()
    expected = loop_grads(model, lambda m, x, y: (m(x) ** 2).sum(1) + losses(m, x, y), x, y)
    assert_all_near(grads.result, expected)


def test_loss_may_use_tensors_of_the_caller() -> None:
    model, (x, y) = mlp(), batch(3)
    weights = data(3)

    def loss(model: nn.Module, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        return losses(model, x, y) * weights

    found = pergrad.grads(model, loss, x, y, weights)
    assert_all_near(found, loop_grads(model, loss, x, y, weights))


class WithBuffer(nn.Module):
    """A buffer whose every size is the batch size: it belongs to the model all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mix", data(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ self.mix + self.mix[0]


def test_buffers_of_the_shape_of_a_batch_are_constants() -> None:
    model, (x, y) = WithBuffer().double(), batch(4)
    assert_all_near(pergrad.grads(model, losses, x, y), loop_grads(model, losses, x, y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grads_have_the_dtype_of_the_parameters(dtype: torch.dtype) -> None:
    model, (x, y) = mlp().to(dtype), batch()
    found = pergrad.grads(model, losses, x.to(dtype), y)
    assert {grads.dtype for grads in found.values()} == {dtype}
    assert_all_near(found, loop_grads(model, losses, x.to(dtype), y))


def test_autocast_is_followed() -> None:
    model, (x, y) = mlp().float(), batch()

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return losses(model, x.float(), y)

    found = pergrad.grads(model, loss, x, y)
    expected = loop_grads(model, loss, x, y)
    assert found.keys() == expected.keys()
    for name, grads in expected.items():
        assert found[name].dtype == torch.float32
        assert_near(found[name].bfloat16(), grads.bfloat16(), name)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.use_reentrant is None:
            x = self.inner(x)
        else:
            x = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return self.last(x)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_changes_nothing(use_reentrant: bool) -> None:
    model, plain, (x, y) = (
        Checkpointed(use_reentrant).double(),
        Checkpointed(None).double(),
        batch(),
    )
    plain.load_state_dict(model.state_dict())
    assert_all_near(pergrad.grads(model, losses, x, y), loop_grads(plain, losses, x, y))


def test_dropout_draws_what_a_plain_forward_draws() -> None:
    model = nn.Sequential(nn.Linear(4, 50), nn.Dropout(), nn.Linear(50, 2)).double()
    x = data(6, 4)
    torch.manual_seed(3)
    plain = model(x)
    torch.manual_seed(3)
    with pergrad.record(model, pergrad.Grads()) as grads:
        output = model(x)
        output.sum().backward()
    assert_near(output, plain)
    total = torch.autograd.grad(plain.sum(), list(model.parameters()))
    for found, expected in zip(grads.result.values(), total, strict=True):
        assert_near(found.sum(0), expected)


def test_gradient_of_the_input_is_that_of_an_ordinary_backward() -> None:
    model, (x, y) = mlp(), batch()
    (expected,) = torch.autograd.grad(losses(model, x.requires_grad_(), y).sum(), x)
    recorded(model, lambda: losses(model, x, y).sum())
    assert x.grad is not None
    assert_near(x.grad, expected)


# -- inside the block the model is itself


def test_model_is_itself_inside_the_block() -> None:
    model, (x, y) = mlp(), batch()
    with pergrad.record(model, pergrad.Grads()):
        assert all(type(p) is nn.Parameter for p in model.parameters())
        twin = copy.deepcopy(model)
        state = model.state_dict()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses(model, x, y).sum().backward()
        optimizer.step()  # no .grad: changes nothing
        assert all(not vars(p) for p in twin.parameters())
    assert state.keys() == model.state_dict().keys()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p is not q


def test_evaluation_without_gradients_inside_the_block_counts_for_nothing() -> None:
    model, (x, y) = mlp(), batch()
    with pergrad.record(model, pergrad.Grads()) as grads:
        with torch.no_grad():
            model(x)
        losses(model, x, y).sum().backward()
    assert_all_near(grads.result, loop_grads(model, losses, x, y))


# -- refusals


def no_call(model: nn.Module, x: Tensor) -> None:
    with pergrad.record(model, pergrad.Grads()):
        pass


def no_backward(model: nn.Module, x: Tensor) -> None:
    with pergrad.record(model, pergrad.Grads()):
        model(x)


def late_backward(model: nn.Module, x: Tensor) -> None:
    with pergrad.record(model, pergrad.Grads()):
        loss = model(x).sum()
        model(x).sum().backward()
    loss.backward()


def nested(model: nn.Module, x: Tensor) -> None:
    with pergrad.record(model, pergrad.Grads()), pergrad.record(model, pergrad.Grads()):
        pass


def nested_call(model: nn.Module, x: Tensor) -> None:
    with pergrad.record(model, pergrad.Grads()):
        pergrad.call_for_per_sample_grads(model)(x)


def early_result(model: nn.Module, x: Tensor) -> None:
    with pergrad.record(model, pergrad.Grads()) as grads:
        model(x).sum().backward()
        _ = grads.result


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (no_call, "was not called inside the `record` block"),
        (no_backward, "no gradient reached a recorded parameter"),
        (late_backward, r"call backward\(\) inside the `record` block"),
        (nested, "cannot be nested"),
        (nested_call, "cannot be nested"),
        (early_result, "leave the `record` block first"),
        (lambda model, x: pergrad.Grads().result, "no result yet"),
    ],
    ids=["no call", "no backward", "late", "nested", "nested call", "early result", "unused"],
)
def test_use_out_of_order_is_refused(act: Callable[..., object], message: str) -> None:
    model = mlp()
    with pytest.raises(ScopeError, match=message):
        act(model, data(4, 4))
    assert_clean(model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, BatchSizeError, "must be positive"),
        ({"batch_size": "4"}, BatchSizeError, "integer"),
        ({"batch_size": 3}, BatchSizeError, "batch size of 4"),
        ({"loss_reduction": "max"}, pergrad.PergradError, "sum or mean"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type, message: str) -> None:
    model, (x, y) = mlp(), batch()
    with pytest.raises(error, match=message):
        pergrad.grads(model, losses, x, y, **options)
    assert_clean(model)


def test_nothing_to_compute_is_refused() -> None:
    with (
        pytest.raises(pergrad.PergradError, match="at least one quantity"),
        pergrad.record(mlp()),
    ):
        pass


@pytest.mark.parametrize("quantity", ["grads", pergrad.Grads, 3], ids=str)
def test_what_is_no_quantity_is_refused(quantity: Any) -> None:
    with pytest.raises(pergrad.PergradError), pergrad.record(mlp(), quantity):
        pass


def test_what_is_no_module_is_refused() -> None:
    with (
        pytest.raises(pergrad.PergradError, match=r"must be nn\.Module, got function"),
        pergrad.record(losses, pergrad.Grads()),  # type: ignore[arg-type]
    ):
        pass


# -- afterwards nothing is left


def assert_clean(model: nn.Module) -> None:
    """No hook, tag or gradient is left, and an ordinary step is ordinary."""
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    for p in model.parameters():
        assert not vars(p)
        assert not p._backward_hooks
        assert p.grad is None
    assert not torch.overrides._get_current_function_mode_stack()
    x = data(3, 4)
    model(x).sum().backward()
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None
        assert_near(p.grad, grad)
        p.grad = None


def test_nothing_is_left_after_a_block() -> None:
    model, (x, y) = mlp(), batch()
    recorded(model, lambda: losses(model, x, y).sum())
    assert not vars(x)
    assert not vars(y)
    assert_clean(model)


@pytest.mark.parametrize(
    ("where", "error"),
    # The engine has tried the function's backward, and says what it raised.
    [("forward", KeyError), ("backward", KeyError), ("function", pergrad.PergradError)],
)
def test_nothing_is_left_after_an_exception(where: str, error: type[Exception]) -> None:
    model, (x, y) = FailsBetween().double(), batch()
    model.fails = where
    quantity = pergrad.Grads()
    with pytest.raises(error, match=f"in the {where}"), pergrad.record(model, quantity):
        losses(model, x, y).sum().backward()
    model.fails = None
    assert not vars(x)
    with pytest.raises(ScopeError):
        _ = quantity.result
    assert_clean(model)
    assert_all_near(pergrad.grads(model, losses, x, y), loop_grads(model, losses, x, y))


def test_quantity_may_be_used_again_after_a_reset() -> None:
    model, grads = mlp(), pergrad.Grads()
    for size in (4, 2):
        x, y = batch(size)
        grads.reset()
        with pergrad.record(model, grads):
            losses(model, x, y).sum().backward()
        assert_all_near(grads.result, loop_grads(model, losses, x, y))


def test_gradient_of_the_input_alone_is_nobody_elses_affair() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(5, 3, dtype=torch.float64)

    def adversarial(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        start = x.detach().requires_grad_()
        (direction,) = torch.autograd.grad(model(start).sum(), start)
        return model(x + 0.1 * direction.sign()).square().sum(1)

    expected = loop_grads(model, adversarial, x)
    found = pergrad.grads(model, adversarial, x)
    for name, value in expected.items():
        assert_near(found[name], value, name)


def test_second_derivatives_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (direction,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return direction.square().sum(1)

    with pytest.raises(pergrad.PergradError, match="create_graph"):
        pergrad.grads(model, penalty, torch.randn(5, 3, dtype=torch.float64))


# -- a recording by itself


def test_one_quantity_passed_twice_is_refused() -> None:
    grads = pergrad.Grads()
    with pytest.raises(pergrad.PergradError, match="twice"), pergrad.record(mlp(), grads, grads):
        pass


def test_parameters_that_are_not_asked_for_are_frozen_within_only() -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)
    recording = Recording(model, [pergrad.Grads()], Options(params="2.*"))
    before = [p.requires_grad for p in model.parameters()]
    with recording.intercepting():
        within = {name for name, p in model.named_parameters() if p.requires_grad}
    assert within == {"2.weight", "2.bias"}
    assert [p.requires_grad for p in model.parameters()] == before


def test_frozen_parameters_are_trainable_again_after_an_exception() -> None:
    model = mlp()
    recording = Recording(model, [pergrad.Grads()], Options(params="2.*"))
    with pytest.raises(ZeroDivisionError), recording.intercepting():
        _ = 1 / 0
    assert all(p.requires_grad for p in model.parameters())


def test_arguments_are_tagged_within_and_not_afterwards() -> None:
    model, x = mlp(), torch.randn(3, 4, dtype=torch.float64)
    recording = Recording(model, [pergrad.Grads()], Options())
    recording.enter_forward((x,), {})
    assert hasattr(x, TAG)
    recording.leave_forward()
    recording.clean_up()
    assert not hasattr(x, TAG)


def test_ending_without_a_call_or_a_backward_is_refused() -> None:
    recording = Recording(mlp(), [pergrad.Grads()], Options())
    with pytest.raises(ScopeError, match="was not called"):
        recording.check_complete()
    recording.begin(3)
    with pytest.raises(ScopeError, match="no gradient reached"):
        recording.check_complete()


def test_a_batch_cut_within_the_block_is_recorded() -> None:
    """With a given batch size the cut runs before anything says where the samples are."""
    model, x = mlp(), torch.randn(4, 4, dtype=torch.float64)
    expected = loop_grads(model, lambda m, x: m(x).square().sum(1), x[:2])
    with pergrad.record(model, pergrad.Grads(), batch_size=2) as grads:
        model(x[:2]).square().sum().backward()
    for name, rows in expected.items():
        assert_near(grads.result[name], rows, name)
