"""Measures recorded steps of sharded models (FSDP2) in plain FSDP2 training steps, and checks them.

Run as ``python -m benchmarks.fsdp --device cuda --size gpu --store`` for one rank, or by torchrun for more.
All steps alternate; the fastest of each counts. First, norms and the clipped sum are compared with those of
the same model before `fully_shard`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import pergrad
from benchmarks.fastest import fastest, fastest_rows, show, store
from benchmarks.models import MODELS, Size, Task, build
from benchmarks.rows import Row, provenance

Precision = Literal["float32", "bfloat16"]
_NAMES = ("transformer", "vit")
_TITLES = {
    "plain": "plain FSDP2 training",
    "norms": "norms",
    "sum": "sums",
    "kept": 'clipped sums, memory="kept"',
    "low": 'clipped sums, memory="low"',
}


def sharded(model: nn.Module, device: torch.device, precision: Precision) -> nn.Module:
    """Shards each block, and the rest."""
    half = torch.bfloat16 if precision == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return model


def recorded(task: Task, *quantities: pergrad.Quantity) -> None:
    with pergrad.record(task.model, *quantities):
        task.loss(task.model(task.inputs), task.targets).backward()


def error(task: Task, device: torch.device) -> float:
    """Shards the task's model; returns the largest relative error of norms and clipped sums in float64."""
    wanted, wanted_norms = pergrad.ClippedSum(1.0), pergrad.Norms()
    recorded(task, wanted, wanted_norms)
    sharded(task.model, device, "float32")
    found, norms = pergrad.ClippedSum(1.0), pergrad.Norms()
    recorded(task, found, norms)
    world = dist.get_world_size()  # every rank has the same samples here
    apart = [_apart(norms.result, wanted_norms.result)]
    for name, shard in found.result.items():
        apart.append(_apart(shard.full_tensor() / world, wanted.result[name]))  # type: ignore[attr-defined]
    return max(apart)


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    scale = float(wanted.abs().max())
    return float((found - wanted).abs().max()) / scale if scale else 0.0


def steps(task: Task, device: torch.device) -> dict[str, Callable[[], None]]:
    """Returns a plain step and recorded ones; each ends when the device has finished."""

    def timed(run: Callable[[], None]) -> Callable[[], None]:
        def step() -> None:
            run()
            task.model.zero_grad(set_to_none=True)
            if device.type != "cpu":
                torch.accelerator.synchronize()

        return step

    def assigned(make: Callable[[], pergrad.Sum | pergrad.ClippedSum]) -> Callable[[], None]:
        def run() -> None:
            quantity = make()
            recorded(task, quantity)
            quantity.assign(reduce=True)

        return timed(run)

    return {
        "plain": timed(lambda: task.loss(task.model(task.inputs), task.targets).backward()),
        "norms": timed(lambda: recorded(task, pergrad.Norms())),
        "sum": assigned(pergrad.Sum),
        "kept": assigned(lambda: pergrad.ClippedSum(1.0)),
        "low": assigned(lambda: pergrad.ClippedSum(1.0, memory="low")),
    }


def rows(
    size: Size, device: torch.device, precision: Precision, rounds: int, seed: int
) -> list[Row]:
    """Checks and times each model; returns its rows."""
    found: list[Row] = []
    made = provenance(device, of_commit=None, rounds=rounds, steps=1, seed=seed)
    for name in _NAMES:
        exact = error(build(name, "tiny", seed=seed, device=device).double(), device)
        assert exact < 1e-10, f"{name}: {exact:.1e} from the model before fully_shard"
        task = build(name, size, seed=seed, device=device)
        sharded(task.model, device, precision)
        seconds = fastest(steps(task, device), rounds, warm_up=2, clock=time.perf_counter)
        timed = fastest_rows(
            seconds,
            _TITLES,
            size=size,
            model=name,
            model_title=f"{MODELS[name][size].title}, {precision}, {dist.get_world_size()} rank(s)",
            quantity="fsdp",
            note=f"the fastest step, with its reduction; tiny in float64: {exact:.0e} from one process",
            provenance=made,
        )
        found += [replace(row, precision=precision) for row in timed]
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--size", choices=["tiny", "cpu", "gpu"], default="cpu")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", action="store_true", help="keep the rows")
    options = parser.parse_args(arguments)
    backend = "nccl" if options.device == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    try:
        found = rows(options.size, device, options.precision, options.rounds, options.seed)
        if dist.get_rank() == 0:
            show(found)
            if options.store:
                store(found, "fsdp", f"{options.device}-{options.precision}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
