"""Writes a program as a script of its own that shows its failure without the fuzzer."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path
from textwrap import indent

from fuzz.programs import Program

__all__ = ["reproduction"]

_IMPORTS = (
    "import warnings",
    "import numpy as np",
    "import torch",
    "from torch import nn",
    "from torch.nn import functional as F",
    "from torch.overrides import handle_torch_function, has_torch_function_unary",
    "from torch.utils.checkpoint import checkpoint",
)
_START = """\
torch.manual_seed({seed})
model = Model()
torch.manual_seed({seed})
plain = Model()  # for the oracle: a forward may change its model
"""
_BATCH = """\
    torch.manual_seed({seed} + 1 + turn)
    batch = make_batch()
"""
_TRUTH = """\
    torch.manual_seed({seed} + turn)
    losses = loss_fn(plain, *batch)
    named = {{name: p for name, p in plain.named_parameters() if p.requires_grad}}
    rows = [torch.autograd.grad(l, named.values(), retain_graph=True, allow_unused=True) for l in losses]
    want = {{
        name: torch.stack([torch.zeros_like(p) if row[k] is None else row[k] for row in rows])
        for k, (name, p) in enumerate(named.items())
    }}
    torch.manual_seed({seed} + turn)
"""
_BETWEEN = """\
    if turn:
        for each in (plain, model):
            torch.manual_seed({seed} + 17)
            between(each)
"""
_NAN = "    if not turn:\n        batch[0][0] = torch.nan\n"
_ROWS = """\
    for name, rows in want.items():
        print(turn, name, (found[name] - rows).abs().max().item(), "of", rows.abs().max().item())
"""
_NORMS = """\
    norms = sum(rows.abs().square().flatten(1).sum(1) for rows in want.values()).sqrt()
    print(turn, "norms", (found - norms).abs().max().item(), "of", norms.max().item())
"""
_HALVES = """\
torch.manual_seed({seed} + 1)
batch = tuple(t[:1].expand_as(t).contiguous() for t in make_batch())
with pergrad.record(model, pergrad.ClippedSum(0.5)) as clipped:
    loss_fn(model, *batch).sum().backward()
total = sum(t.double().square().sum() for t in clipped.result.values()).sqrt().item()
print("norm", total, "and bound", 0.5 * len(clipped.norms))
"""


def reproduction(program: Program, *, why: str = "") -> str:
    """Returns the script: the functions that the program calls, its source, and a comparison."""
    source = program.source()
    for name in ("between", "after"):
        source = source.replace(f"\n\ndef {name}(model):\n    pass\n", "")
    definitions = _definitions_for(source)
    run = _run(program).format(seed=program.seed)
    body = "\n\n\n".join(text.strip() for text in (*definitions, source, run))
    imports = [line for line in _IMPORTS if any(word in body for word in _bound_by(line))]
    heading = [f"# {line}" for line in why.splitlines()]
    dtype = "bfloat16" if program.mode == "bf16" else "float64"
    lines = [
        *heading,
        *imports,
        "",
        "import pergrad",
        "",
        f"torch.set_default_dtype(torch.{dtype})",
    ]
    return "\n".join(lines) + "\n\n\n" + body + "\n"


def _run(program: Program) -> str:
    """Returns the lines that run a program as the judge does, and print how far off the answer is."""
    if program.mode == "bf16":
        return _START + _HALVES
    if program.mode == "compiled":
        step = "grads = pergrad.Grads()\n"
        step += 'step = pergrad.compiled(model, loss_fn, grads, backend="eager")\n'
        call = "    step(*batch)\n    found = grads.result\n"
        return f"{_START}{step}for turn in range(4):\n{_BATCH}{_TRUTH}{call}{_ROWS}"
    steps = [step for step in program.steps if step.ingredient.between]
    between = _BETWEEN if steps else ""
    spoil = _NAN if program.nan_first else ""
    text = f"{_START}for turn in range(2):\n{between}{_BATCH}{spoil}{_TRUTH}"
    calls = {
        True: "    found = pergrad.norms(model, loss_fn, *batch)\n" + _NORMS,
        False: "    found = pergrad.grads(model, loss_fn, *batch)\n" + _ROWS,
    }
    first, second = (calls[name == "sums"] for name in (program.first, program.second))
    if first == second:
        return text + first
    condition = f"    if turn == 0:\n{indent(first, '    ')}    else:\n{indent(second, '    ')}"
    return text + condition


def _bound_by(line: str) -> list[str]:
    names = line.partition("import ")[2].split(", ")
    return [name.rpartition(" as ")[2] + suffix for name in names for suffix in (".", "(")]


@lru_cache(maxsize=1)
def _all_definitions() -> dict[str, str]:
    text = Path(__file__).with_name("functions.py").read_text()
    found = {}
    for node in ast.parse(text).body:
        names = [getattr(node, "name", None)]
        if isinstance(node, ast.Assign):
            names = [getattr(target, "id", None) for target in node.targets]
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(d.lineno for d in decorators)])
        lines = text.splitlines()[first - 1 : node.end_lineno]
        found.update({name: "\n".join(lines) for name in names if name and name != "__all__"})
    return found


def _definitions_for(source: str) -> list[str]:
    """Returns the definitions that a source needs, and those that these need, in their order."""
    known = _all_definitions()
    needed: set[str] = set()
    waiting = [source]
    while waiting:
        used = {
            node.id for node in ast.walk(ast.parse(waiting.pop())) if isinstance(node, ast.Name)
        }
        new = (used & known.keys()) - needed
        needed |= new
        waiting += [known[name] for name in new]
    return [text for name, text in known.items() if name in needed]
