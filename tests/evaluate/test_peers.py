import sys

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from pergrad.errors import EvaluationError
from pergrad.evaluate import Task
from pergrad.evaluate.peers import PEERS
from tests.evaluate.tasks import blob_task, losses

MODULES = {"kronfluence": "kronfluence", "dattri": "dattri", "traker": "trak"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_a_sample_helps_itself_and_one_of_another_class_does_not(name):
    pytest.importorskip(MODULES[name.partition(",")[0]])
    task = blob_task(epochs=5, checkpoints=2)
    x, y = task.dataset.tensors
    own = Task(task.train, task.dataset, TensorDataset(x[:12], y[:12]), losses)
    trained = task.train(torch.arange(60), 0)
    before = [{k: v.clone() for k, v in state.state_dict().items()} for state in trained]
    found = PEERS[name](own, trained, 0)
    assert found.shape == (12, 60)
    assert (found[np.arange(12), np.arange(12)] > 0).all()
    same = (y[:12, None] == y[None]).numpy()
    assert found[same].mean() > found[~same].mean()
    for state, kept in zip(trained, before, strict=True):
        assert all(torch.equal(v, kept[k]) for k, v in state.state_dict().items())


@pytest.mark.parametrize("name", PEERS)
def test_a_missing_package_is_named(name, monkeypatch):
    package = name.partition(",")[0]
    for module in [m for m in sys.modules if m.partition(".")[0] == MODULES[package]]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, MODULES[package], None)
    task = blob_task(epochs=1)
    with pytest.raises(
        EvaluationError, match=f"method '{package}' needs .*: pip install --no-deps {package}"
    ):
        PEERS[name](task, task.train(torch.arange(60), 0), 0)
