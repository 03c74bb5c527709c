"""EK-FAC gives the scores of kronfluence, both with the empirical Fisher matrix."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.index.cases import built, data


@pytest.mark.slow
def test_scores_are_those_of_kronfluence(tmp_path: Path) -> None:
    pytest.importorskip("kronfluence")
    from kronfluence.analyzer import Analyzer, prepare_model  # noqa: PLC0415
    from kronfluence.arguments import FactorArguments, ScoreArguments  # noqa: PLC0415
    from kronfluence.task import Task  # noqa: PLC0415

    class Classifying(Task):  # type: ignore[misc]
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Any:
            return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Any:
            return self.compute_train_loss(batch, model)

    torch.manual_seed(0)
    x, y = data(200, dtype=torch.float32).tensors
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    train, test = TensorDataset(x[:180], y[:180]), TensorDataset(x[180:], y[180:])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare_model(copy.deepcopy(model), Classifying())
        analyzer = Analyzer(
            "a", prepared, Classifying(), cpu=True, disable_tqdm=True, output_dir=str(tmp_path)
        )
        analyzer.fit_all_factors(
            "f",
            train,
            per_device_batch_size=60,
            factor_args=FactorArguments(strategy="ekfac", use_empirical_fisher=True),
        )
        analyzer.compute_pairwise_scores(
            "s",
            "f",
            query_dataset=test,
            train_dataset=train,
            per_device_query_batch_size=20,
            per_device_train_batch_size=60,
            score_args=ScoreArguments(damping_factor=None),  # 0.1 of the mean eigenvalue
        )
        expected = analyzer.load_pairwise_scores("s")["all_modules"]
    index = built(model=model, dataset=train, dtype="float32", preconditioner="ekfac", damping=0.1)
    found = index.scores((x[180:], y[180:]))
    assert torch.corrcoef(torch.stack([found.flatten(), expected.flatten()]))[0, 1] > 0.9999
