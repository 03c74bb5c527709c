"""Lists of samples to train on: what helps targets, without what harms them, without duplicates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from pergrad.errors import IndexingError
from pergrad.index import read_list, write_list
from tests.index.cases import built, data


def test_selected_samples_have_the_highest_mean_scores(tmp_path: Path) -> None:
    dataset = data()
    x, y = dataset.tensors
    index = built(dataset=dataset)
    mean = index.scores((x[:6], y[:6])).mean(0)
    chosen = index.select((x[:6], y[:6]), 5)
    assert chosen == sorted(mean.topk(5).indices.tolist())
    read = read_list(write_list(tmp_path / "list.json", chosen))
    assert len(Subset(dataset, read)) == 5


def test_the_most_harmful_samples_are_left_out() -> None:
    x, y = data().tensors
    index = built()
    mean = index.scores((x[:6], y[:6])).mean(0)
    left = index.without_harmful((x[:6], y[:6]), 7)
    gone = sorted({*range(40)} - {*left})
    assert gone == sorted(mean.topk(7, largest=False).indices.tolist())
    assert index.without_harmful((x[:6], y[:6]), 0) == list(range(40))


def test_one_of_each_group_of_duplicates_is_kept() -> None:
    x, y = data().tensors
    again = TensorDataset(torch.cat([x, x[[3, 5, 3]]]), torch.cat([y, y[[3, 5, 3]]]))
    assert built(dataset=again).deduplicate(0.9999) == list(range(40))


def test_bad_counts_and_files_are_refused(tmp_path: Path) -> None:
    index, batch = built(), tuple(t[:2] for t in data().tensors)
    for count in (0, 41):
        with pytest.raises(IndexingError, match="count must be"):
            index.select(batch, count)
    with pytest.raises(IndexingError, match="groups has 1 entries"):
        index.select(batch, 3, groups=[0])
    with pytest.raises(IndexingError, match="cosine must be"):
        index.deduplicate(0)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(IndexingError, match="holds no list"):
        read_list(tmp_path / "bad.json")
    assert isinstance(index.indices, np.ndarray)
