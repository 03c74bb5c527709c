"""Which training samples made the model do this? Digits, and a tiny language model with planted facts.

Builds an index of the digits that a small network was trained on, asks it for the samples behind two
predictions, and measures by retraining whether its scores can be trusted. Then it plants facts, each in one
sentence, in the training data of a tiny language model, and looks for the sentence behind each answer.

Run it as `python examples/attribution.py`; it needs pergrad[evaluate,demo].
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import pergrad
from pergrad.evaluate import Evaluation, Task, Trainer, facts, lds

IGNORED = -100  # target of a token that does not count


def digits_task(seed: int) -> Task:
    """Returns an MLP on 400 digits, trained until it fits them, with five checkpoints, and 20 queries."""
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(seed))
    x = torch.tensor(found.data / 16, dtype=torch.float32)[order]
    y = torch.tensor(found.target)[order]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    train = Trainer(network, loss, (x[:400], y[:400]), epochs=60, checkpoints=5)
    return Task(train, TensorDataset(x[:400], y[:400]), TensorDataset(x[400:420], y[400:420]), loss)


class Language(nn.Module):
    """Predicts the next token from the token and the mean of those before it."""

    def __init__(self, tokens: int, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.mix, self.head = nn.Linear(2 * width, 2 * width), nn.Linear(2 * width, tokens)

    def forward(self, x: Tensor) -> Tensor:  # (n, t) -> (n, t, tokens)
        h = self.embed(x)
        before = h.cumsum(-2) / torch.arange(1, x.shape[-1] + 1)[:, None]
        return self.head(self.mix(torch.cat([h, before], -1)).relu())


def next_token(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Returns the mean loss over the tokens that count, of each sentence."""
    losses = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none", ignore_index=IGNORED)
    return losses.sum(1) / (y != IGNORED).sum(1)


def language_task(seed: int, names: int = 20, ordinary: int = 100) -> Task:
    """Returns sentences "subject verb object"; of the names each has one sentence, which a query asks for."""
    generator = torch.Generator().manual_seed(seed)
    nouns, verbs, objects = 6, 3, 12
    count = names + ordinary
    subject = torch.cat(
        [torch.randint(nouns, (ordinary,), generator=generator), nouns + torch.arange(names)]
    )
    verb = nouns + names + torch.randint(verbs, (count,), generator=generator)
    thing = nouns + names + verbs + torch.randint(objects, (count,), generator=generator)
    lines = torch.stack([subject, verb, thing], 1)
    x, y = lines[:, :-1], lines[:, 1:]
    asked = y[ordinary:].clone()
    asked[:, 0] = IGNORED  # a query is about the object alone
    train = Trainer(
        lambda: Language(nouns + names + verbs + objects),
        *(next_token, (x, y)),
        epochs=12,
        batch_size=16,
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
        checkpoints=4,
    )
    queries = TensorDataset(x[ordinary:], asked)
    planted = list(range(ordinary, count))
    return Task(train, TensorDataset(x, y), queries, next_token, planted=planted)


def show_samples(task: Task, seed: int) -> None:
    """Prints the most helpful and the most harmful samples of two queries."""
    *before, model = task.train(torch.arange(len(task.dataset)), seed)  # type: ignore[misc]
    index = pergrad.Index.build(
        model, task.dataset, loss=task.loss, checkpoints=before, dim=512, quiet=True
    )
    x, y = task.queries[:2]
    labels = task.dataset.tensors[1]
    for query, scores in enumerate(index.scores((x, y))):
        best, worst = scores.topk(5).indices, (-scores).topk(5).indices
        guess = int(model(x[query : query + 1]).argmax())
        print(f"query {query}: a {int(y[query])}, predicted {guess}")
        print(f"  helped by {best.tolist()}, labels {labels[best].tolist()}")
        print(f"  harmed by {worst.tolist()}, labels {labels[worst].tolist()}")


def main(argv: list[str] | None = None) -> tuple[Evaluation, Evaluation]:
    """Prints what was found and returns the two evaluations."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--subsets", type=int, default=30, help="subsets to retrain on")
    chosen = parser.parse_args(argv)
    torch.manual_seed(chosen.seed)

    task = digits_task(chosen.seed)
    show_samples(task, chosen.seed)
    print("\nDo the scores predict what retraining on half of the digits gives?")
    predicted = lds(
        ["index", "gradient dots"], task, subsets=chosen.subsets, repeats=2, seeds=[chosen.seed]
    )
    print(predicted)

    print("\nIs the sentence with the fact the first one found?")
    found = facts(["index", "gradient dots"], language_task(chosen.seed), seeds=[chosen.seed])
    print(found)
    return predicted, found


if __name__ == "__main__":
    main()
