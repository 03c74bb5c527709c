"""Triton kernels for reductions that torch has no one call for; nothing here imports Triton by itself.

One kernel and its launcher a file, the formula in its docstring. Each launcher is an operation of torch
(`torch.ops.pergrad.*`), so that a compiled step can call it. All are deterministic: no program adds to what
another one has written.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from pergrad.runtime.caches import cached

__all__ = ["kernels_for"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_OLDEST = (8, 0)  # the first generation of GPUs that multiplies bfloat16


def kernels_for(*tensors: Tensor) -> ModuleType | None:
    """The module `launchers`, where kernels run on these tensors; else torch's own functions must do."""
    for t in tensors:
        if not t.is_cuda or t.dtype not in _DTYPES or not t.numel():
            return None
    return _launchers(tensors[0].device)


@cached("whether kernels run on a device, by device", most=1000)
def _launchers(device: torch.device) -> ModuleType | None:
    if find_spec("triton") is None or torch.version.hip is not None:
        return None
    if torch.cuda.get_device_capability(device) < _OLDEST:
        return None
    return import_module("pergrad.kernels.launchers")
