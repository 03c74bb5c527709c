import numpy as np
import pytest

from pergrad.audit.streaming.chunks import Chunk, kept_of, write_chunk
from pergrad.audit.streaming.gradients import Rows
from pergrad.audit.writing.joining import read_all


def written(folder, indices, spans, skipped=()):
    """Rows whose numbers are their indices."""
    for start, stop in spans:
        lost = {int(n): "why" for n in indices[start:stop] if n in skipped}
        own = kept_of(indices[start:stop], lost)
        n = own.astype(np.float64)
        free = np.stack([n] * 4, 1).reshape(-1, 2, 2)
        rows = Rows(n, n, np.stack([n, n], 1), np.stack([n] * 3, 1), free=free)
        labels = [f"{k}" for k in own]
        write_chunk(folder, Chunk(start, stop, own, rows, labels, 4, {"loading": 1.0}, lost))


@pytest.mark.parametrize("in_memory", [0, 10**9])
@pytest.mark.parametrize("skipped", [(), (2, 9), (0, 1, 2, 3, 11)])
@pytest.mark.parametrize("is_sorted", [True, False])
def test_rows_are_joined_in_order_of_index(tmp_path, in_memory, skipped, is_sorted):
    indices = np.arange(12)
    if not is_sorted:
        indices = np.random.default_rng(0).permutation(12)
    written(tmp_path, indices, [(0, 4), (4, 5), (5, 12)], skipped)
    whole, sizes = read_all(tmp_path, indices, in_memory=in_memory)
    expected = np.setdiff1d(np.arange(12), skipped)
    rows = whole.rows
    assert whole.index.tolist() == rows.loss.tolist() == expected.tolist()
    for values in (rows.sketch[:, 2], rows.free[:, 1, 0], rows.group_norms[:, 1]):
        assert values.tolist() == expected.tolist()
    assert whole.labels == [str(n) for n in expected]
    assert sorted(whole.skipped) == sorted(skipped)
    assert whole.seconds == {"loading": 3.0}
    assert sizes == {4: len(expected)}
    assert isinstance(rows.sketch, np.memmap) == (in_memory == 0)


def test_the_file_of_a_large_matrix_leaves_nothing_behind(tmp_path):
    indices = np.arange(8)
    written(tmp_path, indices, [(0, 8)])
    before = sorted(tmp_path.iterdir())
    whole, _ = read_all(tmp_path, indices, in_memory=0)
    assert sorted(tmp_path.iterdir()) == before
    assert whole.rows.sketch[5].tolist() == [5, 5, 5]
