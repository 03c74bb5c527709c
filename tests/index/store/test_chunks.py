"""A chunk is read as it was written, and exists once its facts do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pergrad.errors import IndexingError
from pergrad.index.store.chunks import (
    Chunk,
    Facts,
    joined_facts,
    read_facts,
    rows_file,
    spans_in,
    write_chunk,
)


def facts(start: int, count: int, **changes: object) -> Facts:
    number = np.arange(start, start + count)
    own = {
        "index": number,
        "loss": np.ones((count, 2)),
        "norm": number[:, None] * np.ones((1, 2)),
        "scale": np.full((count, 2), 0.5, np.float32),
    }
    return Facts(**{**own, **changes})  # type: ignore[arg-type]


def chunk(start: int, count: int, **changes: object) -> Chunk:
    rows = np.arange(count * 6, dtype=np.float16).reshape(count, 6)
    return Chunk((start, start + count), rows, facts(start, count, **changes))


def test_chunks_are_read_as_they_were_written(tmp_path: Path) -> None:
    labels, skipped = ["é", "b", "c"], {9: "no such file"}
    written = chunk(4, 3, labels=labels, skipped=skipped, token=np.array([1, 2, 3], np.int32))
    write_chunk(tmp_path, written)
    write_chunk(tmp_path, chunk(0, 4))
    assert spans_in(tmp_path) == [(0, 4), (4, 7)]
    found = read_facts(tmp_path, (4, 7))
    assert (found.labels, dict(found.skipped)) == (labels, skipped)
    for name in ("index", "loss", "norm", "scale", "token"):
        assert np.array_equal(getattr(found, name), getattr(written.facts, name))
    assert np.array_equal(np.load(rows_file(tmp_path, (4, 7))), written.rows)


def test_rows_without_facts_are_no_chunk(tmp_path: Path) -> None:
    write_chunk(tmp_path, chunk(0, 4))
    (tmp_path / "000000000000-000000000004.npz").unlink()
    assert spans_in(tmp_path) == []


def test_the_same_chunk_is_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_chunk(tmp_path / name, chunk(0, 4))
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_files_that_do_not_belong_together_are_named(tmp_path: Path) -> None:
    write_chunk(tmp_path, chunk(0, 4))
    np.save(rows_file(tmp_path, (0, 4)), np.zeros((3, 6), np.float16))
    with pytest.raises(IndexingError, match=r"\.npy is corrupt \(3 rows, expected 4\)"):
        read_facts(tmp_path, (0, 4))
    rows_file(tmp_path, (0, 4)).unlink()
    with pytest.raises(IndexingError, match="FileNotFoundError"):
        read_facts(tmp_path, (0, 4))


def test_facts_are_joined_in_order_and_skipped_items_are_kept() -> None:
    none = facts(0, 0, skipped={5: "gone"})
    both = joined_facts([facts(3, 2, labels=["a", "b"]), none, facts(0, 1, labels=["c"])])
    assert both.index.tolist() == [3, 4, 0]
    assert both.labels == ["a", "b", "c"]
    assert dict(both.skipped) == {5: "gone"}
    assert joined_facts([facts(0, 1, labels=["a"]), facts(1, 1)]).labels is None
    assert len(joined_facts([none])) == 0
    assert dict(joined_facts([none]).skipped) == {5: "gone"}
