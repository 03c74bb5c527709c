"""Finds the layouts of tensors that no function in sight has made.

Scripted functions, `torch.vmap` and code outside of torch are out of sight.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Key, Layout, Scope
from pergrad.engine.samples.origins import untold
from pergrad.engine.samples.propagation import (
    refuse_gradients,
    refuse_unknown_samples,
    unknown_samples,
)
from pergrad.engine.samples.proving import Source, candidates, is_total, proved, sources_of
from pergrad.runtime import internals, is_traced
from pergrad.runtime.caches import Cache

__all__ = ["Promise", "check_promises", "layout_out_of_sight", "proved_on_graph"]

# The layout of a tensor inside of a checkpoint that its recomputation has to prove; shape, maker, layout.
Promise: TypeAlias = tuple[torch.Size, str, Layout]

_PROVED: Cache[Key] = Cache(__name__, "layouts of tensors made out of sight, for traced steps")


def layout_out_of_sight(t: Tensor, scope: Scope, promises: list[Promise]) -> Layout | None:
    """Proves the layout of a tensor on its graph; None if no weight is behind it.

    If nothing is proved, a gradient through the tensor is an error. Layouts that cannot be proved yet are
    added to `promises`, and a recomputation that proves one removes it.
    """
    with internals.DisableTorchFunction():
        sources, is_packed = sources_of(t, scope)
        if sources == []:
            return None
        if scope.count == 1 and t.dim():
            return scope.samples(0, 1, t.shape[0])
        is_recomputation = internals.current_graph_task_id() != -1
        if is_packed and is_recomputation:
            return None  # an argument of the checkpoint: only the layouts of the forward matter
        known = (scope.count, t.shape, _maker_of(t)) if sources is not None else None
        if is_traced(t):
            # It has no values; the untraced step before it has proved what the model does.
            key = _PROVED.get(known)
            return None if key is None else scope.samples(*key)  # type: ignore[arg-type]
        if sources is not None:
            if is_packed:
                return _promise(t, sources, scope, promises)
            try:
                found, _ = proved(t, sources, scope)
                if found is not None:
                    if is_recomputation:
                        _redeem(t, found, promises)
                    if found.key is not None:
                        _PROVED.put(known, found.key)
                    return found
                if is_total(t, sources):
                    return scope.total(
                        "a function out of sight sums over the batch, or puts it in another order",
                        untold(f"`{_maker_of(t)}` was made out of sight of the recorder"),
                    )
            except Exception as error:  # of a backward that cannot run by itself, or may not
                error.__traceback__ = None  # its frames hold the tensors
        reason = (
            f"a tensor of shape {tuple(t.shape)} was made out of sight of the recorder, by "
            f"`{_maker_of(t)}` in a scripted function, torch.vmap or the like"
        )
        refuse_gradients(t, functools.partial(refuse_unknown_samples, reason))
    return scope.lost(reason, "unknown")


def proved_on_graph(t: Tensor, scope: Scope) -> Layout | None:
    """Proves the layout of a tensor on its graph, back to the last uses of weights; None if it cannot."""
    if not t.requires_grad or t.grad_fn is None or not t.dim() or scope.count == 1:
        return None
    if is_traced(t) or internals.is_transformed(t) or t.layout is not torch.strided:
        return None
    with internals.DisableTorchFunction():
        sources, is_packed = sources_of(t, scope)
        if not sources or is_packed or internals.top_saved_tensors_hooks(False) is not None:
            return None
        try:
            return proved(t, sources, scope)[0]
        except Exception as error:  # of a backward that cannot run by itself, or may not
            error.__traceback__ = None  # its frames hold the tensors
            return None


def _promise(
    t: Tensor, sources: Sequence[Source], scope: Scope, promises: list[Promise]
) -> Layout | None:
    """Guesses the layout of a tensor inside of a checkpoint.

    The graph cannot be used now: its saved tensors are packed.
    """
    allowed = candidates(t, [layout for _, layout in sources], scope)
    if not allowed:
        return None
    promises.append((t.shape, _maker_of(t), allowed[0]))
    return allowed[0]


def _redeem(t: Tensor, found: Layout, promises: list[Promise]) -> None:
    promise = t.shape, _maker_of(t), found
    if promise in promises:
        promises.remove(promise)


def check_promises(promises: Sequence[Promise]) -> None:
    """Raises an error if the layout of a tensor inside of a checkpoint was not proved."""
    for shape, maker, _ in promises:
        raise unknown_samples(
            f"a tensor of shape {tuple(shape)} was made out of sight of the recorder, by `{maker}` in "
            "a checkpoint whose recomputation does not prove its samples"
        )


def _maker_of(t: Tensor) -> str:
    return type(t.grad_fn).__name__.removesuffix("0").removesuffix("Backward")
