"""A chunk holds the rows and facts of its samples, whatever the batches are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pergrad.audit import Spec
from pergrad.audit.streaming.loading import Loader
from pergrad.errors import IndexingError, InterruptedAuditError
from pergrad.index.chunking import ChunkMaker
from pergrad.index.options import IndexOptions
from pergrad.index.rows.computing import RowMaker
from pergrad.index.store.numbers import unscaled
from pergrad.testing import assert_near
from tests.index.cases import data, flat_gradients, losses, network


class Watch:
    def __init__(self) -> None:
        self.advanced: list[int] = []
        self.said: list[str] = []

    def begin(self, samples: int, done: int) -> None: ...

    def advance(self, samples: int) -> None:
        self.advanced.append(samples)

    def say(self, message: str) -> None:
        self.said.append(message)


def maker(loss: Any = losses, **changes: Any) -> tuple[ChunkMaker, Watch]:
    model = network()
    spec = Spec(model, data(), loss, **changes)
    rows = RowMaker([model], loss, "none", 1, 0)
    watch, indices = Watch(), np.arange(40)[::-1].copy()
    options = IndexOptions(projection="none", dtype="float64")
    return ChunkMaker(spec, Loader(spec, indices, 0), rows, indices, options, watch), watch


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_a_chunk_is_the_same_for_any_batch_size(size: int) -> None:
    chunks, watch = maker(label=lambda item: f"class {int(item[1])}")
    found = chunks.made((4, 12), 100, 1000, size)
    assert found.span == (104, 112)
    indices = np.arange(40)[::-1][4:12]
    assert found.facts.index.tolist() == (1000 + indices).tolist()
    x, y = (t[torch.from_numpy(indices.copy())] for t in data().tensors)
    exact = flat_gradients(network(), x, y)
    assert_near(unscaled(found.rows, found.facts.scale, "float64")[:, 0], exact)
    assert_near(torch.from_numpy(found.facts.norm[:, 0]), exact.norm(dim=1))
    assert found.facts.labels == [f"class {int(n)}" for n in y]
    assert sum(watch.advanced) == 8


def test_batches_are_halved_until_they_fit() -> None:
    def hungry(model: Any, x: Any, y: Any) -> Any:
        if len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return losses(model, x, y)

    chunks, watch = maker(hungry)
    found = chunks.made((0, 8), 0, 0, 8)
    assert len(found.rows) == 8
    assert [int(text.split()[-1]) for text in watch.said] == [4, 2]


def test_memory_for_not_even_one_sample_keeps_what_there_is() -> None:
    def hungry(model: Any, x: Any, y: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(
        InterruptedAuditError, match="batch of one sample; all rows so far are kept"
    ):
        maker(hungry)[0].made((0, 4), 0, 0, 4)


def test_an_error_of_the_loss_names_the_samples() -> None:
    def broken(model: Any, x: Any, y: Any) -> Any:
        raise ValueError("no such thing")

    with pytest.raises(IndexingError, match=r"no such thing.*samples 39 to 36"):
        maker(broken)[0].made((0, 4), 0, 0, 4)
