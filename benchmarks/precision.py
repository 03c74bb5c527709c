"""Defines the precisions of a run: one context manager each, entered around every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@contextmanager
def _matmul(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn.allow_tf32
    on_gpu = torch.backends.cuda.matmul.fp32_precision  # the setting above changes it too
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision != "highest"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cuda.matmul.fp32_precision = on_gpu
        torch.backends.cudnn.allow_tf32 = cudnn


@dataclass(frozen=True)
class Precision:
    """A precision; `tolerance` is the largest accepted relative error of a method timed at it.

    It is coarse, because one ReLU that rounds to the other side of zero changes a convnet's gradient by 1e-2.
    Exactness is checked in float64.
    """

    context: Callable[[torch.device], AbstractContextManager[Any]]
    tolerance: float


PRECISIONS: dict[str, Precision] = {
    "float32": Precision(lambda device: _matmul("highest"), 0.1),
    "tf32": Precision(lambda device: _matmul("high"), 0.2),
    "bfloat16": Precision(lambda device: torch.autocast(device.type, torch.bfloat16), 0.5),
}

ALIASES = {"fp32": "float32", "bf16": "bfloat16"}
