"""Tables of problems."""

from __future__ import annotations

import pytest
import torch

from pergrad.kernels.tables import kept_tables, problems_of, table_of


def test_table_has_a_row_of_each_problem() -> None:
    table = table_of(problems_of([(1, 2**40), (3, 4)]), torch.device("cpu"))
    assert table.tolist() == [[1, 2**40], [3, 4]]


@pytest.mark.gpu
def test_tables_are_kept_where_asked_for_and_only_there() -> None:
    device = torch.device("cuda")
    with kept_tables() as kept:
        table = table_of(problems_of([(5, 6)]), device)
    table_of(problems_of([(7, 8)]), device)
    assert [t.tolist() for t in kept] == [[[5, 6]]]
    assert kept[0].is_pinned()
    assert table.tolist() == [[5, 6]]


def test_equal_problems_share_a_table_and_others_do_not() -> None:
    device = torch.device("cpu")
    table = table_of(problems_of([(1, 2), (3, 4)]), device)
    assert table_of(problems_of([(1, 2), (3, 4)]), device) is table
    assert table_of(problems_of([(1, 2, 3, 4)]), device).tolist() == [[1, 2, 3, 4]]
    assert table_of(problems_of([(1, 2), (3, 5)]), device).tolist() == [[1, 2], [3, 5]]
