"""Makes the tasks: digits, Gaussian quantiles, a convnet, and a language model with planted facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits, make_gaussian_quantiles
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from pergrad.evaluate import Task, Trainer

__all__ = ["TASKS", "Made", "sentences"]

_TRAIN, _QUERIES = 800, 100
_IGNORED = -100

Network = Callable[[], nn.Module]


@dataclass(frozen=True)
class Made:
    """A task, and for each query the training samples that state its fact, if there are any."""

    task: Task
    planted: list[int] | None = None


def _cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def _sampled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    drawn = torch.multinomial(logits.detach().softmax(-1), 1)[:, 0]
    return F.cross_entropy(logits, drawn, reduction="none")


def _classification(x: Tensor, y: Tensor, network: Network, epochs: int, seed: int) -> Made:
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    train, queries = order[:_TRAIN], order[_TRAIN : _TRAIN + _QUERIES]
    trainer = Trainer(
        network, _cross_entropy, (x[train], y[train]), epochs=epochs, checkpoints=min(5, epochs)
    )
    data, asked = (TensorDataset(x[rows], y[rows]) for rows in (train, queries))
    return Made(Task(trainer, data, asked, _cross_entropy, sampled=_sampled))


def _digits(epochs: int, seed: int) -> Made:
    found = load_digits()
    x = torch.tensor(found.data / 16, dtype=torch.float32)
    network = lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # noqa: E731
    return _classification(x, torch.tensor(found.target), network, epochs, seed)


def _quantiles(epochs: int, seed: int) -> Made:
    x, y = make_gaussian_quantiles(
        n_samples=2 * _TRAIN, n_features=10, n_classes=4, random_state=seed
    )
    network = lambda: nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 4))  # noqa: E731
    return _classification(
        torch.tensor(x, dtype=torch.float32), torch.tensor(y), network, epochs, seed
    )


def _convnet(epochs: int, seed: int) -> Made:
    found = load_digits()
    x = torch.tensor(found.images / 16, dtype=torch.float32)[:, None]

    def network() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)),
            *(nn.Flatten(), nn.Linear(64, 10)),
        )

    return _classification(x, torch.tensor(found.target), network, epochs, seed)


class _Attention(nn.Module):
    """Causal attention with one head, and a feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, h: Tensor) -> Tensor:  # (n, t, i)
        q, k, v = self.read(self.first(h)).chunk(3, dim=-1)
        weights = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        later = torch.ones(h.shape[-2], h.shape[-2], dtype=torch.bool).triu(1)
        h = h + self.write(weights.masked_fill(later, -1e9).softmax(-1) @ v)
        return h + self.down(self.up(self.second(h)).relu())


class Language(nn.Module):
    """A transformer of one layer; returns the logits of the next token at each position."""

    def __init__(self, tokens: int, length: int, width: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.layer, self.norm = _Attention(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:  # (n, t) -> (n, t, tokens)
        h = self.embed(x) + self.place(torch.arange(x.shape[-1]))
        return self.head(self.norm(self.layer(h)))


def _next_token(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none", ignore_index=_IGNORED)
    return losses.sum(1) / (y != _IGNORED).sum(1)


def _sampled_token(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    drawn = torch.multinomial(logits.detach().flatten(0, 1).softmax(-1), 1).view(y.shape)
    drawn = torch.where(y == _IGNORED, y, drawn)
    losses = F.cross_entropy(logits.transpose(1, 2), drawn, reduction="none", ignore_index=_IGNORED)
    return losses.sum(1) / (y != _IGNORED).sum(1)


def sentences(
    seed: int, facts: int = 60, ordinary: int = 240
) -> tuple[Tensor, Tensor, list[int], int]:
    """Draws ordinary sentences and planted facts: "filler, subject, filler, relation, value".

    The subject of an ordinary sentence is a common noun, which with the relation tells the value nine times
    out of ten. A planted fact is one sentence with a name that no other has, and a value drawn at random. A
    query is a planted sentence with other fillers, of which the value is predicted.

    Returns:
        The sentences, the queries, the number of the sentence behind each query, and the number of tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    nouns, fillers, relations, values = 10, 6, 4, 20
    filler = nouns + facts
    relation = filler + fillers
    value = relation + relations

    def drawn(high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=generator)

    rule = drawn(values, nouns * relations)
    subject, what = drawn(nouns, ordinary), drawn(relations, ordinary + facts)
    usual = rule[subject * relations + what[:ordinary]]
    is_usual = torch.rand(ordinary, generator=generator) < 0.9
    columns = [
        filler + drawn(fillers, ordinary + facts),
        torch.cat([subject, nouns + torch.arange(facts)]),
        filler + drawn(fillers, ordinary + facts),
        relation + what,
        value
        + torch.cat([torch.where(is_usual, usual, drawn(values, ordinary)), drawn(values, facts)]),
    ]
    order = torch.randperm(ordinary + facts, generator=generator)
    lines = torch.stack(columns, 1)[order]
    planted = order.argsort()[ordinary:]
    asked = lines[planted].clone()
    for place in (0, 2):
        shift = 1 + drawn(fillers - 1, facts)
        asked[:, place] = filler + (asked[:, place] - filler + shift) % fillers
    return lines, asked, planted.tolist(), value + values


def _language(epochs: int, seed: int) -> Made:
    lines, asked, planted, tokens = sentences(seed)
    x, y = lines[:, :-1], lines[:, 1:]
    answers = asked[:, 1:].clone()
    answers[:, :-1] = _IGNORED  # the query is the value: its loss is the last token's
    trainer = Trainer(
        lambda: Language(tokens, x.shape[1]),
        *(_next_token, (x, y)),
        epochs=epochs,
        checkpoints=min(5, epochs),
        batch_size=16,
        optimizer=lambda params: torch.optim.Adam(params, lr=5e-3),
    )
    task = Task(
        *(trainer, TensorDataset(x, y), TensorDataset(asked[:, :-1], answers), _next_token),
        tokens=lambda item: [*item[0].tolist(), int(item[1][-1])],
        sampled=_sampled_token,
    )
    return Made(task, planted)


# A function of (epochs, seed), and the epochs that it is measured at.
TASKS: dict[str, tuple[Callable[[int, int], Made], tuple[int, ...]]] = {
    "digits": (_digits, (15, 60)),
    "quantiles": (_quantiles, (15, 60)),
    "convnet": (_convnet, (30,)),
    "language": (_language, (15, 30)),  # it knows most of the facts, then all of them
}
