"""Checks of private steps of sharded models (FSDP2), on several ranks; see `tests.distributed.ranks`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scipy import stats
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from pergrad.errors import PrivacyError
from pergrad.private import Plan, Step
from pergrad.testing import loop_grads
from tests.private.stepping.cases import data, losses, mlp, plan, seeded, sgd
from tests.private.stepping.ddp_checks import gathered, of_three, with_indices


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model[0])
    fully_shard(model)
    return model


def whole(model: nn.Module) -> Tensor:
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in parts])


def trained(made: Plan, model: nn.Module, **options: Any) -> tuple[Step, Any]:
    loader = made.loader(with_indices(), seeded())
    optimizer = options.pop("optimizer", None) or sgd(model)
    return Step(model, optimizer, of_three, made, generator=seeded(5), **options), loader


def _is_clipped_sum(rate: float, piece_size: int | None) -> None:
    plain, model = mlp(), sharded(mlp())
    step, loader = trained(
        plan(noise_multiplier=0.0, sample_rate=rate), model, piece_size=piece_size
    )
    x, y = data().tensors
    for batch in loader:
        rows = torch.tensor(
            sorted(k for part in gathered(batch[2].tolist()) for k in part), dtype=torch.long
        )
        expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
        if len(rows):
            flat = torch.cat(
                [g.flatten(1) for g in loop_grads(plain, losses, x[rows], y[rows]).values()], 1
            )
            weights = (0.5 / flat.norm(dim=1, keepdim=True)).clamp(max=1)
            expected = expected - (flat * weights).sum(0) / 8
        step(*batch)
        torch.testing.assert_close(whole(model), expected, rtol=1e-12, atol=1e-13)
        with torch.no_grad():
            for p, new in zip(plain.parameters(), _split(expected, plain), strict=True):
                p.copy_(new)
        assert step.last is not None
        assert len(step.last.norms) == len(batch[0])


def _split(flat: Tensor, model: nn.Module) -> list[Tensor]:
    parts = flat.split([p.numel() for p in model.parameters()])
    return [part.view(p.shape) for part, p in zip(parts, model.parameters(), strict=True)]


def check_a_step_is_the_clipped_sum_of_all_ranks() -> None:
    _is_clipped_sum(0.3, None)


def check_pieces_are_as_many_on_all_ranks() -> None:
    _is_clipped_sum(0.4, 3)


def check_ranks_without_samples_take_part() -> None:
    _is_clipped_sum(0.03, None)
    _is_clipped_sum(1e-9, None)  # and batches that are empty on all of them


def check_noise_of_shards_has_the_plan_s_variance_and_is_independent() -> None:
    torch.manual_seed(0)
    model = sharded(nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 7)).double())
    samples = TensorDataset(torch.zeros(40, 300).double(), *data().tensors[1:], torch.arange(40))
    made = plan(sample_rate=1e-9, steps=2)
    step = Step(model, sgd(model), of_three, made)
    noises, locals_ = [], []
    for batch in made.loader(samples):
        before, here = whole(model), model[0].weight.to_local().clone()
        step(*batch)
        noises.append((before - whole(model)) * 8 / 0.5)
        locals_.append(here - model[0].weight.to_local())
    for noise in noises:
        assert noise.std().item() == pytest.approx(1, abs=0.015)
        assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-4
    assert abs(torch.corrcoef(torch.stack(noises))[0, 1]) < 0.017  # over steps
    others = gathered(locals_[0])
    assert (
        abs(torch.corrcoef(torch.stack([t.flatten() for t in others]))[0, 1]) < 0.025
    )  # over ranks
    assert all(torch.equal(found, whole(model)) for found in gathered(whole(model)))


def check_a_saved_run_goes_on_bit_for_bit() -> None:
    folder = Path(gathered(tempfile.mkdtemp())[0])

    def run(stop: int | None, ledger: str) -> Tensor:
        model = sharded(mlp())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        step, loader = trained(plan(), model, optimizer=optimizer, ledger=folder / ledger)
        if ledger == "broken" and (folder / "run.pt").exists():
            step.load(folder / "run.pt")
        for batch in loader:
            if step(*batch).step == stop:
                step.save(folder / "run.pt")
                break
        dist.barrier()
        return whole(model)

    expected = run(None, "whole")
    run(2, "broken")
    run(4, "broken")
    assert torch.equal(run(None, "broken"), expected)
    assert (folder / "broken").read_text().splitlines() == (
        (folder / "whole").read_text().splitlines()
    )


def check_what_needs_whole_parameters_is_refused() -> None:
    model = sharded(mlp())
    with pytest.raises(PrivacyError, match="sharded over ranks"):
        Step(model, sgd(model), of_three, plan(bands=2))
    with pytest.raises(PrivacyError, match="sharded over ranks"):
        Step(model, sgd(model), of_three, plan(), 4, backend="eager")
