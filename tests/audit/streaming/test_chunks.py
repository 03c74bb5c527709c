import numpy as np
import pytest

from pergrad.audit.streaming.chunks import (
    Chunk,
    gaps,
    kept_spans,
    read_chunk,
    write_chunk,
)
from pergrad.audit.streaming.gradients import Rows
from pergrad.audit.writing import joining
from pergrad.audit.writing.joining import read_all
from pergrad.errors import AuditError


def chunk(start, stop, *, batch_size=4, labels=True):
    n = np.arange(start, stop, dtype=np.float64)
    rows = Rows(n, n + 0.1, np.stack([n, -n], 1), np.stack([n] * 3, 1).astype(np.float32))
    words = [f"é{k:.0f}" for k in n] if labels else None
    return Chunk(start, stop, n.astype(np.int64), rows, words, batch_size, {"loading": 0.5})


def test_a_chunk_is_read_as_it_was_written(tmp_path):
    written = chunk(3, 7)
    write_chunk(tmp_path, written)
    (path,) = tmp_path.iterdir()
    found = read_chunk(path)
    assert (found.start, found.stop, found.batch_size) == (3, 7, 4)
    assert found.labels == written.labels
    assert found.rows.sketch.dtype == np.float32
    for name in ("loss", "norm", "group_norms", "sketch"):
        assert np.array_equal(getattr(found.rows, name), getattr(written.rows, name))


def test_all_chunks_are_one_in_order(tmp_path):
    for part in (chunk(5, 9), chunk(0, 5, batch_size=2)):
        write_chunk(tmp_path, part)
    (tmp_path / "0000000009-0000000012.npz.77.unfinished").write_bytes(b"half")
    assert kept_spans(tmp_path) == [(0, 5), (5, 9)]
    whole, sizes = read_all(tmp_path, np.arange(9))
    assert whole.rows.loss.tolist() == list(range(9))
    assert whole.labels is not None
    assert whole.labels[8] == "é8"
    assert whole.seconds == {"loading": 1.0}
    assert sizes == {2: 5, 4: 4}
    assert whole.batch_size == 2


def test_chunks_that_are_known_are_not_read(tmp_path, monkeypatch):
    parts = [chunk(0, 5), chunk(5, 9)]
    for part in parts:
        write_chunk(tmp_path, part)
    expected, _ = read_all(tmp_path, np.arange(9))
    read = []
    monkeypatch.setattr(joining, "read_chunk", lambda path: read.append(path.name) or parts[1])
    found, sizes = read_all(tmp_path, np.arange(9), {(0, 5): parts[0]})
    assert read == ["0000000005-0000000009.npz"]
    assert np.array_equal(found.rows.sketch, expected.rows.sketch)
    assert (found.labels, found.seconds, sizes) == (expected.labels, expected.seconds, {4: 9})


@pytest.mark.parametrize("harm", ["cut", "changed", "foreign", "renamed"])
def test_a_corrupt_chunk_is_refused_by_name(tmp_path, harm):
    write_chunk(tmp_path, chunk(0, 5))
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    if harm == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif harm == "changed":
        middle = content.index(np.float64(3.1).tobytes())
        path.write_bytes(content[:middle] + b"\1" + content[middle + 1 :])
    elif harm == "foreign":
        path.write_bytes(b"something else")
    else:
        path = path.rename(tmp_path / "0000000000-0000000006.npz")
    with pytest.raises(AuditError, match=f"{path.name} is corrupt .*remove this file"):
        read_chunk(path)


def test_missing_rows_are_told(tmp_path):
    write_chunk(tmp_path, chunk(0, 5))
    write_chunk(tmp_path, chunk(7, 9))
    with pytest.raises(AuditError, match="rows 5 to 7 are missing"):
        read_all(tmp_path, np.arange(9))


def test_rows_of_other_samples_are_refused(tmp_path):
    write_chunk(tmp_path, chunk(0, 5))
    with pytest.raises(AuditError, match="other samples"):
        read_all(tmp_path, np.arange(1, 6))


def test_gaps_are_what_the_spans_leave():
    assert gaps([], 3) == [(0, 3)]
    assert gaps([(0, 3)], 3) == []
    assert gaps([(1, 2), (2, 3)], 4) == [(0, 1), (3, 4)]
