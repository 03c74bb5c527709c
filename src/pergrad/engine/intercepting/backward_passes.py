"""Runs the backward passes that the user calls, and the earlier ones that some quantities need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pergrad.engine.collecting.ledger import Ledger
from pergrad.engine.intercepting.composites import run_backward
from pergrad.engine.intercepting.rule_calls import qualified_name
from pergrad.engine.intercepting.weights import Weight, quoted
from pergrad.engine.samples.layouts import Scope
from pergrad.engine.samples.origins import SUM
from pergrad.engine.samples.propagation import tensors_in
from pergrad.engine.samples.tags import TAG
from pergrad.errors import PergradError, UnsupportedFunctionError
from pergrad.runtime import internals

__all__ = ["ReadLoss", "refuse_gradients_of_weights", "run_passes", "run_passes_of_empty_batch"]

_ALONE = frozenset([0]), frozenset([1])  # numbers of a call without another before
ReadLoss: TypeAlias = Callable[
    [Any, Any], None
]  # of the tensors and gradients that a pass starts from


def run_passes(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mode: TorchFunctionMode,
    ledger: Ledger,
    anchor: Tensor,
    *,
    read_loss: ReadLoss | None = None,
    scope: Scope | None = None,
) -> Any:
    """Runs a backward pass; one for selected tensors only (`grad`, `inputs=`) records nothing.

    `mode` sees the functions that the engine calls, and all taps depend on `anchor`. `read_loss` finds
    by how much the loss is more or less than the sum of the samples' losses; `scope` knows the calls
    of the module that the pass runs through.
    """
    if func is Tensor.backward:  # calls torch.autograd.backward, which the mode would see again
        func, (args, kwargs) = torch.autograd.backward, _as_function(*args, **kwargs)
    some_only = func is torch.autograd.grad or kwargs.get("inputs") is not None
    is_nested = internals.current_graph_task_id() != -1  # within a reentrant checkpoint
    is_missed = is_nested and ledger.passes > 1  # earlier passes do not run that checkpoint
    before = sum(ledger.uses.arrived.values()) if is_missed else 0
    was_paused, ledger.is_paused = ledger.is_paused, some_only or ledger.is_paused
    try:
        if read_loss is not None and not some_only and not is_nested:
            tensors = args[0] if args else kwargs["tensors"]
            gradients = kwargs.get("grad_tensors", args[1] if len(args) > 1 else None)
            origin = getattr(getattr(tensors, TAG, None), "origin", None)
            if origin is SUM and gradients is None and ledger.skips_sums:
                ledger.units.how = "sum"
            else:
                ledger.skips_sums = False
                read_loss(tensors, gradients)
        if ledger.passes > 1 and not some_only and not is_nested:
            _run_earlier_passes(mode, ledger, anchor, *args, **kwargs)
        result = run_backward(func, mode, args, kwargs)
    finally:
        ledger.is_paused = was_paused
    if not some_only:
        with internals.DisableTorchFunction():
            if is_nested:
                ledger.end_recomputation()
                if is_missed and sum(ledger.uses.arrived.values()) > before:
                    raise _reentrant_checkpoint()
            elif ledger.queue.work:
                ledger.queue.drain()
        if scope is not None and not is_nested:
            if scope.call <= 1:
                ledger.passed_alone = _ALONE[scope.call]
            else:
                ledger.end_backward(scope.reached)
    return result


def run_passes_of_empty_batch(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], ledger: Ledger
) -> Any:
    """Runs as many backward passes as ranks with samples do, so that all ranks gather the same shards."""
    if func is not torch.autograd.grad and internals.current_graph_task_id() == -1:
        given = _as_function(*args, **kwargs)[0] if func is Tensor.backward else args
        gradients = kwargs.get("grad_tensors", given[1] if len(given) > 1 else None)
        for _pass in range(ledger.passes - 1):
            torch.autograd.backward(given[0], gradients, retain_graph=True)
            ledger.end_pass()
    return func(*args, **kwargs)


def refuse_gradients_of_weights(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    weight_of: Callable[[Tensor], Weight | None],
) -> None:
    """Raises an error if a backward pass asks for the ordinary gradient of a weight, which has none."""
    place = 1 if func is torch.autograd.grad else 4
    inputs = kwargs.get("inputs", args[place] if len(args) > place else None)
    if inputs is None:
        return
    for t in tensors_in(inputs if isinstance(inputs, list | tuple) else [inputs]):
        weight = weight_of(t)
        if weight is not None:
            raise UnsupportedFunctionError(
                f"{qualified_name(func)} asks for the ordinary gradient of {quoted(weight.roots)} "
                "inside a recording, where it has none: an autograd.Function whose backward does so (an "
                "adjoint method, for example) cannot be recorded; use the plain way through autograd, "
                "or run this outside of the recording"
            )


def _run_earlier_passes(
    mode: TorchFunctionMode,
    ledger: Ledger,
    anchor: Tensor,
    tensors: Any,
    gradients: Any = None,
    *_: Any,
    **kwargs: Any,
) -> None:
    """Runs all passes but the last, which the caller runs, for quantities with several passes."""
    gradients = kwargs.get("grad_tensors", gradients)
    for _pass in range(ledger.passes - 1):
        # Only as far as the taps, so that no other leaf accumulates its gradient twice.
        only_taps = {"retain_graph": True, "inputs": [anchor]}
        try:
            run_backward(torch.autograd.backward, mode, (tensors, gradients), only_taps)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise _reentrant_checkpoint() from error
        ledger.end_pass()


def _as_function(
    tensor: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Converts arguments of `Tensor.backward` to those of `torch.autograd.backward`."""
    return (tensor, gradient, retain_graph, create_graph), {"inputs": inputs}


def _reentrant_checkpoint() -> PergradError:
    return PergradError(
        'memory="low" runs the backward twice, which a reentrant checkpoint does not allow; '
        'pass use_reentrant=False to the checkpoint, or use memory="kept"'
    )
