import numpy as np
import pytest

from pergrad.attribution.matrices import BLOCK, Chosen, blocks, finite_rows
from tests.attribution.gradient_cases import gradients


def test_blocks_cover_every_row_once() -> None:
    for rows, size in ((0, 3), (1, 3), (3, 3), (10, 3)):
        assert np.concatenate([[], *(np.arange(rows)[b] for b in blocks(rows, size))]).tolist() == [
            *range(rows)
        ]


def test_chosen_rows_are_those_of_a_mask_less_their_mean() -> None:
    base = gradients(BLOCK + 10, 3).reshape(-1, 1, 3).repeat(2, axis=1)
    base[:, 0] = np.nan
    where = np.arange(len(base)) % 3 > 0
    rows = base[where, 1]
    found = Chosen(base, where, 1)
    assert found.shape == rows.shape
    assert np.array_equal(found[5:9], rows[5:9])
    centred = Chosen(base, where, 1, centred=True)
    np.testing.assert_allclose(centred[np.array([7, 2])], (rows - rows.mean(0))[[7, 2]], rtol=1e-12)


def test_no_chosen_row_is_an_empty_matrix() -> None:
    found = Chosen(gradients(4, 3), np.zeros(4, dtype=bool), centred=True)
    assert found.shape == (0, 3)
    assert found[:].shape == (0, 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_is_finite_if_all_its_entries_are(bad) -> None:
    rows = gradients(BLOCK + 3, 2)
    rows[[0, BLOCK + 1], 1] = bad
    assert np.flatnonzero(~finite_rows(rows)).tolist() == [0, BLOCK + 1]
