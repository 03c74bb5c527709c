"""Runs tensors: precision, memory and tracing, and the only imports of torch's and Triton's private names."""

from pergrad.runtime import internals
from pergrad.runtime.allocation import empty, is_large
from pergrad.runtime.choosing import NEVER, Chooser, Table
from pergrad.runtime.machine import MACHINES, Machine, machine_of, machine_on
from pergrad.runtime.precision import (
    autocast_state,
    bmm,
    cast_as_autocast,
    current_autocast,
    least_trusted,
    mm,
    promoted,
    wide,
    with_aligned_width,
    without_autocast,
)
from pergrad.runtime.tracing import (
    computed_once,
    is_for_compiler,
    is_traced,
    operation,
    without_compiler,
)

__all__ = [
    "MACHINES",
    "NEVER",
    "Chooser",
    "Machine",
    "Table",
    "autocast_state",
    "bmm",
    "cast_as_autocast",
    "computed_once",
    "current_autocast",
    "empty",
    "internals",
    "is_for_compiler",
    "is_large",
    "is_traced",
    "least_trusted",
    "machine_of",
    "machine_on",
    "mm",
    "operation",
    "promoted",
    "wide",
    "with_aligned_width",
    "without_autocast",
    "without_compiler",
]
