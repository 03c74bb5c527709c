"""Identifies where a computation runs: the device, and whether it is eager, traced or compiled."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

import torch
from torch import Tensor

from pergrad.runtime.tracing import is_for_compiler, is_traced

__all__ = ["MACHINES", "Device", "Machine", "Mode", "machine_of", "machine_on"]

Device = Literal["cpu", "cuda", "other"]
# "eager": runs now, on tensors with values. "traced": is recorded without values and replayed as recorded.
# "compiled": is recorded without values for a compiler, which fuses elementwise functions.
Mode = Literal["eager", "traced", "compiled"]


@dataclass(frozen=True, eq=False)  # singletons, compared by identity, which is the fastest
class Machine:
    """Pairs a device with a mode."""

    device: Device
    mode: Mode


MACHINES: dict[tuple[Device, Mode], Machine] = {
    key: Machine(*key) for key in product(get_args(Device), get_args(Mode))
}


def machine_of(t: Tensor) -> Machine:
    """Returns the machine that functions of the tensor run on.

    >>> machine_of(torch.ones(1))
    Machine(device='cpu', mode='eager')
    """
    device: Device = "cpu" if t.is_cpu else "cuda" if t.is_cuda else "other"
    if not is_traced(t):
        return MACHINES[device, "eager"]
    return MACHINES[device, "compiled" if is_for_compiler(t) else "traced"]


def machine_on(device: torch.device) -> Machine:
    """Returns the eager machine of the device, for choices that do not depend on the mode."""
    kinds: dict[str, Device] = {"cpu": "cpu", "cuda": "cuda"}
    return MACHINES[kinds.get(device.type, "other"), "eager"]
