"""Counts the Python functions that one recorded step of one linear layer runs through.

Run as ``python -m benchmarks.walk``, with ``--store`` to keep the figure. The step is warm and records
norms: from ``record(model, Norms())`` to ``.result``. Counted are calls of functions in pergrad's own files,
and changes from one of these files to another.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import pergrad
from benchmarks.rows import RESULTS, provenance

_SOURCE = str(Path(pergrad.__file__).parent)


def walk(warm_up: int = 5) -> list[str]:
    """Returns ``file:function`` of every call in a recorded step, in order."""
    model, x = nn.Linear(8, 8), torch.randn(4, 8)

    def step() -> None:
        norms = pergrad.Norms()
        with pergrad.record(model, norms):
            model(x).square().sum().backward()
        assert norms.result.shape == (4,)

    for _ in range(warm_up):
        step()
    seen: list[str] = []

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_SOURCE):
            file = Path(frame.f_code.co_filename).relative_to(_SOURCE)
            seen.append(f"{file}:{frame.f_code.co_name}")

    sys.setprofile(see)
    try:
        step()
    finally:
        sys.setprofile(None)
    return seen


def changes_of_file(seen: list[str]) -> int:
    """Counts how often a call is in another file than the one before it; the first one counts too."""
    files = [call.partition(":")[0] for call in seen]
    return sum(file != before for file, before in zip(files, [None, *files], strict=False))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true", help="list every call")
    parser.add_argument("--store", action="store_true", help="keep the figure")
    options = parser.parse_args(arguments)
    seen = walk()
    if options.show:
        print("\n".join(seen))
    figure = {"calls": len(seen), "changes_of_file": changes_of_file(seen)}
    print(f"{figure['calls']} calls, {figure['changes_of_file']} changes of file")
    if options.store:
        made = provenance(torch.device("cpu"), of_commit=None, rounds=1, steps=1, seed=0)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        path = RESULTS / "walk" / f"cpu-{stamp}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**figure, "provenance": asdict(made)}, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
