"""Lists of samples to train on: what helps targets, without what harms them, without duplicates."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from pergrad.attribution.duplicates import near_duplicates
from pergrad.errors import IndexingError
from pergrad.index import curating, read_list, write_list
from pergrad.index.curating import deduplicated
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


def test_groups_have_any_names() -> None:
    index, batch = built(), tuple(t[:4] for t in data().tensors)
    expected = index.select(batch, 5, groups=[0, 1, 1, 0])
    for groups in (["b", "a", "a", "b"], np.array([7, 3, 3, 7]), torch.tensor([1, 0, 0, 1])):
        assert index.select(batch, 5, groups=groups) == expected


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


def test_many_samples_are_searched_in_buckets_and_the_recall_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = data(300).tensors
    again = TensorDataset(torch.cat([x, x[:40]]), torch.cat([y, y[:40]]))
    index = built(dataset=again)
    expected = index.deduplicate(0.9999)
    assert capsys.readouterr().err == ""
    few = partial(near_duplicates, exact_up_to=100)
    monkeypatch.setattr(curating, "near_duplicates", few)
    found = index.deduplicate(0.9999)
    assert "recall" in capsys.readouterr().err
    assert {*expected} <= {*found}  # a pair may be missed, and none invented
    assert len(found) <= 305
    index.deduplicate(0.9999, quiet=True)
    assert capsys.readouterr().err == ""


def test_rows_without_a_direction_are_duplicates_of_nothing(tmp_path: Path) -> None:
    x, y = data(6).tensors
    x[3:] = 0.0  # equal, with a gradient
    x[4:] = torch.nan
    index = built(dataset=TensorDataset(x, y))
    index.delete([0])
    kept, groups, recall = deduplicated(index._store, 0.9999)
    assert {4, 5} <= {*kept}
    assert 0 not in kept
    assert recall is None
    assert not {4, 5} & {n for group in groups for n in group}


def test_bad_counts_and_files_are_refused(tmp_path: Path) -> None:
    index, batch = built(), tuple(t[:2] for t in data().tensors)
    for count in (0, 41):
        with pytest.raises(IndexingError, match="count must be"):
            index.select(batch, count)
    for groups, shape in (([0], r"\(1,\)"), ([[0, 1]], r"\(1, 2\)"), ("task", r"\(\)")):
        with pytest.raises(IndexingError, match=f"groups has entries of shape {shape}"):
            index.select(batch, 3, groups=groups)
    with pytest.raises(IndexingError, match="cosine must be"):
        index.deduplicate(0)
    for told in ("{", "", "3", '{"1": 2}', "[1.5]", "[-1]", "[true]", '["1"]', "[[1]]"):
        (tmp_path / "bad.json").write_text(told)
        with pytest.raises(IndexingError, match="holds no list"):
            read_list(tmp_path / "bad.json")
    wrong: Any
    for wrong in ([1.5], [True], ["1"], torch.tensor([True, False]), [-1]):
        with pytest.raises(IndexingError, match="holds integers"):
            write_list(tmp_path / "bad.json", wrong)
    numbers = write_list(tmp_path / "good.json", np.array([3, 1]))
    assert read_list(numbers) == [3, 1]
    assert isinstance(index.indices, np.ndarray)
