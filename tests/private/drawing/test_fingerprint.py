"""A fingerprint changes with the data, and not with augmentation or the global generator."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

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
