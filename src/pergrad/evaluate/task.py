"""Defines what an evaluation is about: how to train on a subset, the training data, the queries, the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import default_collate

from pergrad.errors import EvaluationError

__all__ = [
    "Floats",
    "Job",
    "LossModule",
    "Progress",
    "Task",
    "Trained",
    "final",
    "outputs_of",
    "retrained",
]

_AT_ONCE = 256  # samples of a batch

Floats = NDArray[np.float64]
Trained = nn.Module | Sequence[nn.Module]  # checkpoints of one run, the final model last
Job = tuple[Tensor, int]  # indices of training samples, and the seed
Progress = Callable[[int, int, str], None]  # done, of how many, what


class Train(Protocol):
    """Trains a model on the samples of these indices; may return checkpoints, the final model last."""

    def __call__(self, indices: Tensor, seed: int, /) -> Trained: ...


@dataclass(frozen=True)
class Task:
    """A way to train, the training data, the queries, and what is measured at a query.

    Args:
        train: called as train(indices, seed); trains a fresh model on these samples of `dataset`, and returns
            it, or a list of checkpoints of which the last is the final model. Initial weights and order of
            batches must depend on the seed alone. If it has a method `many(jobs)`, which takes a list of
            (indices, seed) and yields what the calls would return, subsets are retrained with it.
        dataset: the training data; map-style: has `len`, and items by index from 0.
        queries: the inputs to explain, items of the same kind.
        loss: called as loss(model, *batch); returns the (B,) losses of the samples.
        output: called as output(model, *batch); returns the (B,) numbers that are measured after retraining,
            greater where the model does better; by default the negative loss. Scores must explain it.
        collate: makes a batch of a list of items; by default `torch.utils.data.default_collate`.
        inputs: called as inputs(*batch); returns the inputs that the nearest are looked for by; by default
            the first tensor of a batch.
        features: called as features(model, *batch); returns (B, d) features; by default the input of the last
            module with parameters, averaged over positions.
        label: called as label(*batch); returns (B,) classes, so that the nearest are looked for in the same
            class; by default the second of a batch, if it has a whole number for each sample.
        tokens: called as tokens(item); returns the words or tokens of an item, for BM25; by default those of
            a text or of a vector of whole numbers.
        sampled: called as sampled(model, *batch); returns (B,) losses for labels drawn from the model, which
            kronfluence fits its factors to; by default it uses the labels of the data.
        planted: for each query the training samples that state its fact, for `facts`.
        wrong: training samples with wrong labels, for `mislabelled`.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from pergrad.evaluate import Task
    >>> x, y = torch.randn(20, 3), torch.randn(20, 1)
    >>> def train(indices, seed):
    ...     model = torch.nn.Linear(3, 1)
    ...     with torch.no_grad():
    ...         model.weight.copy_(torch.linalg.lstsq(x[indices], y[indices]).solution.T)
    ...     return model
    >>> squared = lambda model, x, y: (model(x) - y).square().sum(1)
    >>> task = Task(train, TensorDataset(x[:16], y[:16]), TensorDataset(x[16:], y[16:]), squared)
    >>> task
    Task(16 training samples, 4 queries)
    """

    train: Train
    dataset: Any
    queries: Any
    loss: Callable[..., Tensor]
    output: Callable[..., Tensor] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    inputs: Callable[..., Tensor] | None = None
    features: Callable[..., Tensor] | None = None
    label: Callable[..., Tensor] | None = None
    tokens: Callable[[Any], Sequence[Any]] | None = None
    sampled: Callable[..., Tensor] | None = None
    planted: Sequence[int | Sequence[int]] | None = None
    wrong: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in ("train", "loss"):
            if not callable(getattr(self, name)):
                got = type(getattr(self, name)).__name__
                raise EvaluationError(f"task.{name} must be callable, got {got}")
        for name in ("dataset", "queries"):
            data = getattr(self, name)
            if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
                raise EvaluationError(
                    f"task.{name} must have a length and items by index; {type(data).__name__} does not: put "
                    "its items into a list"
                )
            if not len(data):
                raise EvaluationError(f"task.{name} is empty: an evaluation needs samples")

    def __repr__(self) -> str:
        return f"Task({len(self.dataset):,} training samples, {len(self.queries):,} queries)"

    def batches(self, data: Any, size: int = _AT_ONCE) -> Iterator[tuple[Any, ...]]:
        """Yields the samples of a data set in order, as arguments of the loss."""
        collate = self.collate or default_collate
        for start in range(0, len(data), size):
            batch = collate([data[i] for i in range(start, min(start + size, len(data)))])
            yield tuple(batch) if isinstance(batch, tuple | list) else (batch,)

    def losses(self, model: nn.Module, data: Any) -> Floats:  # (n,)
        """Returns the loss of each sample, in eval mode."""
        return self._measured(model, data, self.loss)

    def outputs(self, model: nn.Module, data: Any) -> Floats:  # (n,)
        """Returns what is measured at each sample, in eval mode; greater is better."""
        if self.output is not None:
            return self._measured(model, data, self.output)
        return -self.losses(model, data)

    def _measured(self, model: nn.Module, data: Any, of: Callable[..., Tensor]) -> Floats:
        found: list[Tensor] = []
        with evaluating(model), torch.no_grad():
            for start, batch in enumerate(self.batches(data)):
                values, size = of(model, *batch), min(_AT_ONCE, len(data) - start * _AT_ONCE)
                if values.shape != (size,):
                    raise EvaluationError(
                        f"the loss or output of a batch of {size} has shape "
                        f"{tuple(values.shape)}: return one number for each sample"
                    )
                found.append(values.double().cpu())
        return torch.cat(found).numpy()


class LossModule(nn.Module):
    """The loss as a module, so that `functional_call` replaces parameters wherever the loss uses them."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self._of = loss

    def forward(self, *batch: Any) -> Tensor:
        return self._of(self.model, *batch)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into eval mode within the block, so that dropout is off; restores each module's mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def final(trained: Trained) -> nn.Module:
    """Returns the final model of a training run."""
    if isinstance(trained, nn.Module):
        return trained
    if not isinstance(trained, Sequence) or not trained or not isinstance(trained[-1], nn.Module):
        raise EvaluationError(
            f"train returned {type(trained).__name__}: return the trained nn.Module, or a list of "
            "checkpoints of which the last is the final model"
        )
    return trained[-1]


def retrained(task: Task, jobs: Sequence[Job]) -> Iterable[nn.Module]:
    """Yields the final model of each job, by `train.many` where there is one."""
    many = getattr(task.train, "many", None)
    if many is None:
        yield from (final(task.train(indices, seed)) for indices, seed in jobs)
        return
    count = 0
    for trained in many(jobs):
        count += 1
        yield final(trained)
    if count != len(jobs):
        raise EvaluationError(
            f"train.many yielded {count} models for {len(jobs)} jobs: yield one for each, in order"
        )


def outputs_of(
    task: Task, jobs: Sequence[Job], *, watch: Progress | None = None, what: str = "retraining"
) -> Floats:  # (jobs, queries)
    """Returns what each job's model gives at each query."""
    rows = []
    for done, model in enumerate(retrained(task, jobs), 1):
        rows.append(task.outputs(model, task.queries))
        if not np.isfinite(rows[-1]).all():
            raise EvaluationError(
                f"the model of job {done} (seed {jobs[done - 1][1]}) gives outputs that are not finite: did "
                "its training diverge? lower the learning rate"
            )
        if watch is not None:
            watch(done, len(jobs), what)
    return np.stack(rows)
