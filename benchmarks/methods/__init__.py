"""Defines the timed methods: one function per method, from a task to a step that returns its results.

To add a peer or a variant, write one function under ``@method`` in the file of its quantity; a new quantity
also needs its title in ``registry`` and its oracle in ``benchmarks.check``. A step may leave its results on
the parameters' ``grad`` or ``grad_sample``: both are cleared between steps, outside of the timing. Methods
that need a compiler have ``compiled=True``; ``--no-compiled`` leaves them out.
"""

from benchmarks.methods import clipped, grads, norms, training  # importing registers the methods
from benchmarks.methods.registry import (
    BASES,
    METHODS,
    TITLES,
    Method,
    Quantity,
    SelfCounted,
    Step,
    clear,
    method,
)

__all__ = [
    "BASES",
    "METHODS",
    "TITLES",
    "Method",
    "Quantity",
    "SelfCounted",
    "Step",
    "clear",
    "clipped",
    "grads",
    "method",
    "norms",
    "training",
]
