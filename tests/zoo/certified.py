"""Certifies steps of every model of the zoo and of the benchmark, with dropout on, and counts the alarms.

Run as ``python -m tests.zoo.certified --workers 16 --json tests/zoo/CERTIFIED.json``. The zoo compares the
gradients of these models with the loop over the samples, so each alarm is false. The JSON has the counts by
precision, the text of each alarm, and the versions.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

import pergrad
from benchmarks.models import MODELS
from benchmarks.models import build as build_task
from pergrad.errors import PergradError
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.batches import LENGTH
from tests.zoo.checking import Case, default_dtype, loss_fn_of, prepared

__all__ = ["PRECISIONS", "Step", "certified_steps", "main"]

# The dtype of the parameters, and of autocast.
PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "float64": (torch.float64, None),
    "float32": (torch.float32, None),
    "bfloat16 autocast": (torch.float32, torch.bfloat16),
    "float16 autocast": (torch.float32, torch.float16),
}
_DROPOUT = 0.1
_BENCHMARK = "benchmark: "


class Step(NamedTuple):
    """One certified step, and what came of it."""

    model: str
    precision: str
    seed: int
    outcome: str  # "certified", "alarm", "refused", or "does not run": the plain step fails
    why: str = ""


def certified_steps(name: str, precisions: Sequence[str], seeds: int) -> list[Step]:
    """Certifies some steps of one model in each precision."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: list[Step] = []
    for precision in precisions:
        dtype, cast = PRECISIONS[precision]
        context = nullcontext() if cast is None else torch.autocast("cpu", cast)
        with default_dtype(dtype), context:
            try:
                model, loss_fn, batch = _benchmark_task(name) or _zoo_model(name)
                _drop_out(model)
                loss_fn(model, *batch).sum().backward()
                model.zero_grad(set_to_none=True)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"[:300]
                found.append(Step(name, precision, 0, "does not run", why))
                continue
            for seed in range(seeds):
                torch.manual_seed(seed)
                found.append(Step(name, precision, seed, *_outcome(model, loss_fn, batch, seed)))
    return found


def _outcome(
    model: nn.Module, loss_fn: Callable[..., Tensor], batch: tuple[Any, ...], seed: int
) -> tuple[str, str]:
    quantities = [pergrad.Norms(), pergrad.ClippedSum(1.0)]
    try:
        report = pergrad.certify(
            model, loss_fn, *batch, quantities=quantities, seed=seed, quiet=True
        )
    except PergradError as error:
        return "refused", str(error)[:300]
    if report.ok:
        return "certified", ""
    wrong = [f"{row.name}: {row.error:.1e}" for row in report.rows if row.verdict == "wrong"]
    return "alarm", "; ".join([*report.problems, *wrong])[:1000]


Prepared = tuple[nn.Module, Callable[..., Tensor], tuple[Any, ...]]


def _zoo_model(name: str) -> Prepared:
    architecture = ARCHITECTURES[name]
    is_double = torch.get_default_dtype() == torch.float64
    case = Case(
        LENGTH,
        architecture.attention()[-1],
        keeps_casts=True,
        condition="plain" if is_double else "autocast",  # which only chooses the dtype here
    )
    model, batch = prepared(architecture, case, "cpu")
    return model, loss_fn_of(architecture, case, nullcontext()), batch


def _in_default_dtype(t: Tensor) -> Tensor:
    return t.to(torch.get_default_dtype()) if t.is_floating_point() else t


def _benchmark_task(name: str) -> Prepared | None:
    if not name.startswith(_BENCHMARK):
        return None
    task = build_task(name.removeprefix(_BENCHMARK), "tiny", seed=0, device=torch.device("cpu"))

    def losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = model(inputs)
        each = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
        return each.view(len(inputs), -1).sum(1)

    inputs = _in_default_dtype(task.inputs)
    return task.model.to(torch.get_default_dtype()), losses, (inputs, task.targets)


def _drop_out(model: nn.Module) -> None:
    """Turns dropout on; norms over the batch stay in evaluation mode, since they mix the samples."""
    model.train()
    for module in model.modules():
        if isinstance(module, _NormBase):
            module.eval()
        for part in (module, getattr(module, "config", None)):
            for name, value in list(vars(part).items()) if part is not None else ():
                if "drop" in name and "layer" not in name and isinstance(value, float):
                    setattr(part, name, _DROPOUT)
        if isinstance(module, nn.Dropout):
            module.p = _DROPOUT


def _run(names: Sequence[str], precisions: Sequence[str], options: Any) -> Iterator[list[Step]]:
    if options.workers == 1:
        yield from (certified_steps(name, precisions, options.seeds) for name in names)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=spawn, max_tasks_per_child=20) as pool:
        todo = [pool.submit(certified_steps, name, precisions, options.seeds) for name in names]
        for done in as_completed(todo):
            yield done.result()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 after an alarm."""
    every = [
        *(name for name, own in ARCHITECTURES.items() if not own.refusal),
        *(_BENCHMARK + name for name in MODELS),
    ]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models; by default all")
    parser.add_argument("--seeds", type=int, default=4, help="steps of each model and precision")
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--workers", type=int, default=1, help="processes; by default 1")
    parser.add_argument("--json", type=Path, help="where the counts go")
    options = parser.parse_args(arguments)
    precisions = options.precisions.split(",")
    unknown = {*precisions} - {*PRECISIONS} | {*options.names} - {*every}
    if unknown:
        parser.error(f"no such precision or model: {', '.join(sorted(unknown))}")
    names = options.names or every
    begun, steps = time.monotonic(), list[Step]()
    for number, some in enumerate(_run(names, precisions, options), 1):
        steps += some
        counts = dict(Counter(step.outcome for step in some))
        print(f"{number:4}/{len(names)} {some[0].model}: {counts}", flush=True)
        for step in some:
            if step.outcome == "alarm":
                print(f"    {step.precision}, seed {step.seed}: {step.why}", flush=True)
    total = {
        precision: dict(Counter(s.outcome for s in steps if s.precision == precision))
        for precision in precisions
    }
    alarms = [step._asdict() for step in steps if step.outcome == "alarm"]
    found = {
        "certified": sum(step.outcome == "certified" for step in steps),
        "alarms": len(alarms),
        "models": len(names),
        "by_precision": total,
        "each_alarm": alarms,
        "others": sorted(
            {(s.model, s.precision, s.outcome, s.why) for s in steps if s.why}
            - {(s.model, s.precision, s.outcome, s.why) for s in steps if s.outcome == "alarm"}
        ),
        "seconds": round(time.monotonic() - begun),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }
    print(json.dumps({key: found[key] for key in ("certified", "alarms", "by_precision")}))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
