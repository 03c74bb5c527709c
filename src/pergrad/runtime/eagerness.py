"""Runs functions of `torch.compile` and of TorchScript eagerly where the engine must see what they call."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

from pergrad.errors import ScopeError
from pergrad.runtime import internals

__all__ = [
    "refused_in_compiled_code",
    "running_eagerly",
    "traceable_callables",
    "uncompiled",
    "unfused_scripts",
]

P = ParamSpec("P")
R = TypeVar("R")

_DYNAMO = "torch._dynamo"  # loaded by the first `torch.compile`
_CALL = "__call__"  # of the classes of scripted functions


class _Eagerness:
    """Keeps the stance of the compiler at "force_eager" while any thread needs it.

    The stance is one for all threads: others run eagerly meanwhile, too. As long as the compiler is not
    loaded, only `torch.compile` is replaced, by a function that sets the stance once it is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0  # number of open blocks, in all threads
        self._before: Any = None  # the stance before, while it is changed
        self._compile: Any = None  # torch's own, while it is replaced

    def open(self) -> None:
        with self._lock:
            self._open += 1
            if self._before is not None:
                return
            if _DYNAMO in sys.modules:
                self._before = internals.exchange_stance()
            elif self._compile is None:
                self._compile = torch.compile
                torch.compile = self._compiled

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        found = self._compile(*args, **kwargs)
        with self._lock:
            if self._open and self._before is None and _DYNAMO in sys.modules:
                self._before = internals.exchange_stance()
        return found

    def close(self) -> None:
        with self._lock:
            self._open -= 1
            if self._open:
                return
            if self._before is not None:
                internals.exchange_stance(self._before)
                self._before = None
            if self._compile is not None:
                torch.compile, self._compile = self._compile, None


_eagerness = _Eagerness()


class running_eagerly:  # noqa: N801  # a context manager, as in contextlib
    """Within the block compiled functions and modules run eagerly, and so does compiled code around it."""

    __slots__ = ("_callback",)

    def __enter__(self) -> None:
        # Within a compiled function the interpreter passes each frame of this thread to the compiler.
        self._callback = internals.set_frame_callback(None)
        try:
            _eagerness.open()
        except BaseException:
            internals.set_frame_callback(self._callback)
            raise

    def __exit__(self, *_: object) -> None:
        try:
            _eagerness.close()
        finally:
            internals.set_frame_callback(self._callback)


def traceable_callables() -> AbstractContextManager[object]:
    """Within the block a trace sees what functions of `torch.compile` call, instead of an error."""
    if _DYNAMO not in sys.modules:
        return nullcontext()
    patched: AbstractContextManager[object] = internals.compiler_config.patch(
        error_on_nested_fx_trace=False
    )
    return patched


class _DroppedPlans:
    """Replaces the calls of scripted functions while any thread needs it: in that thread they drop plans.

    A plan is the code that torch runs for a function. Later calls make a new one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0  # number of open blocks, in all threads
        self._calls: dict[type, Any] = {}  # torch's own, by class
        self._here = threading.local()  # has a depth in threads that are within a block

    def open(self) -> None:
        with self._lock:
            self._open += 1
            self._here.depth = getattr(self._here, "depth", 0) + 1
            if self._open > 1:
                return
            for scripted, flush in internals.plan_flushers().items():
                self._calls[scripted] = call = vars(scripted)[_CALL]
                setattr(scripted, _CALL, self._dropping(flush, call))

    def _dropping(self, flush: Callable[[Any], None], call: Any) -> Callable[..., Any]:
        def drop_and_call(scripted: Any, /, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._here, "depth", 0):
                flush(scripted)
            return call(scripted, *args, **kwargs)

        return drop_and_call

    def close(self) -> None:
        with self._lock:
            self._open -= 1
            self._here.depth -= 1
            while not self._open and self._calls:
                scripted, call = self._calls.popitem()
                setattr(scripted, _CALL, call)


_dropped_plans = _DroppedPlans()


@contextmanager
def unfused_scripts() -> Iterator[None]:
    """Within the block this thread runs scripted functions operator by operator, so that a trace sees them.

    After two runs torch fuses them on a GPU into kernels that need tensors with values. Without optimised
    execution it fuses no more of them, but still runs what it has fused.
    """
    try:
        _dropped_plans.open()
        with torch.jit.optimized_execution(False):
            yield
    finally:
        _dropped_plans.close()


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps a compiler from tracing into the function: a compiled caller calls it as it is."""
    apart: Callable[P, R] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal apart
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if apart is None:
            apart = torch.compiler.disable(function)
        return apart(*args, **kwargs)

    return call


def refused_in_compiled_code(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a call in compiled code an error; for context managers, whose block would be compiled."""

    @uncompiled
    def refuse() -> None:
        raise ScopeError(
            f"`{function.__name__}` cannot open a block inside of a function that torch.compile compiles: "
            "put @torch.compiler.disable on the function that has the block, or compile only what it calls"
        )

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            refuse()
        return function(*args, **kwargs)

    return call
