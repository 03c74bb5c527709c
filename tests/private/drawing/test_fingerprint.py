"""A fingerprint changes with the data, and not with augmentation or the global generator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from pergrad.private import UserDataset
from pergrad.private.drawing.fingerprint import fingerprint_of


class Rows(Dataset[Any]):
    def __init__(self, size: int, value: Any = 1.0, *, is_random: bool = False) -> None:
        self.size, self.value, self.is_random = size, value, is_random

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(2) if self.is_random else torch.zeros(2)
        return {"x": noise + index, "y": self.value, "name": f"row {index}"}


def test_values_lengths_and_types_count() -> None:
    x = torch.arange(6.0)
    found = [
        fingerprint_of(TensorDataset(x), 6),
        fingerprint_of(TensorDataset(x + 1e-6), 6),
        fingerprint_of(TensorDataset(x.double()), 6),
        fingerprint_of(Rows(6), 6),
        fingerprint_of(Rows(7), 7),
        fingerprint_of(Rows(6, 2.0), 6),
        fingerprint_of([], 0),
    ]
    assert len({*found}) == len(found)
    assert found[0] == fingerprint_of(TensorDataset(x.clone()), 6)


def test_random_samples_are_left_out_and_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    once = fingerprint_of(Rows(40, is_random=True), 40)
    torch.rand(3)
    assert once == fingerprint_of(Rows(40, is_random=True), 40)
    torch.set_rng_state(before)
    fingerprint_of(Rows(40, is_random=True), 40)
    assert torch.equal(before, torch.get_rng_state())


class Held(Dataset[Any]):
    """Keeps its samples in attributes, and counts how often it is read."""

    def __init__(self, x: Any) -> None:
        self.x, self.reads = x, 0
        self.columns: Any = None
        self.labels: Any = None
        self.cache: Any = None

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return torch.rand(2) * self.x[index]  # random: probes tell nothing


@pytest.mark.parametrize("kind", [torch.asarray, numpy.asarray])
def test_one_changed_sample_is_seen_wherever_it_is_held(kind: Any) -> None:
    values = [float(k) for k in range(5000)]
    changed = [*values[:4321], -1.0, *values[4322:]]

    def found(x: list[float]) -> list[str]:
        held = Held(kind(x))
        columns = Held(kind(values))
        columns.columns = {"x": kind(x), "size": torch.tensor(3), "cache": [0]}
        labels = Held(kind(values))
        labels.labels = [(f"{value}.png", value) for value in x]
        tensors = TensorDataset(torch.tensor(x))
        halves = [TensorDataset(torch.tensor(x[:9])), TensorDataset(torch.tensor(x[9:]))]
        sets: list[Any] = [
            held,
            columns,
            labels,
            Subset(held, range(100)),
            Subset(tensors, range(4000, 5000)),
            ConcatDataset(halves),
            x,
            UserDataset(tensors, [k // 2 for k in range(5000)], samples=2),
        ]
        return [fingerprint_of(d, len(d)) for d in sets]

    assert found(values) == found(values)
    assert not {*found(values)} & {*found(changed)}


def in_table(x: list[float]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict({"x": x})


def in_pandas(x: list[float]) -> Any:
    return pytest.importorskip("pandas").DataFrame({"x": x, "name": [f"{v}" for v in x]})


HOLDERS: dict[str, Any] = {
    "samples": lambda x: [{"x": torch.tensor(v), "y": 1} for v in x],
    "bytes": lambda x: [numpy.float32(v).tobytes() for v in x],
    "paths": lambda x: [(Path(f"{v}.png"), 1) for v in x],
    "objects": lambda x: numpy.array([f"{v}" for v in x], dtype=object),
    "sparse rows": lambda x: torch.tensor(x)[:, None].to_sparse_csr(),
    "sparse": lambda x: torch.tensor(x).to_sparse(),
    "nested": lambda x: {"deep": {"x": torch.tensor(x)}},
    "pandas": in_pandas,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", HOLDERS)
def test_one_changed_sample_is_seen_in_what_holds_it(kind: str) -> None:
    values = [float(k) for k in range(3000)]

    def found(x: list[float]) -> str:
        held = Held(torch.zeros(3000))
        held.columns = HOLDERS[kind](x)
        return fingerprint_of(held, 3000)

    assert found(values) == found([*values])
    assert found(values) != found([*values[:1234], -1.0, *values[1235:]])


def test_one_changed_row_of_a_table_is_seen_whatever_its_chunks() -> None:
    datasets = pytest.importorskip("datasets")
    values = [float(k) for k in range(3000)]
    whole, changed = in_table(values), in_table([*values[:1234], -1.0, *values[1235:]])
    assert fingerprint_of(whole, 3000) != fingerprint_of(changed, 3000)
    parts = datasets.concatenate_datasets([in_table(values[:700]), in_table(values[700:])])
    assert fingerprint_of(whole, 3000) == fingerprint_of(parts, 3000)
    shuffled = whole.select([*range(2999, -1, -1)])
    assert fingerprint_of(whole, 3000) != fingerprint_of(shuffled, 3000)


def test_reading_a_data_set_does_not_change_its_fingerprint() -> None:
    held = Held(torch.arange(30.0))
    held.cache = {}
    once = fingerprint_of(held, 30)
    held.cache["3"] = held[3]
    assert fingerprint_of(held, 30) == once


def test_every_sample_of_a_small_data_set_counts() -> None:
    class Elsewhere(Rows):
        def __getitem__(self, index: int) -> Any:
            return index if index != 617 else self.value

    assert fingerprint_of(Elsewhere(1000, 1), 1000) != fingerprint_of(Elsewhere(1000, 2), 1000)


def test_the_indices_of_a_subset_count() -> None:
    tensors = TensorDataset(torch.arange(9.0))
    first, second = Subset(tensors, [0, 1]), Subset(tensors, [0, 2])
    assert fingerprint_of(first, 2) != fingerprint_of(second, 2)
