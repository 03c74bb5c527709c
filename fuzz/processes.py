"""Judges programs in forked processes: each block starts with empty caches, and a crash ends one process."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

from fuzz.comparing import Outcome
from fuzz.judge import judge
from fuzz.programs import Program

__all__ = ["BLOCK", "judge_all", "judge_apart"]

# Programs of a block share the caches of their process, as the steps of a user do.
BLOCK = 50
_FORK = multiprocessing.get_context("fork")


@dataclass
class _Child:
    process: ForkProcess
    results: Connection
    first: int  # number of the next program to come
    end: int


def judge_all(programs: Sequence[Program], *, workers: int) -> Iterator[tuple[int, Outcome]]:
    """Yields the number and the outcome of each program, as they come."""
    waiting = [(k, min(k + BLOCK, len(programs))) for k in range(0, len(programs), BLOCK)][::-1]
    children: list[_Child] = []
    while waiting or children:
        while waiting and len(children) < workers:
            children.append(_start(programs, *waiting.pop()))
        ready = wait([child.results for child in children])
        for child in [child for child in children if child.results in ready]:
            try:
                outcome = child.results.recv()
            except EOFError:
                child.process.join()
                children.remove(child)
                if child.first < child.end:
                    code = child.process.exitcode
                    yield child.first, Outcome("crash", f"the process has ended with code {code}")
                    if child.first + 1 < child.end:
                        waiting.append((child.first + 1, child.end))
                continue
            yield child.first, outcome
            child.first += 1


def judge_apart(*programs: Program) -> Outcome:
    """Judges programs one after the other in a process of their own; returns the last outcome."""
    last = Outcome("crash", "the process has ended")
    outcomes = dict(judge_all(programs, workers=1)) if len(programs) <= BLOCK else {}
    return outcomes.get(len(programs) - 1, last)


def _start(programs: Sequence[Program], first: int, end: int) -> _Child:
    results, sending = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_work, args=(programs[first:end], sending), daemon=True)
    process.start()
    sending.close()
    return _Child(process, results, first, end)


def _work(programs: Sequence[Program], sending: Connection) -> None:
    logging.getLogger("torch._dynamo").setLevel(
        logging.ERROR
    )  # it compiles many shapes, on purpose
    for program in programs:
        sending.send(judge(program))
    sending.close()
