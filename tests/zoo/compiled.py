"""Compiles a step of every architecture: `python -m tests.zoo.compiled --backend eager --write`.

A row of `compiled.jsonl` is one architecture by one backend on one device; `COMPILED.md` is written from it.
Where a step is not compiled, a trace of the plain step tells whether plain training could be: a model whose
control flow depends on values cannot be traced by anybody.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import pergrad
from pergrad.runtime import internals
from tests.zoo.architectures import ARCHITECTURES, FAMILIES
from tests.zoo.checking import Case, loss_fn_of, prepared
from tests.zoo.precision import default_dtype
from tests.zoo.table import alone, quiet

__all__ = ["compiled_row", "markdown", "plain_trace_fails"]

_HERE = Path(__file__).parent
ROWS, TABLE = _HERE / "compiled.jsonl", _HERE / "COMPILED.md"
TOLERANCE = 1e-3  # of float32: the compiler sums in another order
# compiled: by its backend, with the numbers of the recorded step. model: nobody can trace it.
VERDICTS = ("compiled", "model", "refused", "unrun", "fallback", "uncompiled", "wrong")


class _Single(Case):
    dtype = torch.float32


def compiled_row(name: str, backend: str, device: str = "cpu") -> dict[str, Any]:
    """Runs a step recorded, then compiled, and compares norms and clipped sums.

    Convolutions are exact: the rounding of TensorFloat32 is larger than the tolerance.
    """
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return _compiled_row(name, backend, device)


def _compiled_row(name: str, backend: str, device: str) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "backend": backend, "device": device}
    row["torch"] = torch.__version__
    start = time.perf_counter()
    try:
        architecture = ARCHITECTURES[name]
        experts = architecture.experts()
        traceable = "batched_mm" if "batched_mm" in experts else "eager"
        case = _Single(3, architecture.attention()[-1], experts=traceable)
        with default_dtype(torch.float32):
            model, batch = prepared(architecture, case, device)
            loss_fn = loss_fn_of(architecture, case, nullcontext())
            loss_fn(model, *batch).sum().backward()
            model.zero_grad()
    except Exception as error:
        return {**row, "verdict": "unrun", "reason": _reason(error), "seconds": 0.0}
    with default_dtype(torch.float32), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        verdict, reason = _verdict(model, loss_fn, batch, backend)
        told = [str(w.message) for w in caught if "pergrad.compiled" in str(w.message)]
    if verdict == "uncompiled" and plain_trace_fails(model, loss_fn, batch):
        verdict = "model"
    seconds = round(time.perf_counter() - start, 1)
    reason = reason or (told[-1].splitlines()[0] if told else "")
    return {**row, "verdict": verdict, "reason": reason[:300], "seconds": seconds}


def _verdict(model: nn.Module, loss_fn: Any, batch: Any, backend: Any) -> tuple[str, str]:
    norms, clipped = pergrad.Norms(), pergrad.ClippedSum(1.0)
    try:
        step = pergrad.compiled(model, loss_fn, norms, clipped, backend=backend)
        step(*batch)
        expected = [norms.result.clone(), *(t.clone() for t in clipped.result.values())]
        step(*batch)
        found = [norms.result, *clipped.result.values()]
    except pergrad.PergradError as error:
        return "refused", _reason(error)
    scale = max(t.abs().max().item() for t in expected if t.numel())
    errors = [(a - b).abs().max().item() for a, b in zip(found, expected, strict=True) if a.numel()]
    if not max(errors) <= TOLERANCE * scale:
        return "wrong", f"off by {max(errors) / scale:.1e}"
    if not step.graphs:
        return "uncompiled", ""
    return ("compiled", "") if f"by {backend}" in repr(step) else ("fallback", "")


def plain_trace_fails(model: nn.Module, loss_fn: Any, batch: Any) -> bool:
    """Whether a plain step, forward and backward, cannot be traced without values, or gives others then."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    own = dict(model.named_parameters())

    def plain(*values: Tensor) -> list[Tensor]:
        leaves = {n: v.detach().requires_grad_() for n, v in zip(names, values, strict=True)}

        class Called(nn.Module):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return torch.func.functional_call(model, leaves, args, kwargs)

        loss = loss_fn(Called(), *batch).sum()
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        return [g for g in found if g is not None]

    values = [own[name].detach() for name in names]
    try:
        found = internals.trace(plain)(*values)(*values)
    except Exception:
        return True
    wanted = plain(*values)
    scale = max(g.abs().max().item() for g in wanted)
    apart = [(a - b).abs().max().item() for a, b in zip(found, wanted, strict=True)]
    return not max(apart) <= TOLERANCE * scale


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def markdown(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "# Compiled steps of the zoo"
    yield ""
    yield (
        "Norms and a clipped sum of each architecture by `pergrad.compiled`, in float32, compared with the "
        "recorded step. Written by `python -m tests.zoo.compiled` with transformers "
        f"{transformers.__version__}. compiled: by that backend, with the same "
        "numbers. model: a plain step cannot be traced either, since its control flow depends on values, or "
        "gives other numbers when it is traced. "
        "refused: samples meet. unrun: this version of the library does not run it."
    )
    for backend, device in sorted({(row["backend"], row["device"]) for row in rows}, reverse=True):
        own = [row for row in rows if (row["backend"], row["device"]) == (backend, device)]
        count = Counter(row["verdict"] for row in own)
        found = ", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS if count[verdict])
        versions = ", ".join(sorted({f"torch {row['torch']}" for row in own}))
        yield f'\n## backend="{backend}" on {device}: {len(own)} architectures: {found}\n'
        yield f"With {versions}."
        yield ""
        yield "| architecture | verdict | reason |"
        yield "|---|---|---|"
        order = {name: k for k, name in enumerate(n for f in FAMILIES.values() for n in f)}
        for row in sorted(own, key=lambda row: order[row["name"]]):
            reason = row["reason"].replace("|", "\\|")
            yield f"| {row['name']} | {row['verdict']} | {reason} |"


def _stored() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def rows_of(
    keys: Sequence[dict[str, str]], jobs: int, stop_after: float
) -> Iterator[dict[str, Any]]:
    """Yields the rows as they are made, by `jobs` processes; none begins after `stop_after` seconds."""
    begun = time.monotonic()
    if jobs == 1:
        for key in keys:
            if time.monotonic() - begun < stop_after:
                yield compiled_row(**key)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=alone) as pool:
        left, running = [*reversed(keys)], dict[Future[dict[str, Any]], dict[str, str]]()
        while left or running:
            while left and len(running) < jobs and time.monotonic() - begun < stop_after:
                key = left.pop()
                running[pool.submit(compiled_row, **key)] = key
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                key = running.pop(future)
                try:
                    yield future.result()
                except BrokenProcessPool as error:
                    yield {**key, "verdict": "unrun", "reason": _reason(error), "seconds": 0.0}
                    return


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; by default all")
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--missing", action="store_true", help="only those without a stored row")
    parser.add_argument("--write", action="store_true", help="store the rows and write the table")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--stop-after", type=float, default=float("inf"), help="seconds; no other one begins then"
    )
    options = parser.parse_args(arguments)
    quiet()
    is_bad = False
    common = {"backend": options.backend, "device": options.device}
    keys = [{"name": name, **common} for name in options.names or list(ARCHITECTURES)]
    if options.missing:
        stored = _stored()
        keys = [key for key in keys if not any(key.items() <= row.items() for row in stored)]
    for row in rows_of(keys, options.jobs, options.stop_after):
        is_bad |= row["verdict"] in VERDICTS[4:]
        print(row["name"], row["verdict"], row["seconds"], row["reason"], flush=True)
        if options.write:
            made = {"name": row["name"], **common}
            kept = [old for old in _stored() if not made.items() <= old.items()]
            ROWS.write_text("".join(json.dumps(r) + "\n" for r in [*kept, row]))
    if options.write:
        TABLE.write_text("\n".join(markdown(_stored())) + "\n")
    return int(is_bad)


if __name__ == "__main__":
    raise SystemExit(main())
