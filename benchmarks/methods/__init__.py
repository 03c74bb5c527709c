"""What is timed: one function a method, from a task to a step that returns what it computed.

To add a peer or a variant, write one function under ``@method`` in the file of its quantity; a new
quantity needs its title in ``registry`` and its oracle in ``benchmarks.check`` too. A step leaves
its results on the parameters' ``grad`` or ``grad_sample`` or nowhere: both are cleared between
steps, outside of the timing. What needs a compiler is ``compiled=True``; ``--no-compiled`` leaves it out.
"""

from benchmarks.methods import clipped, grads, norms, training  # they register their methods
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
