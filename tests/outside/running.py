"""Runs each case in a process of its own, under a limit of time and of memory."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from tests.outside.case import Case, Library
from tests.outside.judging import Row, judge, time_of

__all__ = ["declare_operators_of_torchvision", "prepare_process", "rows_of"]

SECONDS = 240
BYTES = 6 << 30


def prepare_process() -> None:
    """Sets up a process of its own for one library."""
    torch.set_num_threads(1)  # a fork of a process with a pool of threads may wait for ever
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is ever downloaded
    declare_operators_of_torchvision()


def rows_of(
    library: Library,
    cases: Sequence[Case],
    seconds: float = SECONDS,
    one: Callable[[Case], Row] | None = None,
) -> Iterator[Row]:
    """Imports the library once, and judges each of its cases in a fork of this process."""
    try:
        library()
    except Exception as error:
        reason = f"the library does not import: {type(error).__name__}: {error}"
        yield from (
            Row(case.library, case.name, reason=reason, is_timed=case.is_timed) for case in cases
        )
        return
    for case in cases:
        row = _in_a_fork(case, seconds, one or (time_of if case.is_timed else judge))
        row.is_timed, row.torch = case.is_timed, torch.__version__
        row.version = version_of(library.distribution)
        yield row


def _in_a_fork(case: Case, seconds: float, one: Callable[[Case], Row]) -> Row:
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, case, one))
    process.start()
    sender.close()
    try:
        if receiver.poll(seconds):
            return receiver.recv()
        reason = f"took longer than {seconds:.0f} s"
    except EOFError:
        process.join()
        reason = f"the process ended with {process.exitcode}, by a signal or for want of memory"
    finally:
        if process.is_alive():
            process.kill()
        process.join()
    return Row(case.library, case.name, verdict="crash", reason=reason)


def _child(sender: Connection, case: Case, one: Callable[[Case], Row]) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere
        sender.send(one(case))


def declare_operators_of_torchvision() -> None:
    """Declare the operators that torchvision's Python code registers shapes for, where it has none.

    Its compiled part must fit torch to the build and fails to load without CUDA; the models in plain torch do
    not need it. A call of such an operator fails.
    """
    try:
        importlib.metadata.version("torchvision")
    except importlib.metadata.PackageNotFoundError:
        return
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)


def version_of(distribution: str) -> str:
    """The installed version; empty where the distribution is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
