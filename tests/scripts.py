"""Fuses scripted functions on a CPU as torch does on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["fusing_scripts"]


@contextmanager
def fusing_scripts() -> Iterator[None]:
    """Within the block scripted functions become kernels that need tensors with values, after two calls."""
    c = torch._C
    was = c._jit_texpr_fuser_enabled(), c._jit_can_fuse_on_cpu(), c._jit_get_te_must_use_llvm_cpu()
    try:
        c._jit_set_texpr_fuser_enabled(True)
        c._jit_override_can_fuse_on_cpu(True)
        c._jit_set_te_must_use_llvm_cpu(False)  # torch's packages have no LLVM
        yield
    finally:
        c._jit_set_texpr_fuser_enabled(was[0])
        c._jit_override_can_fuse_on_cpu(was[1])
        c._jit_set_te_must_use_llvm_cpu(was[2])
