"""Tests that draws from Python's and numpy's random numbers are noticed, and undone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pergrad.engine.compiling.guarding.draws import (
    UnrepeatableError,
    is_generator,
    refusing_draws,
)


def _seeded() -> None:
    random.seed(0)
    random.random()


OWN = random.Random(0)
OF_NUMPY = np.random.default_rng(0)
OLD = np.random.RandomState(0)
DRAWS: list[Callable[[], Any]] = [
    random.random,
    _seeded,
    np.random.rand,
    OWN.random,
    OF_NUMPY.random,
    OLD.rand,
]


@pytest.mark.parametrize("draw", DRAWS)
def test_a_draw_is_refused_even_if_it_is_seeded_and_leaves_no_trace(
    draw: Callable[[], Any],
) -> None:
    draw()
    before = random.getstate(), OWN.getstate(), repr(OF_NUMPY.bit_generator.state)
    with (
        pytest.raises(UnrepeatableError, match="random numbers of Python or numpy"),
        refusing_draws([OWN, OF_NUMPY, OLD]),
    ):
        draw()
    assert before == (random.getstate(), OWN.getstate(), repr(OF_NUMPY.bit_generator.state))


def test_what_draws_nothing_is_left_alone() -> None:
    before = random.getstate()
    with refusing_draws([OWN]):
        pass
    assert random.getstate() == before
    assert [is_generator(value) for value in (OWN, OF_NUMPY, OLD, 3)] == [True, True, True, False]
