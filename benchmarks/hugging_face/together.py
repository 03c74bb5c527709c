"""Prepares several models at a time, each in a process of its own, and times them one after another.

Compilation takes minutes of one core for each model, timing takes seconds of the GPU. A process that is not
being timed waits, and holds no more memory than its model and its compiled steps.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers

from benchmarks.hugging_face.measuring import prepare, timed
from benchmarks.rows import Provenance, Row
from benchmarks.turns import Turns

__all__ = ["measured"]


_TRIES = 20  # of a method for which the others leave no memory


def _work(pipe: Connection, name: str, size: str, plan: Mapping[str, Any]) -> None:
    transformers.logging.set_verbosity_error()
    made = prepare(name, size, torch.device("cuda"), tries=_TRIES, **plan)
    pipe.send("ready")
    rounds, provenance, shown = pipe.recv()
    pipe.send(timed(made, rounds, provenance, shown))


def measured(
    names: Sequence[str],
    size: str,
    rounds: int,
    provenance: Provenance,
    plan: Mapping[str, Any],
    shown: int = 0,
    turns: Turns | None = None,
) -> Iterator[list[Row]]:
    """Yields the rows of each model, prepared by the plan; one whose process ends early is left out."""
    context: Any = multiprocessing.get_context("spawn")
    workers = {}
    for name in names:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, name, size, plan))
        process.start()
        theirs.close()
        workers[name] = ours, process
    turns = turns or Turns(None)
    ready = []
    with turns.preparing():
        for name, (pipe, _) in workers.items():
            try:
                pipe.recv()
                ready.append(name)
            except EOFError:
                print(f"{name}: its process ended before it was ready", flush=True)
    with turns.timing():
        for name in ready:
            pipe, process = workers[name]
            try:
                pipe.send((rounds, provenance, shown))
                yield pipe.recv()
            except (EOFError, BrokenPipeError):
                print(f"{name}: its process ended while it was timed", flush=True)
            process.join()
