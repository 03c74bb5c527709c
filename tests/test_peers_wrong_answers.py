"""The wrong answers that other systems give without an error, right here.

One section for each, numbered as in the survey that found them: who is wrong, and by how much.
Where the peer's mistake is in a norm, the full gradients that the norm is made of are checked.
"""

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
from tests.engine.loop_check import EXACT, assert_grad_samples, double

Losses = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def cubed(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Score each sample by an uneven function of its output: (B,)."""
    return ((model(x) + 0.5) ** 3).flatten(1).sum(1)


def assert_exact(model: nn.Module, *batch: Tensor, losses: Losses = cubed) -> None:
    """Compare both ways in, the functional and the wrapped, with one backward a sample."""
    expected = loop_grads(model, losses, *batch)
    got = pergrad.grads(model, losses, *batch)
    assert got.keys() == expected.keys()
    for name, rows in got.items():
        assert_close(rows, expected[name], **EXACT, msg=lambda text, name=name: f"{name}: {text}")
    wrapped = pergrad.call_for_per_sample_grads(model, batch_size=batch[0].shape[0])
    losses(wrapped, *batch).sum().backward()
    assert_grad_samples(model, expected)
    for parameter in model.parameters():
        parameter.grad_sample = None  # type: ignore[attr-defined]


# 1. ExpandedWeights, Opacus hooks and Opacus ghost: norms up to 2.8 times the true value.


@pytest.mark.parametrize("padding_idx", [0, 3, -1])
def test_padding_idx_gets_no_gradient(padding_idx: int) -> None:
    model = nn.Sequential(nn.Embedding(6, 4, padding_idx=padding_idx), nn.Linear(4, 3)).double()
    index = torch.randint(6, (5, 8))
    index[0] = padding_idx % 6
    index[1:, ::2] = padding_idx % 6
    assert_exact(model, index)
    rows = pergrad.grads(model, cubed, index)["0.weight"]
    assert not rows[:, padding_idx].any()
    assert not rows[0].any()
    assert rows[1:].any()


# 2. Opacus, Conv2d with padding_mode="reflect": 37% error.


@pytest.mark.parametrize("padding_mode", ["reflect", "replicate", "circular"])
def test_padding_mode_of_a_convolution_is_honoured(padding_mode: Any) -> None:
    model = nn.Conv2d(3, 4, 3, padding=2, stride=2, padding_mode=padding_mode).double()
    assert_exact(model, double(5, 3, 7, 6))


# 3. Opacus, a position embedding of a (1, T) index: a grad_sample of batch 1.


class WithPositions(nn.Module):
    def __init__(self, *, keep_dim: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.positions = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 3)
        self.keep_dim = keep_dim

    def forward(self, index: Tensor) -> Tensor:
        steps = torch.arange(index.shape[1])
        steps = steps[None] if self.keep_dim else steps
        return self.head(torch.tanh(self.words(index) + self.positions(steps)))


@pytest.mark.parametrize("keep_dim", [True, False], ids=["(1, T)", "(T,)"])
@pytest.mark.parametrize("batch", [1, 3, 5], ids=["B = 1", "B < T", "B = T"])
def test_broadcast_position_embedding_has_a_row_for_each_sample(batch: int, keep_dim: bool) -> None:
    assert_exact(WithPositions(keep_dim=keep_dim).double(), torch.randint(7, (batch, 5)))


# 4. ExpandedWeights under activation checkpointing: 40-60% error.


class CheckpointedBlocks(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU()) for _ in range(3)
        )
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved tensors", "reentrant"])
def test_activation_checkpointing_changes_nothing(use_reentrant: bool) -> None:
    model = CheckpointedBlocks(use_reentrant=use_reentrant).double()
    plain = CheckpointedBlocks(use_reentrant=False).double()
    plain.load_state_dict(model.state_dict())
    x = double(5, 3, 4).requires_grad_()
    expected = loop_grads(plain, cubed, x.detach())
    cubed(pergrad.call_for_per_sample_grads(model), x).sum().backward()
    assert_grad_samples(model, expected)
    (grad,) = torch.autograd.grad(cubed(plain, x).sum(), x)
    assert_close(x.grad, grad, **EXACT)


# 5. fastDP: tied weights clip to 1.06 under a bound of 1; module reuse 98% off, grouped
#    convolution 83%.


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(index))))


def test_tied_weights_add_both_uses() -> None:
    assert_exact(TiedLanguageModel().double(), torch.randint(7, (4, 6)))


def test_clipping_with_tied_weights_keeps_the_bound() -> None:
    model, bound = TiedLanguageModel().double(), 1.0
    index = torch.randint(7, (4, 6))
    rows = [grad.flatten(1) for grad in pergrad.grads(model, cubed, index).values()]
    norms = torch.cat(rows, dim=1).norm(dim=1)
    true_rows = [grad.flatten(1) for grad in loop_grads(model, cubed, index).values()]
    true_grads = torch.cat(true_rows, dim=1)
    clipped = true_grads * (bound / norms).clamp(max=1.0)[:, None]
    assert (norms > bound).any()
    assert (clipped.norm(dim=1) <= bound * (1 + 1e-9)).all()


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(self.norm(x)))
        return x


@pytest.mark.parametrize("shape", [(5, 4), (5, 3, 4)], ids=str)
def test_module_used_three_times_adds_every_use(shape: tuple[int, ...]) -> None:
    assert_exact(Reused().double(), double(*shape))


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_grouped_convolution(dims: int, groups: int) -> None:
    cls = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    model = cls(4, 8, 3, padding=1, groups=groups).double()
    assert_exact(model, double(5, 4, *[4] * dims))


# 6. Opacus ghost on a 4-D Linear input: the norms of the batch before.


@pytest.mark.parametrize("shape", [(3, 4), (3, 2, 4), (3, 2, 5, 4), (3, 2, 5, 2, 4)], ids=str)
def test_linear_takes_input_of_any_rank(shape: tuple[int, ...]) -> None:
    assert_exact(nn.Linear(4, 6).double(), double(*shape))


def test_two_batches_in_a_row_each_give_their_own_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    for x in (double(3, 2, 5, 4), double(3, 2, 5, 4), double(7, 4)):
        assert_exact(model, x)


# 7. Ghost norms through Gram matrices in bf16: up to 500% error on inputs that cancel.


@pytest.mark.parametrize("steps", [64, 256])
def test_bf16_gradients_of_cancelling_inputs_keep_their_norm(steps: int) -> None:
    batch, width = 4, 16
    # Rows of one large mean under weights of alternating sign: products of ten thousands cancel
    # to ones. All numbers are exact in bf16, so that the reference sees the same problem.
    x = (100.0 + torch.randint(-4, 5, (batch, steps, width)) * 0.5).to(torch.bfloat16)
    sign = (1.0 - 2.0 * (torch.arange(steps) % 2)).to(torch.bfloat16)
    model = nn.Linear(width, 8, bias=False, dtype=torch.bfloat16)
    reference = nn.Linear(width, 8, bias=False, dtype=torch.float64)

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * sign.to(x.dtype)[None, :, None]).sum((1, 2))

    rows = pergrad.grads(model, losses, x)["weight"]
    expected = loop_grads(reference, losses, x.double())["weight"]
    assert rows.dtype == torch.bfloat16
    error = (rows.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert error.max() < 2.0**-8


# 8. ExpandedWeights crashes: GroupNorm with a frozen bias, F.linear with its keywords swapped,
#    dilated conv3d at batch 40 but not at batch 4.


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_group_norm_with_one_parameter_frozen(frozen: str) -> None:
    model = nn.GroupNorm(2, 6).double()
    model.get_parameter(frozen).requires_grad_(False)
    assert_exact(model, double(5, 6, 3))


class SwappedKeywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(double(3, 4))
        self.b = nn.Parameter(double(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, bias=self.b, weight=self.w)


def test_linear_with_keywords_in_any_order() -> None:
    model = SwappedKeywords()
    assert_exact(model, double(5, 4))
    x = double(5, 2, 4)
    expected = loop_grads(model, cubed, x)
    expanded = {
        name: pergrad.ExpandedWeight(parameter, 5, "sum")
        for name, parameter in model.named_parameters()
    }
    cubed(lambda x: F.linear(bias=expanded["b"], weight=expanded["w"], input=x), x).sum().backward()
    assert_grad_samples(model, expected)


@pytest.mark.parametrize("batch", [4, 31, 32, 40])
def test_dilated_conv3d_at_any_batch_size(batch: int) -> None:
    model = nn.Conv3d(2, 3, 2, dilation=2, padding=1).double()
    assert_exact(model, double(batch, 2, 4, 4, 4))
