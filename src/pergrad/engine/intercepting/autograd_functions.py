"""autograd.Functions that take a weight: torch shows them to no mode, so their `apply` is wrapped."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.samples.layouts import Constant
from pergrad.engine.samples.propagation import refuse_mixed_samples, tensors_in
from pergrad.runtime import internals
from pergrad.runtime.caches import cached

__all__ = ["Applied", "seeing_functions"]

_lock = threading.Lock()
_open = 0  # recordings, in all threads
_original: classmethod = Function.__dict__["apply"]


class Applied:
    """`function.apply`, one object for each class, so that it can be looked up and compared."""

    def __init__(self, function: type[Function]) -> None:
        self.function = function
        self.__name__ = function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _plain(self.function)(*args, **kwargs)


_applied = cached("the `apply` of autograd.Functions, by class")(Applied)


def _plain(function: type[Function]) -> Callable[..., Any]:
    """The function's own `apply`."""
    return _original.__get__(None, function)


class _Apply:
    """Stands for `Function.apply` while a recording is open; only code that one intercepts sees it.

    Torch hands the stack of modes on to the threads of a backward, so that a recomputation on a GPU is seen.
    Any other thread, and code outside of the recording, has the original.
    """

    def __get__(self, _: object, function: type[Function]) -> Callable[..., Any]:
        for mode in internals.function_modes():
            if hasattr(mode, "wants_function"):
                return types.MethodType(_apply, function)
        return _plain(function)


_intercepting = _Apply()


def _apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
    stack = internals.function_modes()
    wants = getattr(stack[-1], "wants_function", None) if stack else None
    # Checkpoints that are not reentrant keep their arguments by a function of their own.
    keeps = (
        function.__module__ == CheckpointFunction.__module__ and function is not CheckpointFunction
    )
    if wants is None or keeps:
        return _plain(function)(*args, **kwargs)
    if not wants(args, kwargs):
        output = _plain(function)(*args, **kwargs)
        tracker = getattr(stack[-1], "tracker", None)  # there is none before the batch is known
        if function is CheckpointFunction and tracker is not None:
            _show_no_samples(tracker, output)
        return output
    with internals.pop_mode() as mode:
        return mode.__torch_function__(_applied(function), (), args, kwargs)


def _show_no_samples(tracker: Tracker, output: Any) -> None:
    """Let nothing without samples leave a reentrant checkpoint, unless it has no gradient.

    Its forward runs without gradients, so that a function that mixes samples is no error there and gives
    a constant, and so does one of weights alone.
    """
    for t in tensors_in(output):
        if not t.requires_grad or not isinstance(tracker.layout(t), Constant):
            continue
        if tracker.scope.count == 1 and t.dim():
            tracker.mark(t, tracker.scope.samples(0, 1, t.shape[0]))
            continue
        reason = "a reentrant checkpoint gives a result that is not known to be one for each sample"
        lost = tracker.scope.lost(f"{reason} (use_reentrant=False may help)", "mixed")
        tracker.mark(t, lost)
        t.register_hook(functools.partial(refuse_mixed_samples, lost.reason))


@contextmanager
def seeing_functions() -> Iterator[None]:
    """Within, `apply` asks the innermost mode whether it wants to handle the call."""
    global _open, _original
    with _lock:
        if _open == 0:
            _original = Function.__dict__["apply"]
            Function.apply = _intercepting  # type: ignore[assignment]
        _open += 1
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if _open == 0 and Function.__dict__["apply"] is _intercepting:
                Function.apply = _original  # type: ignore[assignment]
