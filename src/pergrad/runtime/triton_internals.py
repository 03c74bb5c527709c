"""The private names of Triton that kernels use, as `internals` has those of torch; needs Triton when read."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

from pergrad.runtime import internals
from pergrad.runtime.boundary import Entry, find, resolver

__all__ = ["ENTRIES", "launch"]

# How Triton itself launches what it has compiled, in `JITFunction.run`.
_CALL = """
    kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata,
    knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())
"""


class _Never:
    """A type without instances."""


def _is_interpreted() -> bool:
    return bool(find("triton.knobs.runtime.interpret"))


def _is_asked_for() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def launch(compiled: Any, device: int, programs: int, arguments: Any, constants: Any) -> None:
    """Run so many programs of a CompiledKernel: Triton's own last call, without all that comes before."""
    stream = internals.current_raw_stream(device)
    of_kernel = compiled.function, compiled.packed_metadata, None, None, None
    compiled.run(programs, 1, 1, stream, *of_kernel, *arguments, *constants)


def _checked_type() -> Any:
    """The type of what `launch` can launch: Triton's, as long as its own launch is the one known here."""
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
        "to launch what Triton has compiled without reading its arguments in Python",
        "Triton launches it, which takes ten times as long",
        instead=_Never,
        make=_checked_type,
    ),
}

__getattr__ = resolver(ENTRIES, globals())
