"""The store reads what was written, refuses damage by the file's name, and compacts to equal bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from pergrad import Index
from pergrad.errors import IndexingError
from pergrad.index.store.numbers import checked_dtype, unscaled
from tests.index.cases import built, data, network


def test_blocks_and_files_have_the_same_rows(tmp_path: Path) -> None:
    store = built(tmp_path, chunk=8)._store
    whole = np.concatenate([np.load(path) for path in sorted(store.rows.glob("*.npy"))])
    for size in (1, 10_000, 10**9):
        blocks = [(b.start, b.rows.copy()) for b in store.blocks(size=size)]
        assert np.array_equal(np.concatenate([rows for _, rows in blocks]), whole)
        assert blocks[-1][0] + len(blocks[-1][1]) == 40


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_single_rows_are_read_in_any_order_and_without_deleted_ones(
    tmp_path: Path, dtype: str
) -> None:
    index = built(tmp_path, chunk=8, dtype=dtype)
    for deleted in ([], [3, 8, 9, 39]):
        index.delete(deleted)
        numbers = np.array([len(index) - 1, 0, 7, 8, 7, 20])
        values, scale = index._store.at(numbers)
        found = unscaled(values, scale, checked_dtype(dtype))
        assert torch.equal(found, index.rows()[torch.from_numpy(numbers)])
    values, scale = index._store.at(np.zeros(0, np.int64))
    assert (values.shape, scale.shape) == ((0, index._store.width), (0, 1))


def test_appended_and_compacted_files_are_those_of_one_build(tmp_path: Path) -> None:
    model, whole = network(), data(48)
    x, y = whole.tensors
    built(tmp_path / "whole", model, whole, chunk=16)
    index = built(tmp_path / "parts", model, TensorDataset(x[:40], y[:40]), chunk=16)
    index.append(TensorDataset(x[40:], y[40:]), quiet=True)
    index.compact()
    files = sorted((tmp_path / "whole" / "rows-0").iterdir())
    others = sorted((tmp_path / "parts" / "rows-1").iterdir())
    assert [p.read_bytes() for p in files] == [p.read_bytes() for p in others]
    assert not (tmp_path / "parts" / "rows-0").exists()


def test_what_killed_processes_left_is_removed_by_the_next_change(tmp_path: Path) -> None:
    model = network()

    def left() -> list[Path]:
        (tmp_path / "rows-7").mkdir()
        (tmp_path / "rows-7" / "000000000000-000000000024.npy").write_bytes(b"old")
        found = [tmp_path / "rows-7"]
        for name in ("index.json", "deleted.npy", "rows-0/a.npy", "states/a.pt"):
            found.append(tmp_path / f"{name}.123.unfinished")
            found[-1].write_bytes(b"cut")
        return found

    index = built(tmp_path, model)
    changes = [
        lambda: built(tmp_path, model),
        lambda: index.append(data(8, seed=5), quiet=True),
        lambda: index.delete([3]),
    ]
    (tmp_path / "approximate.f16.123.unfinished").write_bytes(b"a query is writing it")
    for change in changes:
        paths = left()
        change()
        assert not [path for path in paths if path.exists()]
    assert (tmp_path / "approximate.f16.123.unfinished").exists()
    assert len(index) == 47


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_a_damaged_file_is_named(tmp_path: Path, suffix: str) -> None:
    built(tmp_path)
    path = next(iter(sorted((tmp_path / "rows-0").glob(f"*.{suffix}"))))
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(IndexingError, match=path.name):
        len(Index(tmp_path))


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    built(tmp_path)
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(IndexingError, match=r"index.json is corrupt"):
        Index(tmp_path)


def test_rows_that_are_not_finite_are_never_matches() -> None:
    dataset = data()
    x, y = dataset.tensors
    x[5] = torch.inf
    index = built(dataset=dataset, preconditioner="second_moment")
    frame = index.query((x[:2], y[:2]), 40).frame
    assert 5 not in set(frame["index"])
    assert len(index) == 40
