from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.reports.edge_cases import CASES


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The results folder of a case, written once: reports are made from it again and again."""
    return cache(lambda case: CASES[case](tmp_path_factory.mktemp(case)))
