"""Checks of private steps that run on several ranks; see `tests.distributed.ranks`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scipy import stats
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from pergrad.errors import PrivacyError
from pergrad.private import Plan, Step
from pergrad.testing import loop_grads
from tests.private.stepping.cases import data, losses, mlp, plan, seeded, sgd, weights


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def with_indices() -> TensorDataset:
    x, y = data().tensors
    return TensorDataset(x, y, torch.arange(len(x)))


def of_three(model: nn.Module, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    return losses(model, x, y)


def trained(made: Plan, model: nn.Module, **options: Any) -> tuple[Step, Any]:
    loader = made.loader(with_indices(), seeded())
    wrapped = DistributedDataParallel(model)
    return Step(wrapped, sgd(model), of_three, made, generator=seeded(5), **options), loader


def check_a_step_is_the_clipped_sum_of_all_ranks() -> None:
    model, seen = mlp(), 0
    step, loader = trained(plan(noise_multiplier=0.0), model)
    x, y = data().tensors
    for batch in loader:
        rows = torch.tensor(sorted(k for part in gathered(batch[2].tolist()) for k in part))
        assert len(rows.unique()) == len(rows)  # no record on two ranks
        seen += len(rows)
        before = weights(model)
        flat = torch.cat(
            [g.flatten(1) for g in loop_grads(model, losses, x[rows], y[rows]).values()], 1
        )
        total = (flat * (0.5 / flat.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
        step(*batch)
        torch.testing.assert_close(weights(model), before - total / 8, rtol=1e-12, atol=1e-13)
    assert 20 < seen < 90  # 6 batches of 8 expected


def check_noise_is_added_once_whatever_the_number_of_ranks() -> None:
    torch.manual_seed(0)
    model = nn.Linear(300, 300).double()
    samples = TensorDataset(torch.zeros(40, 300).double(), *data().tensors[1:], torch.arange(40))
    made = plan(sample_rate=1e-9, steps=2)  # nothing but noise
    step = Step(DistributedDataParallel(model), sgd(model), of_three, made)
    noises = []
    for batch in made.loader(samples):
        before = weights(model)
        step(*batch)
        noises.append((before - weights(model)) * 8 / 0.5)
    for noise in noises:
        assert noise.std().item() == pytest.approx(
            1, abs=0.015
        )  # five deviations of 90,300 numbers
        assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-4
    assert abs(torch.corrcoef(torch.stack(noises))[0, 1]) < 0.017
    keys = gathered(step._key)
    assert all(key == keys[0] for key in keys)
    assert all(torch.equal(found, weights(model)) for found in gathered(weights(model)))


def check_a_rank_without_samples_takes_part() -> None:
    model = mlp()
    step, loader = trained(plan(sample_rate=0.02, steps=12), model)
    sizes = [len(batch[0]) for batch in loader if step(*batch)]
    assert any((a == 0) != (b == 0) for a, b in zip(*gathered(sizes), strict=True))
    assert all(torch.equal(found, weights(model)) for found in gathered(weights(model)))


def check_only_the_first_rank_writes_the_ledger() -> None:
    folder = gathered(tempfile.mkdtemp())[0]
    step, loader = trained(plan(), mlp(), ledger=Path(folder) / "ledger.jsonl")
    for batch in loader:
        step(*batch)
    dist.barrier()
    lines = [json.loads(line) for line in (Path(folder) / "ledger.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines[1:]] == [1, 2, 3, 4, 5, 6]


def check_an_error_of_the_ledger_stops_all_ranks() -> None:
    folder = gathered(tempfile.mkdtemp())[0]
    path = Path(folder) / "ledger.jsonl"
    if dist.get_rank() == 0:
        path.write_text('{"ledger": 1, "plan": {}, "data": "", "run": ""}\n')
    dist.barrier()
    step, loader = trained(plan(), mlp(), ledger=path)
    with pytest.raises(PrivacyError, match="ledger"):
        step(*next(iter(loader)))


def check_renewed_noise_is_the_same_on_all_ranks() -> None:
    folder = Path(gathered(tempfile.mkdtemp())[0])
    step, loader = trained(plan(), mlp(), ledger=folder / "ledger.jsonl")
    for batch in loader:
        if step(*batch).step == 1:
            step.save(folder / "run.pt")
        if step.number == 3:
            break
    dist.barrier()
    model = mlp()
    again, loader = trained(plan(), model, ledger=folder / "ledger.jsonl")
    again.load(folder / "run.pt")
    again.renew_noise()
    for batch in loader:
        again(*batch)
    assert (again.number, again.spent) == (4, 6)
    assert all(torch.equal(found, weights(model)) for found in gathered(weights(model)))


def check_a_part_of_the_data_on_each_rank_is_refused() -> None:
    made, model = plan(), mlp()
    part = torch.utils.data.Subset(with_indices(), range(dist.get_rank(), 40, 2))
    loader = made.loader(part, seeded())
    step = Step(DistributedDataParallel(model), sgd(model), of_three, made)
    with pytest.raises(PrivacyError, match="the ranks have different data sets"):
        step(*next(iter(loader)))


def check_different_parameters_are_refused() -> None:
    model = mlp()
    if dist.get_rank():
        with torch.no_grad():
            model[0].bias.add_(1)
    with pytest.raises(PrivacyError, match="different parameters"):
        Step(model, sgd(model), of_three, plan())
