"""Triton kernels for reductions that torch has no single call for; importing this does not import Triton.

A file has one kernel, its launcher, and the formula in its docstring. Each launcher is an operation of torch
(`torch.ops.pergrad.*`), so that a compiled step can call it. All are deterministic: no program adds to the
output of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pergrad.runtime.caches import cached

__all__ = ["all_launchers", "have_kernels", "kernels_for"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_OLDEST = (8, 0)  # the first generation of GPUs that multiplies bfloat16


def kernels_for(*tensors: Tensor) -> ModuleType | None:
    """Returns the module `launchers` if kernels run on these tensors, else None."""
    return all_launchers() if have_kernels(tensors) else None


def have_kernels(tensors: Sequence[Tensor]) -> bool:
    """Whether kernels run on these tensors."""
    for t in tensors:
        if not t.is_cuda or t.dtype not in _DTYPES or not t.numel():
            return False
    return _runs_triton(tensors[0].device)


@cached("whether kernels run on a device, by device", most=1000)
def _runs_triton(device: torch.device) -> bool:
    if find_spec("triton") is None or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= _OLDEST


@cached("the module of all launchers", most=1)
def all_launchers() -> Any:
    """Imports the module `launchers`, which needs Triton."""
    return import_module("pergrad.kernels.launchers")
