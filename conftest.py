import os
from collections.abc import Iterator

import pytest
import torch

from pergrad.runtime.caches import clear_caches

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _caches_of_its_own() -> Iterator[None]:
    """No test sees what another one has left behind."""
    clear_caches()
    yield
    clear_caches()
