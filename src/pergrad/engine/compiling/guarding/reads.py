"""Notes which names the Python code of a step reads while it is traced: a graph depends on no others."""

from __future__ import annotations

import gc
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["Reads", "on_one_stack_chunk"]

P = ParamSpec("P")
R = TypeVar("R")

_TORCH = os.path.dirname(inspect.getfile(torch)) + os.sep
_OWN = __file__.removesuffix(os.path.join("engine", "compiling", "guarding", "reads.py"))
_SITE = os.path.dirname(_TORCH.removesuffix(os.sep)) + os.sep
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_RANDOM = torch.random.__file__
_SET_BACK = torch.random.set_rng_state.__code__
# Parts of torch that run for any step while it is traced, beside those whose names begin with "_".
_OF_TRACES = ("fx", "utils/_", "overrides.py", "library.py", "autograd", "_tensor.py", "cuda")
# Packages that torch uses in traces.
_OF_TORCH = ("typing_extensions.py", "sympy", "mpmath", "networkx", "jinja2")


class Reads:
    """Within the block, notes the code of the model, the loss function, and what they call.

    `names` are the attributes and keys that the code mentions, `scopes` the global variables that each
    function could read. That is more than what was read, and never less, but for names that are put together
    from parts.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.scopes: list[tuple[dict[str, Any], CodeType]] = []
        self.codes: set[int] = set()
        self.rewinds = 0  # how often random numbers were set back
        self._known: dict[int, bool] = {}
        self._kept: list[CodeType] = []  # so that no id is used again

    def __enter__(self) -> Reads:
        # A collection of garbage calls functions that do not belong to the step.
        self._collects = gc.isenabled()
        gc.disable()
        self._before = sys.getprofile()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)
        if self._collects:
            gc.enable()

    def _note(self, frame: FrameType, event: str, given: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if id(code) not in self._known:
            counts = self._known[id(code)] = self._counts(frame, code)
            self._kept.append(code)
            if counts:
                self._read(code, frame.f_globals)
        if code is _SET_BACK:
            self.rewinds += not _is_called_by_own(frame)

    def _counts(self, frame: FrameType, code: CodeType) -> bool:
        """Whether the code belongs to the step, not to what records and traces it."""
        file = code.co_filename
        if file.startswith(_TORCH):
            return not file.removeprefix(_TORCH).replace(os.sep, "/").startswith(("_", *_OF_TRACES))
        if file.startswith((_OWN, "<frozen importlib")):
            return False
        if file.startswith(_SITE) and file.removeprefix(_SITE).startswith(_OF_TORCH):
            return False
        if _is_of_library(file):
            caller = frame.f_back
            return caller is not None and self._known.get(id(caller.f_code), False)
        return True

    def _read(self, code: CodeType, scope: dict[str, Any]) -> None:
        self.codes.add(id(code))
        if not _is_of_library(code.co_filename):
            self.scopes.append((scope, code))
        self.names.update(code.co_names)
        for value in code.co_consts:
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, str):
                    self.names.add(part)


def on_one_stack_chunk(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls `function` where the frames of all that it calls lie in one chunk of Python's stack.

    A chunk is mapped when a frame does not fit the one before, and unmapped when that frame ends. `Reads`
    gets a frame of its own for every event, several million in a trace: from any frame at the end of a chunk,
    each would map 16 KiB anew, which took up to half of the trace.
    """
    return function(*args, **kwargs)


# A frame asks for room for the operands of its code. A large one gets a chunk of the next power of two.
on_one_stack_chunk.__code__ = on_one_stack_chunk.__code__.replace(co_stacksize=2**16)


def _is_of_library(file: str) -> bool:
    """Whether Python's own library has the code."""
    return file.startswith("<frozen") or (file.startswith(_LIBRARY) and "site-packages" not in file)


def _is_called_by_own(frame: FrameType) -> bool:
    """Whether pergrad sets random numbers back, to probe a function, and not the step itself."""
    caller = frame.f_back
    while caller is not None:
        file = caller.f_code.co_filename
        if file != _RANDOM and not file.startswith(_LIBRARY):
            return file.startswith(_OWN)
        caller = caller.f_back
    return False
