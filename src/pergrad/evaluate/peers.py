"""Scores by other libraries, as optional columns: kronfluence, dattri and TRAK (traker).

Each is imported where it is asked for; `pip install 'pergrad[peers]'` brings them, but kronfluence asks for
torchvision, whose build must match torch's: install it with --no-deps.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, Dataset

from pergrad.errors import EvaluationError
from pergrad.evaluate.task import Floats, LossModule, Task, Trained, final

__all__ = ["PEERS", "by_dattri", "by_kronfluence", "by_traker"]

_BATCH = 128
_TRAK_DIM = 512  # TRAK inverts the second moment undamped: it must have full rank


def _imported(peer: str) -> Callable[[Callable[..., Floats]], Callable[..., Floats]]:
    """Turns a missing package into one sentence; keeps what a peer prints and warns of off the terminal."""

    def wrap(scores: Callable[..., Floats]) -> Callable[..., Floats]:
        @functools.wraps(scores)
        def wrapped(task: Task, trained: Trained, seed: int, **options: Any) -> Floats:
            try:
                with _quiet():
                    return scores(task, trained, seed, **options)
            except ModuleNotFoundError as error:
                raise EvaluationError(
                    f"the method {peer!r} needs {error.name}: pip install --no-deps {peer}"
                ) from error

        return wrapped

    return wrap


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@_imported("kronfluence")
def by_kronfluence(
    task: Task, trained: Trained, seed: int, *, damping: float | None = 1e-8
) -> Floats:  # (queries, n)
    """Returns kronfluence's EK-FAC scores of the final model.

    The Fisher matrix is that of the model if the task has a `sampled` loss, and else the empirical one.

    Args:
        task: the data and the loss.
        trained: what `task.train` returned.
        seed: of the labels that are drawn.
        damping: kronfluence's `damping_factor`; None for a tenth of the mean eigenvalue of each module.
    """
    from kronfluence.analyzer import Analyzer, prepare_model  # noqa: PLC0415
    from kronfluence.arguments import FactorArguments, ScoreArguments  # noqa: PLC0415
    from kronfluence.task import Task as PeerTask  # noqa: PLC0415
    from kronfluence.utils.dataset import DataLoaderKwargs  # noqa: PLC0415

    class Own(PeerTask):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            of = task.sampled if sample else task.loss
            assert of is not None
            return of(model, *batch).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return task.loss(model, *batch).sum()

    own = Own()
    model = prepare_model(copy.deepcopy(final(trained)).eval(), own)
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        analyzer = Analyzer(
            "evaluate",
            model,
            own,
            cpu=not torch.cuda.is_available(),
            output_dir=folder,
            disable_tqdm=True,
            disable_model_save=True,
        )
        analyzer.set_dataloader_kwargs(DataLoaderKwargs(collate_fn=_collate(task)))
        analyzer.fit_all_factors(
            "ekfac",
            _Items(task.dataset),
            per_device_batch_size=_BATCH,
            factor_args=FactorArguments("ekfac", use_empirical_fisher=task.sampled is None),
        )
        analyzer.compute_pairwise_scores(
            "scores",
            "ekfac",
            _Items(task.queries),
            _Items(task.dataset),
            per_device_query_batch_size=_BATCH,
            per_device_train_batch_size=_BATCH,
            score_args=ScoreArguments(damping_factor=damping),
        )
        found = analyzer.load_pairwise_scores("scores")["all_modules"]
    return found.double().cpu().numpy()


@_imported("dattri")
def by_dattri(
    task: Task, trained: Trained, seed: int, *, damping: float = 1e-2, iterations: int = 10
) -> Floats:  # (queries, n)
    """Returns dattri's influence function by conjugate gradients, with the Hessian of the final model.

    Args:
        task: the data and the loss.
        trained: what `task.train` returned.
        seed: not used.
        damping: dattri's `regularization`.
        iterations: of the conjugate gradients.
    """
    from dattri.algorithm.influence_function import IFAttributorCG  # noqa: PLC0415
    from dattri.task import AttributionTask  # noqa: PLC0415

    model = copy.deepcopy(final(trained)).eval()
    module = LossModule(model, task.loss)

    def loss(params: dict[str, Tensor], data: Any) -> Tensor:
        return _called(module, params, data).mean()

    peer = AttributionTask(loss_func=loss, model=model, checkpoints=model.state_dict())
    attributor = IFAttributorCG(
        task=peer, max_iter=iterations, regularization=damping, device=_device(model)
    )
    loaders = [
        DataLoader(_Items(data), batch_size=len(data), shuffle=False, collate_fn=_collate(task))
        for data in (task.dataset, task.queries)
    ]
    attributor.cache(loaders[0])
    with torch.no_grad():  # or it keeps the graphs of all iterations
        found = attributor.attribute(*loaders)  # (n, queries)
    return found.T.detach().double().cpu().numpy()


@_imported("traker")
def by_traker(task: Task, trained: Trained, seed: int) -> Floats:  # (queries, n)
    """Returns TRAK's scores, averaged over the checkpoints of the run.

    The loss is read as -log p; the output is the margin log p / (1 - p), as in the paper.

    Args:
        task: the data and the loss.
        trained: what `task.train` returned.
        seed: of the projection.
    """
    from trak import TRAKer  # noqa: PLC0415
    from trak.modelout_functions import AbstractModelOutput  # noqa: PLC0415

    states = [trained] if isinstance(trained, nn.Module) else list(trained)
    model = copy.deepcopy(states[-1]).eval()
    module = LossModule(model, task.loss)

    class Margin(AbstractModelOutput):
        def __init__(self) -> None:
            super().__init__()

        @staticmethod
        def get_output(_: Any, weights: Any, buffers: Any, *item: Any) -> Tensor:
            batch = [part[None] for part in item]
            return _margin(_called(module, {**weights, **buffers}, batch)).sum()

        def get_out_to_loss_grad(self, _: Any, weights: Any, buffers: Any, batch: Any) -> Tensor:
            losses = _called(module, {**weights, **buffers}, batch)
            return (1 - torch.exp(-losses)).clone().detach()[:, None]

    def batches(data: Any) -> Iterator[list[Tensor]]:
        loader = DataLoader(_Items(data), batch_size=_BATCH, collate_fn=_collate(task))
        yield from (list(batch) for batch in loader)

    with tempfile.TemporaryDirectory() as folder:
        traker = TRAKer(
            model=model,
            task=Margin(),
            train_set_size=len(task.dataset),
            save_dir=folder,
            device=_device(model),
            proj_dim=min(_TRAK_DIM, len(task.dataset) // 2),
            use_half_precision=False,
            projector_seed=seed,
            logging_level=logging.CRITICAL,
        )
        for number, state in enumerate(states):
            traker.load_checkpoint(state.state_dict(), model_id=number)
            for batch in batches(task.dataset):
                traker.featurize(batch=batch, num_samples=len(batch[0]))
        traker.finalize_features()
        for number, state in enumerate(states):
            traker.start_scoring_checkpoint(
                "queries", state.state_dict(), model_id=number, num_targets=len(task.queries)
            )
            for batch in batches(task.queries):
                traker.score(batch=batch, num_samples=len(batch[0]))
        found = np.array(traker.finalize_scores(exp_name="queries"))  # (n, queries)
    return found.T.astype(np.float64)


PEERS: dict[str, Callable[..., Floats]] = {
    "kronfluence": by_kronfluence,
    "kronfluence, damped": lambda *given: by_kronfluence(*given, damping=None),
    "dattri": by_dattri,
    "traker": by_traker,
}


def _called(module: LossModule, params: dict[str, Tensor], batch: Any) -> Tensor:
    return functional_call(
        module, {f"model.{name}": p for name, p in params.items()}, tuple(batch), strict=False
    )


def _margin(losses: Tensor) -> Tensor:
    """Returns log p / (1 - p) for losses -log p."""
    return -losses - torch.log(-torch.expm1(-losses.clamp(min=1e-6)))


def _device(model: nn.Module) -> str:
    return str(next(model.parameters()).device)


class _Items(Dataset[Any]):
    """A data set that peers take: items by index, and a length."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index]


def _collate(task: Task) -> Callable[[list[Any]], tuple[Any, ...]]:
    def collated(items: list[Any]) -> tuple[Any, ...]:
        (batch,) = task.batches(items, len(items))
        return batch

    return collated
