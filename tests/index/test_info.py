"""What an index tells about itself is what it holds."""

from __future__ import annotations

import pytest

from pergrad.index.info import data_frame
from tests.index.cases import built, data, network


def test_samples_rows_and_bytes_are_counted() -> None:
    index = built(projection="count", dim=16, dtype="float16", checkpoints=[network(seed=1)])
    index.append(data(4, seed=2), quiet=True)
    index.delete([0, 41])
    info = index.info()
    assert (info.samples, info.rows, info.deleted, info.skipped) == (42, 42, 2, 0)
    assert (info.checkpoints, info.dim, info.dtype, info.per) == (2, 16, "float16", "sample")
    assert info.parameters == 6 * 8 + 8 + 8 * 3 + 3
    assert info.data == ["TensorDataset", "TensorDataset"]
    assert info.bytes == index._store.bytes_on_disk() > 44 * 2 * 16 * 2
    assert info.bytes_per_sample == pytest.approx(info.bytes / 42)
    assert not info.certified


def test_it_prints_as_a_table() -> None:
    text = str(built(preconditioner="second_moment").info())
    assert "Sequential, 83 parameters" in text
    assert "none, 83 x float64 for each checkpoint" in text
    assert "second_moment" in text
    assert len({line.index("  ", 2) for line in text.splitlines()[1:]}) >= 1


def test_a_data_frame_has_the_columns() -> None:
    frame = data_frame({"index": [1, 2], "score": [0.5, -1.0]})
    assert list(frame.columns) == ["index", "score"]
    assert frame.score.sum() == -0.5
