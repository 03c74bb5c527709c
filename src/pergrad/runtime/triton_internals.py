"""Lists the private names of Triton that kernels use; needs Triton only when one is read."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

from pergrad.runtime import internals
from pergrad.runtime.boundary import Entry, find, resolver

__all__ = ["ENTRIES", "launch"]

# The launch in Triton's own `JITFunction.run`, which `launch` repeats.
_CALL = """
    kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata,
    knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())
"""


class _Never:
    """Has no instances: an isinstance check with it is always False."""


def _is_interpreted() -> bool:
    return bool(find("triton.knobs.runtime.interpret"))


def _is_asked_for() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def launch(compiled: Any, device: int, programs: int, arguments: Any, constants: Any) -> None:
    """Launches `programs` programs of a CompiledKernel without Triton's handling of arguments in Python."""
    stream = internals.current_raw_stream(device)
    of_kernel = compiled.function, compiled.packed_metadata, None, None, None
    compiled.run(programs, 1, 1, stream, *of_kernel, *arguments, *constants)


def _checked_type() -> Any:
    """Returns CompiledKernel; AttributeError if Triton's own launch is not the one that `launch` repeats."""
    source = inspect.getsource(find("triton.runtime.jit.JITFunction.run"))
    if "".join(_CALL.split()) not in "".join(source.split()):
        raise AttributeError
    return find("triton.compiler.CompiledKernel")


ENTRIES: Mapping[str, Entry] = {
    "is_interpreted": Entry(
        "triton.knobs.runtime.interpret",
        "to ask whether kernels run in the interpreter",
        "the environment variable is read",
        instead=_is_asked_for,
        make=lambda: find("triton.knobs.runtime.interpret") is not None and _is_interpreted,
    ),
    "CompiledKernel": Entry(
        "triton.compiler.CompiledKernel",
        "to launch compiled kernels without Triton's handling of arguments in Python",
        "Triton launches them, which takes ten times as long",
        instead=_Never,
        make=_checked_type,
    ),
}

__getattr__ = resolver(ENTRIES, globals())
