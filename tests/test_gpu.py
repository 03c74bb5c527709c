"""What must hold on a GPU too: the contract, every family of rules, recurrent networks, mixed precision."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pergrad
from pergrad.testing import assert_near, loop_grads

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = checkpoint(lambda y, b=block: b(y).tanh(), h, use_reentrant=self.reentrant)
        return h


class Attention(nn.Module):
    """Raw parameters, a class token, position embeddings and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Embedding(9, 8)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.scale = nn.Parameter(torch.randn(8))
        self.head = nn.Linear(8, 8)
        self.back = nn.Linear(8, 8)
        self.back.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        x = x + self.position(torch.arange(x.shape[1], device=x.device))
        return self.back(self.head(self.mix(x, x, x)[0] * self.scale).relu())


MODELS = {
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(4, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 16, 3, stride=2, groups=4, dilation=2, padding=2),
        nn.Conv2d(16, 16, 3, groups=16, padding="same", bias=False),  # InstanceNorm takes it off
        nn.InstanceNorm2d(16, affine=True),
        nn.ConvTranspose2d(16, 4, 2, stride=2),
    ),
    "attention": Attention,
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(reentrant=True),
    "LSTM": lambda: nn.LSTM(8, 5, 2, batch_first=True, bidirectional=True, proj_size=3),
    "GRU": lambda: nn.GRU(8, 5, 2, batch_first=True),
    "RNN": lambda: nn.RNN(8, 5, nonlinearity="relu", batch_first=True),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
}
SHAPES = {"convolutions": (4, 16, 16), "checkpoint": (3, 6), "reentrant checkpoint": (3, 6)}


def first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return first(model(x)).square().flatten(1).sum(1)


def build(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = MODELS[name]().to(DEVICE, torch.float64)
    return model, torch.randn(4, *SHAPES.get(name, (4, 8)), device=DEVICE, dtype=torch.float64)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_loop(name: str) -> None:
    model, x = build(name)
    plain = MODELS["checkpoint"]().to(DEVICE, torch.float64) if "reentrant" in name else model
    plain.load_state_dict(model.state_dict())
    expected = loop_grads(plain, loss, x)
    found = pergrad.grads(model, loss, x)
    for key, value in expected.items():
        assert_near(found[key], value, key)


@pytest.mark.parametrize("name", MODELS)
def test_contract_fills_grad_sample(name: str) -> None:
    model, x = build(name)
    expected = pergrad.grads(model, loss, x)
    x.requires_grad_()
    first(pergrad.call_for_per_sample_grads(model)(x)).square().sum().backward()
    assert x.grad is not None
    for key, p in model.named_parameters():
        assert p.grad is None
        assert p.grad_sample.device == p.device
        assert_near(p.grad_sample, expected[key], key)


@pytest.mark.parametrize("lengths", [[4, 3, 2, 2], [1, 4, 2, 3]])
def test_packed_sequences(lengths: list[int]) -> None:
    rnn, x = build("LSTM")

    def run(model: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return model(packed)[0].data.square().sum()

    sizes = torch.tensor(lengths, device=DEVICE)
    expected = loop_grads(rnn, run, x, sizes)
    found = pergrad.grads(rnn, run, x, sizes)
    for key, value in expected.items():
        assert_near(found[key], value, key)


@pytest.mark.parametrize("name", ["attention", "LSTM", "encoder"])
def test_autocast_is_close_to_float64(name: str) -> None:
    model, x = build(name)
    expected = pergrad.grads(model, loss, x)
    model.float()
    with torch.autocast(DEVICE, torch.bfloat16):
        found = pergrad.grads(model, lambda m, x: loss(m, x).float(), x.float())
    for key, value in expected.items():
        assert found[key].dtype == torch.float32
        error = (found[key] - value).norm() / value.norm().clamp(min=1e-3)
        assert error < 0.1, (key, error)


def test_peak_memory_does_not_grow_over_steps() -> None:
    model, x = build("attention")
    peaks = []
    gc.disable()
    try:
        for _ in range(30):
            torch.cuda.reset_peak_memory_stats()
            pergrad.grads(model, loss, x)
            peaks.append(torch.cuda.max_memory_allocated())
    finally:
        gc.enable()
    assert peaks[-1] == peaks[5]


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_both_ways_of_a_convolution_agree(groups: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 1, 8, 9, 9, device=DEVICE, dtype=torch.float64)
    weight = torch.randn(8, 8 // groups, 3, 3, device=DEVICE, dtype=torch.float64)
    g = torch.randn_like(F.conv2d(x[:, 0], weight, padding=1, groups=groups)).unsqueeze(1)
    factor = pergrad.factors.Convolution(
        g, x, tuple(weight.shape), (1, 1), ((1, 1), (1, 1)), (1, 1), groups
    )
    assert_near(factor.by_windows(), factor.by_samples_as_groups())
