"""Writes a program as a script of its own that shows its failure without the fuzzer."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

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
_RUN = """\
torch.manual_seed({seed})
model = Model()
torch.manual_seed({seed})
plain = Model()  # for the oracle: a forward may change its model
for turn in range({turns}):
    if turn:
        for each in (plain, model):
            torch.manual_seed({between})
            between(each)
    torch.manual_seed({seed} + 1 + turn)
    batch = make_batch()
    torch.manual_seed({seed} + turn)
    losses = loss_fn(plain, *batch)
    named = dict(plain.named_parameters())
    rows = [torch.autograd.grad(l, named.values(), retain_graph=True, allow_unused=True) for l in losses]
    torch.manual_seed({seed} + turn)
    found = pergrad.grads(model, loss_fn, *batch)
    for k, (name, p) in enumerate(named.items()):
        want = torch.stack([torch.zeros_like(p) if row[k] is None else row[k] for row in rows])
        print(turn, name, (found[name] - want).abs().max().item(), "of", want.abs().max().item())
"""


def reproduction(program: Program, *, why: str = "") -> str:
    """Returns the script: the functions that the program calls, its source, and a comparison."""
    source = program.source()
    for name in ("between", "after"):
        source = source.replace(f"\n\ndef {name}(model):\n    pass\n", "")
    definitions = _definitions_for(source)
    run = _RUN.format(seed=program.seed, between=program.seed + 17, turns=2)
    if "def between" not in source:
        start, end = run.index("    if turn:"), run.index("    batch = ")
        end = run.rindex("    torch", 0, end)
        run = run[:start] + run[end:]
    body = "\n\n\n".join(text.strip() for text in (*definitions, source, run))
    if program.nan_first:
        body = body.replace(
            "    batch = make_batch()\n",
            "    batch = make_batch()\n    if not turn:\n        batch[0][0] = torch.nan\n",
        )
    imports = [line for line in _IMPORTS if any(word in body for word in _bound_by(line))]
    heading = [f"# {line}" for line in why.splitlines()]
    lines = [*heading, *imports, "", "import pergrad", "", "torch.set_default_dtype(torch.float64)"]
    return "\n".join(lines) + "\n\n\n" + body + "\n"


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
