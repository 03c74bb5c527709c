"""Defines models that every peer can run: only nn.Linear, nn.Conv2d, nn.Embedding and norms; and an LSTM.

There are no raw parameters, tied weights, in-place activations or (1, T) position indices: each of these
breaks at least one peer, and a benchmark compares speed where all results are right. ExpandedWeights runs the
ViT's convolution only from 32 samples on (below, it takes a view of a gradient that is not contiguous), so
every ViT here has a batch of 32. The LSTM is the exception: most peers fail on it, and the table says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Size = Literal["tiny", "cpu", "gpu"]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (n, t, i) -> (n, t, i)
        h = self.norm1(x)
        q, k, v = (
            layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def _positions(x: Tensor) -> Tensor:  # (n, t, ...) -> (n, t)
    rows = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
    return rows.contiguous()  # Opacus's ghost norms call view() on the index


class Transformer(nn.Module):
    """A GPT-2-shaped causal language model with an untied head."""

    def __init__(self, *, vocabulary: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (n, t) -> (n, t, vocabulary)
        h = self.tokens(x) + self.positions(_positions(x))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class ViT(nn.Module):
    """A vision transformer with learned positions and mean pooling in place of a class token."""

    def __init__(
        self, *, image: int, patch: int, width: int, depth: int, heads: int, classes: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Embedding((image // patch) ** 2, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # (n, 3, h, w) -> (n, classes)
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = h + self.positions(_positions(h))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h).mean(1))


class Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut, GroupNorm after each convolution."""

    def __init__(self, c: int, o: int, *, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c, o, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(o, o, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(groups, o), nn.GroupNorm(groups, o)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or c != o:
            conv = nn.Conv2d(c, o, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.GroupNorm(groups, o))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for 32x32 images (3x3 stem, no pooling after it), GroupNorm for BatchNorm."""

    def __init__(self, *, width: int, groups: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(groups, width)
        blocks, c = [], width
        for stage in range(4):
            o = width * 2**stage
            blocks.append(Residual(c, o, stride=1 if stage == 0 else 2, groups=groups))
            blocks.append(Residual(o, o, stride=1, groups=groups))
            c = o
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(c, classes)

    def forward(self, x: Tensor) -> Tensor:  # (n, 3, h, w) -> (n, classes)
        h = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(h.mean((-2, -1)))


class MLP(nn.Module):
    """`depth` linear layers of one width, ReLU between them, and a head."""

    def __init__(self, *, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # (n, i) -> (n, classes)
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)


class Recurrent(nn.Module):
    """An nn.LSTM over embedded tokens, and a head on its last position."""

    def __init__(self, *, vocabulary: int, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, depth, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # (n, t) -> (n, classes)
        h, _ = self.lstm(self.tokens(x))
        return self.head(h[:, -1])


@dataclass(frozen=True)
class Task:
    """A model and one batch; the loss of the batch is the sum of its samples' losses."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")

    def double(self) -> Task:
        """Returns the task in float64; converts the model in place."""
        inputs = self.inputs.double() if self.inputs.is_floating_point() else self.inputs
        return replace(self, model=self.model.double(), inputs=inputs)

    def head(self, count: int) -> Task:
        """Returns a task with this model and the first `count` samples."""
        return replace(self, inputs=self.inputs[:count], targets=self.targets[:count])

    def resident_bytes(self) -> int:
        """Returns the bytes allocated before the step: parameters, buffers and the batch."""
        tensors = [*self.model.parameters(), *self.model.buffers(), self.inputs, self.targets]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def transformer(
    batch: int, length: int, *, vocabulary: int, width: int, depth: int, heads: int
) -> Task:
    model = Transformer(vocabulary=vocabulary, length=length, width=width, depth=depth, heads=heads)
    tokens = torch.randint(vocabulary, (batch, length + 1))
    return Task(model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _images(model: nn.Module, batch: int, image: int, classes: int) -> Task:
    return Task(model, torch.randn(batch, 3, image, image), torch.randint(classes, (batch,)))


def _vit(
    batch: int, image: int, *, patch: int, width: int, depth: int, heads: int, classes: int
) -> Task:
    model = ViT(image=image, patch=patch, width=width, depth=depth, heads=heads, classes=classes)
    return _images(model, batch, image, classes)


def _resnet(batch: int, image: int, *, width: int, groups: int, classes: int = 10) -> Task:
    return _images(ResNet18(width=width, groups=groups, classes=classes), batch, image, classes)


def _mlp(batch: int, *, width: int, depth: int, classes: int = 10) -> Task:
    model = MLP(width=width, depth=depth, classes=classes)
    return Task(model, torch.randn(batch, width), torch.randint(classes, (batch,)))


def _lstm(
    batch: int, length: int, *, vocabulary: int, width: int, depth: int, classes: int = 10
) -> Task:
    model = Recurrent(vocabulary=vocabulary, width=width, depth=depth, classes=classes)
    tokens = torch.randint(vocabulary, (batch, length))
    return Task(model, tokens, torch.randint(classes, (batch,)))


@dataclass(frozen=True)
class Case:
    """One model at one size; `title` describes its shape in the table."""

    title: str
    build: Callable[[], Task]


MODELS: dict[str, dict[Size, Case]] = {
    "transformer": {
        "tiny": Case(
            "tiny transformer",
            lambda: transformer(3, 5, vocabulary=11, width=8, depth=2, heads=2),
        ),
        "cpu": Case(
            "GPT-2-shaped, 4 layers of 256, B=8 T=128",
            lambda: transformer(8, 128, vocabulary=1024, width=256, depth=4, heads=4),
        ),
        "gpu": Case(
            "GPT-2-small shape, B=16 T=512",
            lambda: transformer(16, 512, vocabulary=50257, width=768, depth=12, heads=12),
        ),
    },
    "vit": {
        "tiny": Case(
            "tiny ViT",
            lambda: _vit(32, 8, patch=4, width=8, depth=2, heads=2, classes=5),
        ),
        "cpu": Case(
            "ViT, 4 layers of 192, B=32, 3x32x32 in 64 patches",
            lambda: _vit(32, 32, patch=4, width=192, depth=4, heads=3, classes=10),
        ),
        "gpu": Case(
            "ViT-B/16, B=32, 3x224x224",
            lambda: _vit(32, 224, patch=16, width=768, depth=12, heads=12, classes=1000),
        ),
    },
    "resnet": {
        "tiny": Case("tiny ResNet-18-GN", lambda: _resnet(3, 8, width=4, groups=2)),
        "cpu": Case("ResNet-18-GN, B=8, 3x32x32", lambda: _resnet(8, 32, width=64, groups=32)),
        "gpu": Case("ResNet-18-GN, B=256, 3x32x32", lambda: _resnet(256, 32, width=64, groups=32)),
    },
    "mlp": {
        "tiny": Case("tiny MLP", lambda: _mlp(3, width=6, depth=2)),
        "cpu": Case("MLP, 4 layers of 512, B=64", lambda: _mlp(64, width=512, depth=4)),
        "gpu": Case("MLP, 4 layers of 4096, B=64", lambda: _mlp(64, width=4096, depth=4)),
    },
    "lstm": {
        "tiny": Case("tiny LSTM", lambda: _lstm(3, 5, vocabulary=11, width=6, depth=2)),
        "cpu": Case(
            "LSTM, 2 layers of 128, B=32 T=32",
            lambda: _lstm(32, 32, vocabulary=1024, width=128, depth=2),
        ),
        "gpu": Case(
            "LSTM, 2 layers of 512, B=64 T=128",
            lambda: _lstm(64, 128, vocabulary=10000, width=512, depth=2),
        ),
    },
}


@contextmanager
def drawn_on(device: torch.device, seed: int) -> Iterator[None]:
    """Seeds and draws weights and batches directly on the device within the block."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        yield


# Caches a model and its tiny version: every method needs them, and drawing weights takes seconds.
@lru_cache(maxsize=2)
def _built(name: str, size: Size, seed: int, device: torch.device) -> Task:
    with drawn_on(device, seed):
        return MODELS[name][size].build()


def build(name: str, size: Size, *, seed: int, device: torch.device) -> Task:
    """Returns a copy of the task of that name and size; equal seeds give equal weights and batches."""
    task = _built(name, size, seed, device)
    return replace(task, model=copy.deepcopy(task.model))
