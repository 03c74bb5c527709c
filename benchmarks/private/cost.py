"""Measures whole private steps against plain training: Poisson batch, clipping, noise and optimizer.

A logical batch has several pieces of the benchmark's batch; plain training accumulates over as many samples.
All methods take turns in one process; the time is per sample, as Poisson batches differ in size.

`python -m benchmarks.private.cost` writes benchmarks/results/private/cost-cpu.json; `--device cuda` measures
the GPT-2 shape in bfloat16 autocast. `ratio` is to eager training, `ratio_compiled` to compiled training: as
CUDA graphs where the method is.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks.models import MODELS, Size, Task
from benchmarks.private.results import write
from benchmarks.turns import Turns
from pergrad.private import Plan, Step

__all__ = ["main"]

Logical = Callable[[], int]  # makes a logical step; returns the number of its samples


class Setting:
    """A task, the pieces of a logical batch, and whether to compute in bfloat16."""

    def __init__(self, task: Task, pieces: int, device: torch.device) -> None:
        self.task, self.device = task, device
        self.size = len(task.inputs)
        self.expected = self.size * pieces
        self.half = device.type == "cuda"
        population = 64 * self.expected
        rows = torch.arange(population) % self.size
        self.data = TensorDataset(
            task.inputs.to(device)[rows.to(device)], task.targets.to(device)[rows.to(device)]
        )

    def model(self) -> nn.Module:
        return copy.deepcopy(self.task.model).to(self.device)

    def autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.half)

    def plan(self) -> Plan:
        return Plan(
            noise_multiplier=1.0,
            sample_rate=1 / 64,
            steps=100_000,
            max_norm=1.0,
            expected_batch_size=self.expected,
        )

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.data.tensors
        for start in range(0, self.expected, self.size):
            yield x[start : start + self.size], y[start : start + self.size]


def losses(model: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    each = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")
    return each.view(len(x), -1).sum(1)


def plain(setting: Setting, *, is_compiled: bool = False, mode: str | None = None) -> Logical:
    model = setting.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    run = torch.compile(model, mode=mode) if is_compiled else model
    if (
        mode is not None
    ):  # a CUDA graph writes over the gradients of its last run: add them to others
        for p in model.parameters():
            p.grad = torch.zeros_like(p)

    def step() -> int:
        for x, y in setting.pieces():
            with setting.autocast():
                loss = losses(run, x, y).sum()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=mode is None)
        return setting.expected

    return step


def private(setting: Setting, **options: Any) -> Logical:
    model = setting.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    plan = setting.plan()
    loader = iter(plan.loader(setting.data, torch.Generator().manual_seed(0)))
    made = Step(model, optimizer, losses, plan, setting.size, certify=False, **options)

    def step() -> int:
        batch = next(loader)
        with setting.autocast():
            made(*batch)
        return len(batch[0])

    return step


def opacus_hooks(setting: Setting) -> Logical:
    from opacus.grad_sample import GradSampleModule  # noqa: PLC0415  # an optional peer
    from opacus.optimizers import DPOptimizer  # noqa: PLC0415

    model = GradSampleModule(setting.model(), loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-6),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=setting.expected,
        loss_reduction="sum",
    )

    def step() -> int:
        pieces = [*setting.pieces()]
        for number, (x, y) in enumerate(pieces, start=1):
            optimizer.zero_grad()
            with setting.autocast():
                loss = losses(model, x, y).sum()
            loss.backward()
            optimizer.signal_skip_step(do_skip=number < len(pieces))
            optimizer.step()
        return setting.expected

    return step


def opacus_ghost(setting: Setting) -> Logical:
    from opacus.grad_sample import (  # noqa: PLC0415  # an optional peer
        GradSampleModuleFastGradientClipping,
    )
    from opacus.optimizers import DPOptimizerFastGradientClipping  # noqa: PLC0415
    from opacus.utils.fast_gradient_clipping_utils import (  # noqa: PLC0415
        DPLossFastGradientClipping,
    )

    model = GradSampleModuleFastGradientClipping(
        setting.model(), loss_reduction="sum", max_grad_norm=1.0
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=1e-6),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=setting.expected,
        loss_reduction="sum",
    )
    criterion = DPLossFastGradientClipping(
        model, optimizer, nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum"
    )

    def step() -> int:
        pieces = [*setting.pieces()]
        for number, (x, y) in enumerate(pieces, start=1):
            optimizer.zero_grad()
            with setting.autocast():
                logits = model(x)
                loss = criterion(logits.flatten(0, -2), y.flatten(), shape=tuple(y.shape))
            loss.backward()
            optimizer.signal_skip_step(do_skip=number < len(pieces))
            optimizer.step()
        return setting.expected

    return step


def jax_vmapped(setting: Setting) -> Logical:
    import jax  # noqa: PLC0415  # an optional peer
    import jax.numpy as jnp  # noqa: PLC0415

    from benchmarks.jax_models import Net, forward_of  # noqa: PLC0415
    from benchmarks.jax_steps import Gradients, array, clipped  # noqa: PLC0415

    forward = forward_of(setting.task.model)
    compute = jnp.dtype("bfloat16" if setting.half else "float32")
    clip = clipped(1.0)

    def loss(weights: Gradients, x: Any, y: Any) -> Any:
        scores = jax.nn.log_softmax(forward(Net(weights, compute), x).astype(jnp.float32))
        return -jnp.take_along_axis(scores, y[..., None], axis=-1).sum()

    @jax.jit
    def add(sums: Gradients, weights: Gradients, x: Any, y: Any) -> Gradients:
        grads = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(weights, x, y)
        return jax.tree.map(jnp.add, sums, clip(grads))

    @jax.jit
    def update(weights: Gradients, sums: Gradients, key: Any) -> Gradients:
        keys = dict(zip(sums, jax.random.split(key, len(sums)), strict=True))
        return {
            name: weights[name]
            - 1e-6 * (total + jax.random.normal(keys[name], total.shape)) / setting.expected
            for name, total in sums.items()
        }

    state: dict[str, Any] = {
        "weights": {name: array(p) for name, p in setting.task.model.named_parameters()},
        "key": jax.random.key(0),
    }
    pieces = [(array(x), array(y)) for x, y in setting.pieces()]

    def step() -> int:
        sums = jax.tree.map(jnp.zeros_like, state["weights"])
        for x, y in pieces:
            sums = add(sums, state["weights"], x, y)
        state["key"], key = jax.random.split(state["key"])
        state["weights"] = jax.block_until_ready(update(state["weights"], sums, key))
        return setting.expected

    return step


METHODS: dict[str, Callable[[Setting], Logical]] = {
    "plain": plain,
    "plain, compiled": lambda setting: plain(setting, is_compiled=True),
    "plain, CUDA graphs": lambda setting: plain(setting, is_compiled=True, mode="reduce-overhead"),
    "pergrad": private,
    "pergrad, traced": lambda setting: private(setting, backend="eager"),
    "pergrad, compiled": lambda setting: private(setting, backend="inductor"),
    "pergrad, CUDA graphs": lambda setting: private(setting, backend="inductor", cuda_graphs=True),
    "pergrad, cryptographic noise": lambda setting: private(setting, cryptographic=True),
    "Opacus hooks": opacus_hooks,
    "Opacus ghost": opacus_ghost,
    "JAX": jax_vmapped,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=["tiny", "cpu", "gpu"], default=None)
    parser.add_argument("--pieces", type=int, default=4, help="pieces of a logical batch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--methods", nargs="+", choices=[*METHODS], default=[*METHODS])
    parser.add_argument("--output", default=None, help="file in benchmarks/results/private")
    parser.add_argument("--turns", type=Path, help="lock file shared with other benchmarks")
    parser.add_argument("--commit", help="the commit to store, where there is no checkout")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    device = torch.device(chosen.device)
    torch.manual_seed(0)
    size: Size = chosen.size or ("gpu" if device.type == "cuda" else "cpu")
    case = MODELS["transformer"][size]
    setting = Setting(case.build(), chosen.pieces, device)
    steps: dict[str, Logical] = {}
    failed: dict[str, str] = {}
    turns = Turns(chosen.turns)
    with turns.preparing():
        for name in chosen.methods:
            if "CUDA" in name and device.type != "cuda":
                continue
            begun = time.perf_counter()
            try:
                steps[name] = METHODS[name](setting)
                for _ in range(3):  # compile, and warm up
                    steps[name]()
            except Exception as error:  # a row of the table, not the end of it
                failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                steps.pop(name, None)
            seconds = time.perf_counter() - begun
            print(f"{name}: prepared in {seconds:.0f} s", file=sys.stderr, flush=True)
    times: dict[str, list[float]] = {name: [] for name in steps}
    with turns.timing():
        for _ in range(chosen.rounds):
            for name, step in steps.items():
                _wait(device)
                begun = time.perf_counter()
                samples = step()
                _wait(device)
                times[name].append((time.perf_counter() - begun) / max(samples, 1))
    rows = [
        {
            "method": name,
            "milliseconds_per_sample": 1e3 * statistics.median(values),
            "ratio": _ratio(values, times.get("plain")),
            "ratio_compiled": _ratio(values, times.get(_compiled_base(name))),
        }
        for name, values in times.items()
    ]
    for row in rows:
        ratios = "  ".join("-" if (r := row[k]) is None else f"{r:.2f}x" for k in _RATIOS)
        print(f"{row['method']:30} {row['milliseconds_per_sample']:9.3f} ms  {ratios}")
    for name, reason in failed.items():
        print(f"{name:30} failed: {reason}")
    write(
        chosen.output or f"cost-{device.type}.json",
        device,
        {
            "model": case.title,
            "precision": "bfloat16 autocast" if setting.half else "float32",
            "expected_batch_size": setting.expected,
            "piece_size": setting.size,
            "rounds": chosen.rounds,
            "rows": rows,
            "failed": failed,
        },
        of_commit=chosen.commit,
    )
    return 0


_RATIOS = ("ratio", "ratio_compiled")


def _compiled_base(method: str) -> str:
    return "plain, CUDA graphs" if method.endswith("CUDA graphs") else "plain, compiled"


def _ratio(values: list[float], base: list[float] | None) -> float | None:
    if base is None:
        return None
    return statistics.median(a / b for a, b in zip(values, base, strict=True))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
