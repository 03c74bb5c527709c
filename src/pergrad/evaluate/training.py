"""Trains many small models at once: one batched step for all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from pergrad.errors import EvaluationError
from pergrad.evaluate.task import Job, LossModule

__all__ = ["Trainer"]


class Trainer:
    """Trains a network on subsets of tensors that fit into memory; many at once by `torch.func.vmap`.

    A `train` for `Task`: `trainer(indices, seed)` returns one model, or its checkpoints, and
    `trainer.many(jobs)` the same for a list of jobs, much faster than one by one if the network is small.

    Args:
        network: called without arguments; returns a fresh network.
        loss: called as loss(model, *batch); returns the (B,) losses of the samples.
        tensors: the training data, each with a row for each sample.
        epochs: passes over the subset.
        batch_size: samples of a step; the last of an epoch is smaller.
        optimizer: called with the parameters; returns a torch optimizer that treats each number by itself,
            such as SGD or Adam.
        checkpoints: models to return, evenly spaced over the epochs, the final one last; 1: the final model.
        at_once: models that are trained together.

    >>> import torch
    >>> from torch.nn import functional as F
    >>> from pergrad.evaluate import Trainer
    >>> x, y = torch.randn(40, 5), torch.arange(40) % 3
    >>> loss = lambda model, x, y: F.cross_entropy(model(x), y, reduction="none")
    >>> train = Trainer(lambda: torch.nn.Linear(5, 3), loss, (x, y), epochs=2)
    >>> one = train(torch.arange(20), 1)
    >>> first, second = train.many([(torch.arange(20), 1), (torch.arange(20, 40), 2)])
    >>> torch.allclose(one.weight, first.weight, atol=1e-6)
    True
    """

    def __init__(
        self,
        network: Callable[[], nn.Module],
        loss: Callable[..., Tensor],
        tensors: Sequence[Tensor],
        *,
        epochs: int,
        batch_size: int = 64,
        optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
        checkpoints: int = 1,
        at_once: int = 100,
    ) -> None:
        if epochs < 1 or batch_size < 1 or at_once < 1:
            raise EvaluationError(
                f"epochs={epochs}, batch_size={batch_size}, at_once={at_once}: each must be at least 1"
            )
        if not 1 <= checkpoints <= epochs:
            raise EvaluationError(f"checkpoints={checkpoints}: choose 1 to epochs={epochs}")
        if len({len(tensor) for tensor in tensors}) != 1:
            raise EvaluationError(
                f"the tensors have {[len(t) for t in tensors]} rows: each needs one for each sample"
            )
        self.network, self.loss, self.tensors = network, loss, tuple(tensors)
        self.epochs, self.batch_size, self.at_once = epochs, batch_size, at_once
        self.optimizer = optimizer or (lambda params: torch.optim.Adam(params, lr=3e-3))
        self._kept = {round(epochs * (k + 1) / checkpoints) for k in range(checkpoints)}

    def __call__(self, indices: Tensor, seed: int) -> nn.Module | list[nn.Module]:
        (trained,) = self._train([(indices, seed)])
        return trained if len(trained) > 1 else trained[0]

    def many(self, jobs: Sequence[Job]) -> Iterator[nn.Module]:
        """Yields the final model of each job, in order."""
        for start in range(0, len(jobs), self.at_once):
            group = jobs[start : start + self.at_once]
            models: dict[int, nn.Module] = {}
            for size in {len(indices) for indices, _ in group}:  # a stack has one batch size
                places = [n for n, (indices, _) in enumerate(group) if len(indices) == size]
                made = self._train([group[n] for n in places])
                models |= {n: kept[-1] for n, kept in zip(places, made, strict=True)}
            yield from (models[n] for n in range(len(group)))

    def _train(self, jobs: Sequence[Job]) -> list[list[nn.Module]]:
        size = len(jobs[0][0])
        if not size:
            raise EvaluationError("a job has no samples: there is nothing to train on")
        generators = [torch.Generator().manual_seed(seed) for _, seed in jobs]
        networks = [self._fresh(seed) for _, seed in jobs]
        bare = LossModule(networks[0], self.loss)
        params, buffers = stack_module_state([LossModule(net, self.loss) for net in networks])
        leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        optimizer = self.optimizer(list(leaves.values()))
        kept: list[list[nn.Module]] = [[] for _ in jobs]

        def losses(own: dict[str, Tensor], state: dict[str, Tensor], *batch: Tensor) -> Tensor:
            return functional_call(bare, (own, state), batch)

        step = vmap(losses, randomness="different")
        places = torch.stack([indices for indices, _ in jobs])
        for epoch in range(1, self.epochs + 1):
            order = torch.stack([torch.randperm(size, generator=g) for g in generators])
            for rows in places.gather(1, order).split(self.batch_size, dim=1):
                batch = [tensor[rows] for tensor in self.tensors]
                optimizer.zero_grad()
                step(leaves, buffers, *batch).mean(
                    1
                ).sum().backward()  # models do not share numbers
                optimizer.step()
            if epoch in self._kept:
                for n, (models, net) in enumerate(zip(kept, networks, strict=True)):
                    models.append(_loaded(net, leaves, buffers, n))
        return kept

    def _fresh(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.network()


def _loaded(
    net: nn.Module, params: dict[str, Tensor], buffers: dict[str, Tensor], n: int
) -> nn.Module:
    made = copy.deepcopy(net)
    with torch.no_grad():
        for stack, names in (
            (params, dict(made.named_parameters())),
            (buffers, dict(made.named_buffers())),
        ):
            for name, values in stack.items():
                names[name.removeprefix("model.")].copy_(values[n].detach())
    return made
