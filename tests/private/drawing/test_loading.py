"""A plan's loader gives the drawn batches, empty ones too, and the same augmentation when repeated."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from pergrad.errors import PrivacyError
from pergrad.private import Plan, PlanLoader


def plan(**changes: Any) -> Plan:
    usual = {"noise_multiplier": 1.0, "sample_rate": 0.5, "steps": 4, "max_norm": 1.0}
    return Plan(**(usual | changes))


def loader(data: Any, rate: float = 0.5, **options: Any) -> PlanLoader:
    return plan(sample_rate=rate).loader(data, torch.Generator().manual_seed(0), **options)


class Noisy(Dataset[Any]):
    """Samples with random augmentation, of three generators."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), torch.rand(()), random.random()])


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_drawn_ones(workers: int) -> None:
    data = TensorDataset(torch.arange(30), torch.arange(30) * 2)
    found = loader(data, num_workers=workers)
    assert len(found) == 4
    for k, (x, y) in enumerate(found):
        assert x.tolist() == found.sampler.drawn(k)
        assert torch.equal(y, 2 * x)


@pytest.mark.parametrize("workers", [0, 1])
def test_empty_batches_have_the_structure_of_the_others(workers: int) -> None:
    data = [{"x": torch.zeros(3), "name": "a", "pair": (1, torch.ones(2, 2))}] * 5
    for batch in loader(data, rate=1e-9, num_workers=workers):
        assert batch["x"].shape == (0, 3)
        assert batch["name"] == []
        assert batch["pair"][0].shape == (0,)
        assert batch["pair"][1].shape == (0, 2, 2)


def test_empty_batches_keep_named_tuples_and_own_collate_functions() -> None:
    class Pair(NamedTuple):
        x: Tensor
        y: Tensor

    data = [Pair(torch.zeros(3), torch.tensor(1))] * 5
    (batch, *_) = loader(data, rate=1e-9)
    assert isinstance(batch, Pair)
    assert batch.x.shape == (0, 3)
    doubled = loader(data, rate=1e-9, collate_fn=lambda rows: default_collate(rows).x * 2)
    assert next(iter(doubled)).shape == (0, 3)


def test_empty_data_gives_empty_batches() -> None:
    assert [*loader([])] == [()] * 4


def test_batched_reads_are_used_and_never_asked_for_nothing() -> None:
    class Batched(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Tensor:
            return torch.tensor(index)

        def __getitems__(self, indices: list[int]) -> list[Tensor]:
            assert indices
            return [torch.tensor(index + 100) for index in indices]

    found = loader(Batched())
    assert [batch.tolist() for batch in found] == [
        [100 + index for index in found.sampler.drawn(k)] for k in range(4)
    ]
    assert all(len(batch) == 0 for batch in loader(Batched(), rate=1e-9))


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_repeats_by_step_whatever_the_workers(workers: int) -> None:
    once = [batch.clone() for batch in loader(Noisy())]
    torch.rand(3)  # the global generator plays no part
    again = [batch.clone() for batch in loader(Noisy(), num_workers=workers)]
    for a, b in zip(once, again, strict=True):
        assert torch.equal(a, b)
    assert len({float(value) for batch in once for value in batch[:, 1]}) > 20


def test_iterating_leaves_the_global_generators_alone() -> None:
    before = torch.get_rng_state(), random.getstate()
    for _ in loader(Noisy()):
        pass
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize("name", ["batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"])
def test_what_the_plan_decides_is_refused(name: str) -> None:
    with pytest.raises(PrivacyError, match=f"{name} is decided by the plan"):
        loader([1, 2], **{name: 1})


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(PrivacyError, match=r"takes the options of DataLoader.*wurkers"):
        loader([1, 2], wurkers=1)


def test_batches_out_of_order_are_refused() -> None:
    with pytest.raises(PrivacyError, match="in_order=False gives batches in another order"):
        loader(TensorDataset(torch.arange(30)), num_workers=2, in_order=False)
