"""Accelerate keeps its settings for the whole process: each test begins without them."""

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()
