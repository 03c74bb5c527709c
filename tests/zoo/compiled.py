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
from contextlib import nullcontext
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

__all__ = ["compiled_row", "markdown", "plain_trace_fails"]

_HERE = Path(__file__).parent
ROWS, TABLE = _HERE / "compiled.jsonl", _HERE / "COMPILED.md"
TOLERANCE = 1e-3  # of float32: the compiler sums in another order
# compiled: by its backend, with the numbers of the recorded step. model: nobody can trace it.
VERDICTS = ("compiled", "model", "refused", "unrun", "fallback", "uncompiled", "wrong")


class _Single(Case):
    dtype = torch.float32


def compiled_row(name: str, backend: str, device: str = "cpu") -> dict[str, Any]:
    """Runs a step recorded, then compiled, and compares norms and clipped sums."""
    row: dict[str, Any] = {"name": name, "backend": backend, "device": device}
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
        f"{transformers.__version__} and torch {torch.__version__}. compiled: by that backend, with the same "
        "numbers. model: a plain step cannot be traced either, since its control flow depends on values, or "
        "gives other numbers when it is traced. "
        "refused: samples meet. unrun: this version of the library does not run it."
    )
    for backend in ("inductor", "eager"):
        own = [row for row in rows if row["backend"] == backend]
        if not own:
            continue
        count = Counter(row["verdict"] for row in own)
        found = ", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS if count[verdict])
        yield f'\n## backend="{backend}": {len(own)} architectures: {found}\n'
        yield "| architecture | device | verdict | reason |"
        yield "|---|---|---|---|"
        order = {name: k for k, name in enumerate(n for f in FAMILIES.values() for n in f)}
        for row in sorted(own, key=lambda row: order[row["name"]]):
            reason = row["reason"].replace("|", "\\|")
            yield f"| {row['name']} | {row['device']} | {row['verdict']} | {reason} |"


def _stored() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; by default all")
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--missing", action="store_true", help="only those without a stored row")
    parser.add_argument("--write", action="store_true", help="store the rows and write the table")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    is_bad = False
    for name in options.names or list(ARCHITECTURES):
        key = {"name": name, "backend": options.backend, "device": options.device}
        if options.missing and any(key.items() <= row.items() for row in _stored()):
            continue
        row = compiled_row(**key)
        is_bad |= row["verdict"] in VERDICTS[4:]
        print(name, row["verdict"], row["seconds"], row["reason"], flush=True)
        if options.write:
            kept = [old for old in _stored() if not key.items() <= old.items()]
            ROWS.write_text("".join(json.dumps(r) + "\n" for r in [*kept, row]))
    if options.write:
        TABLE.write_text("\n".join(markdown(_stored())) + "\n")
    return int(is_bad)


if __name__ == "__main__":
    raise SystemExit(main())
