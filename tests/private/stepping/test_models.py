"""Private steps of five models: Opacus's clipped sums, in any pieces, of bounded sensitivity."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.grad_sample import GradSampleModule
from opacus.layers import DPLSTM
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

from pergrad.private import Plan, Step, sensitivities
from pergrad.testing import loop_grads

B = 6


class Lstm(nn.Module):
    def __init__(self, lstm: Any = nn.LSTM) -> None:
        super().__init__()
        self.lstm, self.head = lstm(5, 7, batch_first=True), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(2, 8), nn.GroupNorm(2, 8)
        self.conv1, self.conv2 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        h = h + self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(h))))))
        return self.head(h.mean((2, 3)))


def gpt2() -> nn.Module:
    config = GPT2Config(
        vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    return model


def vit_with_lora() -> nn.Module:
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    lora = LoraConfig(target_modules="all-linear", r=2, lora_dropout=0.0, init_lora_weights=False)
    found: nn.Module = get_peft_model(ViTForImageClassification(config), lora)
    return found


def classified(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return F.cross_entropy(getattr(out, "logits", out), y, reduction="none")


def next_tokens(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


Build = Callable[[], tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]]


def _labels() -> Tensor:
    return torch.arange(B) % 3


MODELS: dict[str, Build] = {
    "mlp": lambda: (
        nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)),
        classified,
        (3 * torch.randn(B, 4), _labels()),
    ),
    "resnet": lambda: (ResNet(), classified, (torch.randn(B, 3, 8, 8), _labels())),
    "lstm": lambda: (Lstm(), classified, (3 * torch.randn(B, 6, 5), _labels())),
    "tied gpt2": lambda: (gpt2(), next_tokens, (torch.randint(31, (B, 9)),)),
    "vit with lora": lambda: (
        vit_with_lora(),
        classified,
        (torch.randn(B, 3, 8, 8), _labels()),
    ),
}


def made(name: str) -> tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model, loss_fn, batch = MODELS[name]()
    return model.train(), loss_fn, batch


def step_of(model: nn.Module, loss_fn: Any, bound: float, piece_size: int | None = None) -> Step:
    plan = Plan(
        noise_multiplier=0.0, sample_rate=1.0, steps=1, max_norm=bound, expected_batch_size=B
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    return Step(model, optimizer, loss_fn, plan, piece_size, certify=False)


def doubled(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.double() if t.is_floating_point() else t for t in batch)


def by_name(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return sorted(model.named_parameters())


def flat(sums: Any) -> Tensor:
    return torch.cat([t.double().flatten() for t in sums.values()])


@pytest.mark.parametrize("name", MODELS)
def test_pieces_never_change_the_sum(name: str) -> None:
    model, loss_fn, batch = made(name)
    model, batch = model.double(), doubled(batch)
    grads = loop_grads(model, loss_fn, *batch)
    whole = torch.cat([g.flatten(1) for g in grads.values()], 1)
    norms = whole.norm(dim=1, keepdim=True)
    bound = float(norms.median())  # half of them are clipped
    expected = (whole * (bound / norms).clamp(max=1)).sum(0)
    for piece_size in (None, 1, 4):
        found = flat(step_of(model, loss_fn, bound, piece_size).clipped_sums(*batch))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12 * bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_removing_a_sample_moves_the_sum_by_the_bound_at_most(
    name: str, dtype: torch.dtype
) -> None:
    model, loss_fn, batch = made(name)
    model = model.to(dtype)
    batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in batch)
    bound = 0.05
    moved = sensitivities(step_of(model, loss_fn, bound).clipped_sums, *batch)
    assert moved.max() <= bound * (1 + 1e-6)
    assert moved.max() >= 0.9 * bound


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_a_step_without_noise_is_opacus_s(name: str) -> None:
    model, loss_fn, batch = made(name)
    theirs: nn.Module = copy.deepcopy(model)
    if name == "lstm":  # Opacus needs its own, with the same parameters under other names
        theirs = Lstm(DPLSTM)
        with torch.no_grad():
            for (_, mine), (_, other) in zip(by_name(model), by_name(theirs), strict=True):
                other.copy_(mine)
    if name == "tied gpt2":  # Opacus refuses its layers: the loop over samples stands for it
        grads = loop_grads(model, loss_fn, *batch)
        per_sample = torch.cat([g.flatten(1) for g in grads.values()], 1)
    else:
        wrapped = GradSampleModule(theirs, loss_reduction="sum", strict=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss_fn(wrapped, *batch).sum().backward()
        found = {n.removeprefix("_module."): p for n, p in by_name(theirs)}
        trained = [found[n] for n, p in model.named_parameters() if p.requires_grad]
        per_sample = torch.cat([p.grad_sample.flatten(1) for p in trained], 1)
    norms = per_sample.norm(dim=1)
    bound = 0.5 * float(norms.min())  # all are clipped, as Opacus does: by C / (norm + 1e-6)
    expected = (per_sample * (bound / (norms + 1e-6))[:, None]).sum(0).double()
    mine = flat(step_of(model, loss_fn, bound).clipped_sums(*batch))
    assert (mine - expected).norm() <= 1e-5 * expected.norm()
