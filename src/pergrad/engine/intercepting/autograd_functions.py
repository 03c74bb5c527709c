"""Wraps `apply` of autograd.Functions, which a TorchFunctionMode does not intercept."""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from pergrad.distributed.placing import refuse_sharded_samples
from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.samples.layouts import Constant, Layout, Owners, Samples
from pergrad.engine.samples.propagation import (
    refuse_gradients,
    refuse_mixed_samples,
    tensors_in,
)
from pergrad.engine.samples.proving import note
from pergrad.runtime import internals
from pergrad.runtime.caches import CACHES

__all__ = ["Applied", "intercepting_functions"]

# The autograd.Functions of `fully_shard` return their arguments; their backward reshards parameters. Those of
# DTensors (`from_local`, `redistribute`, `to_local`) return the same values on other ranks.
_IDENTITIES = ("torch.distributed.fsdp.", "torch.distributed.tensor.")
_lock = threading.Lock()
_open = 0  # number of open recordings, in all threads
_original: classmethod = Function.__dict__["apply"]
_original_vmap: Callable[..., Any] | None = None  # the body of `torch.vmap`


class Applied:
    """Represents `function.apply` by one object per class, for lookups and comparisons.

    Caches keep it, so it does not keep the class, which may be local to a function.
    """

    def __init__(self, function: type[Function]) -> None:
        self._function = weakref.ref(function)
        self.__name__, self.__module__ = function.__name__, function.__module__
        self.__qualname__ = function.__qualname__

    @property
    def function(self) -> type[Function]:
        found = self._function()
        assert found is not None, "whoever calls `apply` holds the class"
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _plain(self.function)(*args, **kwargs)


_APPLIED: weakref.WeakKeyDictionary[type[Function], Applied] = weakref.WeakKeyDictionary()
CACHES.add(
    __name__, "the `apply` of autograd.Functions, by class", "at most the classes alive", _APPLIED
)


def _applied(function: type[Function]) -> Applied:
    found = _APPLIED.get(function)
    if found is None:
        found = _APPLIED[function] = Applied(function)
    return found


def _plain(function: type[Function]) -> Callable[..., Any]:
    """Returns the function's own `apply`."""
    return _original.__get__(None, function)


class _Apply:
    """Replaces `Function.apply` while a recording is open; only recorded code gets the wrapper.

    Torch passes the stack of modes to the threads of a backward, so a recomputation on a GPU is recorded too.
    Any other thread, and code outside of the recording, gets the original.
    """

    def __get__(self, _: object, function: type[Function]) -> Callable[..., Any]:
        if _recorder() is None:
            return _plain(function)
        return types.MethodType(_apply, function)


_intercepting = _Apply()


def _recorder() -> Any:
    """Returns the open recorder, below modes of the user such as `torch.device`; None without one."""
    for mode in reversed(internals.function_modes()):
        if hasattr(mode, "wants_function"):
            return mode
    return None


@contextmanager
def _unseen_by(recorder: Any) -> Iterator[Any]:
    """Closes the recorder, and modes of the user within it, for a while."""
    with ExitStack() as closed:
        while closed.enter_context(internals.pop_mode()) is not recorder:
            pass
        yield recorder


def _apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
    recorder = _recorder()
    wants = getattr(recorder, "wants_function", None)
    # Non-reentrant checkpoints save their arguments with an autograd.Function, which uses no weight.
    # This package's own functions are parts of functions that declare how they move samples.
    keeps = (
        function.__module__ == CheckpointFunction.__module__ and function is not CheckpointFunction
    ) or function.__module__.startswith("pergrad.")
    is_torchs = function.__module__.startswith("torch.")  # as for backward hooks of modules
    if wants is None or keeps:
        return _plain(function)(*args, **kwargs)
    if not wants(args, kwargs) and function.__module__.startswith(_IDENTITIES):
        output = _plain(function)(*args, **kwargs)
        if getattr(recorder, "uses", None) is not None:
            _pass_on(recorder.tracker, tensors_in(args, kwargs), tensors_in(output))
        return output
    if not wants(args, kwargs):
        is_checkpoint = function is CheckpointFunction
        uses = getattr(recorder, "uses", None)  # None before the batch size is known
        before = 0 if uses is None else uses.to_recompute
        output = (_run_checkpoint if is_checkpoint else _plain(function))(*args, **kwargs)
        if uses is None or not torch.is_grad_enabled():
            return output
        with _unseen_by(recorder) as mode:
            # A function that uses weights inside runs them again in its backward, as a checkpoint does.
            is_rerun = is_checkpoint or uses.to_recompute > before
            if is_rerun or (is_torchs and _is_tracked(mode.tracker, output)):
                _refuse_untracked(mode.tracker, output)
            else:
                mode.tracker.propagate(_applied(function), args, kwargs, output)
        return output
    with _unseen_by(recorder) as mode:
        return mode.__torch_function__(_applied(function), (), args, kwargs)


def _pass_on(tracker: Tracker, given: list[Tensor], returned: list[Tensor]) -> None:
    """Gives each result the layout of the argument that it is; proofs do not run through it."""
    with internals.DisableTorchFunction():
        for before, after in zip(given, returned, strict=True):
            layout = tracker.layout(before)
            if isinstance(layout, Samples | Owners):
                refuse_sharded_samples(before, after, layout.dim)
            tracker.mark(after, layout)
            note(after, layout)


def _run_checkpoint(run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """Runs a reentrant checkpoint, whose backward runs the function again.

    It does so on detached copies of the arguments. They get the layouts of these: a shape does not tell in
    which order the samples are.
    """
    recorder = _recorder()
    layouts: list[Layout | None] = []

    def rerun(*given: Any) -> Any:
        if internals.current_graph_task_id() != -1:
            for t, layout in zip(given, layouts):  # noqa: B905  # none where nothing is recorded
                if layout is not None:
                    recorder.tracker.mark(t, layout)
        return run(*given)

    has_begun = getattr(recorder, "uses", None) is not None
    if has_begun:
        with _unseen_by(recorder) as mode:
            layouts += [mode.tracker.layout(t) if isinstance(t, Tensor) else None for t in args]
    output = _plain(CheckpointFunction)(rerun, preserve_rng_state, *args)
    if not has_begun and getattr(recorder, "uses", None) is not None:
        with _unseen_by(recorder) as mode:
            layouts += _layouts_within(mode.tracker, args, output)
    return output


def _layouts_within(tracker: Tracker, args: Iterable[Any], output: Any) -> list[Layout | None]:
    """Returns the layouts of a checkpoint's arguments, if the recorded module was first called inside of it.

    What the module did not get itself has unknown samples, and gradients through the checkpoint are refused.
    """
    found: list[Layout | None] = []
    for t in args:
        layout = tracker.inner_tag(t) if isinstance(t, Tensor) else None
        found.append(layout)
        if layout is None and isinstance(t, Tensor) and tracker.could_have_samples(t):
            reason = (
                "the recorded module is called first inside of a reentrant checkpoint, which changes a "
                f"tensor of shape {tuple(t.shape)} before that, so the order of its samples is unknown"
            )
            for made in tensors_in(output):
                _refuse_output(tracker, made, reason)
    return found


def _refuse_output(tracker: Tracker, t: Tensor, reason: str) -> None:
    lost = tracker.scope.lost(f"{reason} (try use_reentrant=False)", "mixed")
    tracker.mark(t, lost)
    refuse_gradients(t, functools.partial(refuse_mixed_samples, lost.reason))


def _is_tracked(tracker: Tracker, output: Any) -> bool:
    """Whether the functions inside of an autograd.Function tell the samples of all that it returns."""
    return all(
        isinstance(tracker.inner_tag(t), Samples | Owners)
        for t in tensors_in(output)
        if t.requires_grad
    )


def _refuse_untracked(tracker: Tracker, output: Any) -> None:
    """Makes outputs of a reentrant checkpoint that require grad but have no samples an error.

    The checkpoint runs its forward without gradients, where functions that mix samples, and functions of
    weights alone, give constants instead of errors. Its backward runs them again, in sight.
    """
    for t in tensors_in(output):
        if not t.requires_grad:
            continue
        inner = tracker.inner_tag(t)
        if inner is not None and not inner.is_weight and not isinstance(inner, Constant):
            tracker.mark(t, inner)
            continue
        if tracker.scope.count == 1 and t.dim():
            tracker.mark(t, tracker.scope.samples(0, 1, t.shape[0]))
            continue
        _refuse_output(
            tracker, t, "a reentrant checkpoint returns a tensor whose samples are unknown"
        )


def _vmap(
    func: Callable[..., Any],
    in_dims: Any,
    out_dims: Any,
    randomness: str,
    chunk_size: int | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces the body of `torch.vmap` while a recording is open: the recorder may map otherwise."""
    plain = _original_vmap
    assert plain is not None
    recorder = _recorder()
    mapped = getattr(recorder, "mapped", None)
    found = mapped(func, in_dims, args, kwargs) if mapped is not None else None
    if found is None:
        unrolled = getattr(recorder, "unrolled", None) if randomness == "error" else None
        loop = unrolled(func, in_dims, out_dims, args) if unrolled is not None else None
        if loop is not None:
            return loop(**kwargs)
        return plain(func, in_dims, out_dims, randomness, chunk_size, *args, **kwargs)
    with _unseen_by(recorder):
        func, in_dims, given = found
        return plain(func, in_dims, out_dims, randomness, None, *given, **kwargs)


class intercepting_functions:  # noqa: N801  # a context manager, as in contextlib
    """Lets the recorder handle calls of `apply` within the block."""

    __slots__ = ()

    def __enter__(self) -> None:
        global _open, _original, _original_vmap
        with _lock:
            if _open == 0:
                _original = Function.__dict__["apply"]
                _original_vmap = internals.transforms.vmap_impl
                internals.transforms.vmap_impl = _vmap
                Function.apply = _intercepting  # type: ignore[assignment]
            _open += 1

    def __exit__(self, *_: object) -> None:
        global _open
        with _lock:
            _open -= 1
            if _open == 0 and Function.__dict__["apply"] is _intercepting:
                Function.apply = _original  # type: ignore[assignment]
            if _open == 0 and internals.transforms.vmap_impl is _vmap:
                internals.transforms.vmap_impl = _original_vmap
