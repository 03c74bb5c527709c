"""`keep_grad=True` leaves `.grad` as plain training does, bit for bit, and records the same quantities."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import pergrad
from pergrad.errors import MixedSamplesError, UnseenUseError
from pergrad.testing import assert_near, loop_grads

D = 8


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(10, D), nn.Linear(D, D)

    def forward(self, index: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.mix(self.embed(index))), self.embed.weight)


class EveryRung(nn.Module):
    """Broadcast, expanded, derived and masked VJP."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.token = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(1, D))
        self.square = nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.expand(x.shape[0], -1, -1)
        scaled = torch.cat([token, x * self.scale + self.scale.exp()], 1) @ (self.square.t() * 2)
        points = self.square[None].expand(x.shape[0], -1, -1)
        return scaled + torch.cdist(x.mean(1, keepdim=True), points)


class Positions(nn.Module):
    """Rows of tables that constant indices choose."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table, self.more = nn.Embedding(6, D), nn.Parameter(torch.randn(6, D))
        self.register_buffer("places", torch.tensor([[2, 0, 2, 5]]))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.more[self.places[0]] * self.more.index_select(0, self.places[0])
        return x[:, :4] + self.table(self.places) * rows


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        def twice(t: Tensor) -> Tensor:
            return self.second(torch.tanh(self.second(t)))

        found: Tensor = checkpoint(twice, self.first(x), use_reentrant=self.use_reentrant)
        return found


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Dropout(), nn.Linear(5, 3)),
    "transformer": lambda: nn.TransformerEncoderLayer(D, 2, 16, batch_first=True),
    "convolution": lambda: nn.Sequential(nn.Conv1d(6, 4, 3), nn.GroupNorm(2, 4), nn.PReLU()),
    "tied": Tied,
    "every rung": EveryRung,
    "positions": Positions,
    "weight norm": lambda: nn.Sequential(weight_norm(nn.Linear(D, 5)), nn.Tanh()),
    "checkpoint": lambda: Checkpointed(False),
    "reentrant checkpoint": lambda: Checkpointed(True),
}
each_model = pytest.mark.parametrize("name", MODELS)


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    return model, torch.randint(10, (4, 6)) if name == "tied" else torch.randn(4, 6, D).double()


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1)


def plain(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    other = copy.deepcopy(model)
    for p, q in zip(other.parameters(), model.parameters(), strict=True):
        p.grad = None if q.grad is None else q.grad.clone()
    torch.manual_seed(1)
    losses(other, x).mean().backward()
    return {name: p.grad for name, p in other.named_parameters()}


def kept(model: nn.Module, x: Tensor, *quantities: Any, **options: Any) -> None:
    torch.manual_seed(1)
    with pergrad.record(model, *quantities, keep_grad=True, loss_reduction="mean", **options):
        losses(model, x).mean().backward()


def assert_same(model: nn.Module, expected: dict[str, Tensor | None]) -> None:
    for name, p in model.named_parameters():
        grad = expected[name]
        assert p.grad is not None
        assert grad is not None
        assert torch.equal(p.grad, grad), name


@each_model
@pytest.mark.parametrize("is_accumulating", [False, True])
def test_grad_is_that_of_plain_training_bit_for_bit(name: str, is_accumulating: bool) -> None:
    model, x = made(name)
    if is_accumulating:
        for p in model.parameters():
            p.grad = torch.randn_like(p)
    expected = plain(model, x)
    kept(model, x, pergrad.Norms(), pergrad.ClippedSum(1.0))
    assert_same(model, expected)


@each_model
def test_quantities_are_those_without_it(name: str) -> None:
    model, x = made(name)
    model.eval()
    grads = pergrad.Grads()
    kept(model, x, grads)
    if isinstance(model, Checkpointed):
        model.use_reentrant = (
            False  # the loop asks for gradients by `grad`, which it does not allow
        )
    for key, g in loop_grads(model, losses, x).items():
        assert_near(grads.result[key], g, key)


def test_recurrent_layers_keep_their_gradient_up_to_rounding() -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(D, 5, batch_first=True).double(), torch.randn(4, 6, D).double()
    model(x)[0].square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with pergrad.record(model, pergrad.Norms(), keep_grad=True):
        model(x)[0].square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name])


@pytest.mark.parametrize("memory", ["low", "high"])
def test_every_memory_of_a_clipped_sum_keeps_it(memory: Any) -> None:
    model, x = made("mlp")
    expected = plain(model, x)
    kept(model, x, pergrad.ClippedSum(1.0, memory=memory))
    assert_same(model, expected)


def test_parameters_that_are_not_asked_for_keep_theirs_too() -> None:
    model, x = made("mlp")
    expected = plain(model, x)
    norms = pergrad.Norms()
    kept(model, x, norms, params="3.*")
    assert_same(model, expected)
    assert norms.names == ("3.weight", "3.bias")


def test_hooks_after_accumulation_run() -> None:
    model, x = made("mlp")
    seen: list[Tensor] = []
    model[0].weight.register_post_accumulate_grad_hook(seen.append)
    kept(model, x, pergrad.Norms())
    assert seen == [model[0].weight]


@pytest.mark.parametrize("has_grad", [False, True])
def test_after_an_error_grad_is_as_before(has_grad: bool) -> None:
    model, x = made("mlp")
    for p in model.parameters():
        p.grad = torch.ones_like(p) if has_grad else None
    before = [p.grad for p in model.parameters()]

    class Failing(pergrad.Norms):
        def finish(self) -> Tensor:
            raise ValueError("too bad")

    with pytest.raises(ValueError, match="too bad"):
        kept(model, x, Failing())
    with (
        pytest.raises(MixedSamplesError),
        pergrad.record(model, pergrad.Norms(), keep_grad=True),
    ):
        model(x).softmax(0).max().backward()
    for p, grad in zip(model.parameters(), before, strict=True):
        assert p.grad is grad
        assert grad is None or bool((grad == 1).all())
    expected = plain(model, x)
    kept(model, x, pergrad.Norms())
    assert_same(model, expected)


def test_use_out_of_sight_is_refused_as_ever() -> None:
    model, x = made("mlp")
    unseen = model[0].weight.square().sum()  # a graph from before the block
    with (
        pytest.raises(UnseenUseError, match=r"0\.weight"),
        pergrad.record(model, pergrad.Norms(), keep_grad=True),
    ):
        (losses(model, x).sum() + unseen).backward()
    assert model[0].weight.grad is None
