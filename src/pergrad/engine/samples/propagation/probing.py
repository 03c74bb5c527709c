"""Finds the layouts of functions that no table lists.

A probe runs the function on meta tensors with one more sample and looks which dimension grows.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Layout, Owners, Samples
from pergrad.engine.samples.propagation.table import Call, tensors_in
from pergrad.engine.samples.signatures import Signature, describe_hashable, signature_of_call
from pergrad.engine.samples.sizes import BatchSize
from pergrad.runtime import is_traced
from pergrad.runtime.caches import Cache

__all__ = ["layouts_by_probe"]

# Maps the signature of a call to the dimensions of each output that grow, or to the reason why they are
# unknown. The signature has the function, the batch size, every plain argument with its type, and the shape,
# dtype and layout of every tensor. It does not have the values of tensors: the growing dimensions do not
# depend on floating-point values, and calls with shared indices or with owners have no signature. A function
# may mix samples depending on their values or on its closure; the probe notices that only if the first
# probed call mixes them.
_GROWN: Cache[list[list[int] | None] | str] = Cache(__name__, "answers of probes, by signature")
_UNKNOWN = "has a result whose samples cannot be told apart"


def layouts_by_probe(call: Call) -> list[Layout]:
    """Returns one layout per output, assuming that the function keeps the order of the samples."""
    kinds = {type(layout) for _, layout in call.with_samples}
    owners = [layout for _, layout in call.with_samples if isinstance(layout, Owners)]
    if owners and (len(kinds) > 1 or any(la.owner is not owners[0].owner for la in owners)):
        return [call.mixed("moves samples in an unknown way")] * len(call.outputs)
    signature = _signature(call)
    grown = _GROWN.get(signature)
    # A traced step has no values to probe with; the untraced step before it has probed the model's calls.
    if grown is None and any(map(is_traced, call.tensors)):
        return [call.mixed("cannot be probed during a trace")] * len(call.outputs)
    if grown is None:
        grown = _probe(call)
        if not isinstance(grown, str) and not _keeps_samples_apart(call, grown):
            grown = "mixes or reorders the samples"
        if signature is not None:
            _GROWN.put(signature, grown)
    if isinstance(grown, str) and grown.startswith(_UNKNOWN) and call.flows:
        return [call.lost(grown)] * len(call.outputs)
    if isinstance(grown, str):
        return [call.mixed(grown)] * len(call.outputs)
    return [_layout(call, t, dims) for t, dims in zip(call.outputs, grown, strict=True)]


def _keeps_samples_apart(call: Call, grown: list[list[int] | None]) -> bool:
    """Whether NaN in one sample reaches no output rows of other samples."""
    count = call.scope.count
    for sample in sorted({0, 1, count // 2, count - 1} & set(range(count))):
        try:
            with torch.no_grad(), torch.random.fork_rng():
                results = tensors_in(_run_with_nan(call, sample))
        except (RuntimeError, ValueError):  # the function itself refuses NaN
            return False
        for t, dims in zip(results, grown, strict=True):
            if not (t.is_floating_point() or t.is_complex()) or not dims or len(dims) > 1:
                continue
            layout = _layout(call, t, dims)
            if not isinstance(layout, Samples | Owners):
                continue
            owner = layout.owner_of_each(t.device)
            rows = t.isnan().movedim(layout.dim, 0).flatten(1).any(1) if t.dim() > 1 else t.isnan()
            if bool((rows & (owner != sample)).any()):
                return False
    return True


def _run_with_nan(call: Call, sample: int) -> Any:
    def poisoned(value: Any) -> Any:
        if isinstance(value, Tensor):
            layout = call.layout(value)
            value = value.detach().clone()
            if isinstance(layout, Samples | Owners) and value.is_floating_point():
                rows = layout.owner_of_each(value.device) == sample
                value.movedim(layout.dim, 0)[rows] = torch.nan
            return value
        return type(value)(poisoned(v) for v in value) if type(value) in (list, tuple) else value

    return call.func(*poisoned(call.args), **{k: poisoned(v) for k, v in call.kwargs.items()})


def _layout(call: Call, output: Tensor, grown: list[int] | None) -> Layout:
    if grown is None or len(grown) > 1:
        return call.mixed("moves samples in an unknown way")
    if not grown:
        return call.mixed()
    (dim,) = grown
    size = output.shape[dim]
    for _, layout in call.with_samples:
        if layout.size == size:
            return layout.at(dim)
    if size % call.scope.count or any(isinstance(la, Owners) for _, la in call.with_samples):
        return call.lost("gives a dimension that is not a multiple of the batch size")
    return call.scope.samples(dim, 1, size // call.scope.count)


def _signature(call: Call) -> Signature | None:
    """Returns the signature of a call; None if a probe may depend on tensor values and cannot be cached."""

    def describe_tensor(t: Tensor, parts: list[Any]) -> bool:
        layout = call.layout(t)
        where = (layout.dim, layout.pre, layout.post) if isinstance(layout, Samples) else None
        parts += t.shape, t.dtype, where
        # An integer tensor without samples may be an index, whose values matter.
        return not isinstance(layout, Owners) and (where is not None or t.is_floating_point())

    return signature_of_call(
        call.func, call.scope.count, call.args, call.kwargs, describe_tensor, describe_hashable
    )


def _probe(call: Call) -> list[list[int] | None] | str:
    """Finds the dimensions of each output that grow with the batch, on meta tensors or else by a trial."""
    try:
        small, large = _shapes(call, 0), _shapes(call, 1)
    except Exception:  # any error means "unknown": a function of numpy cannot take meta tensors
        return _trial(call)
    if len(small) != len(call.outputs) or len(large) != len(call.outputs):
        return "returns a number of tensors that depends on values"
    return [_differing(s, g) for s, g in zip(small, large, strict=True)]


def _differing(small: torch.Size, large: torch.Size) -> list[int] | None:
    if len(small) != len(large):
        return None
    return [d for d, (a, b) in enumerate(zip(small, large, strict=True)) if a != b]


def _shapes(call: Call, more: int) -> list[torch.Size]:
    """Returns the shapes of the outputs for a batch with `more` additional samples."""
    count = call.scope.count

    def grow(value: Any) -> Any:
        if isinstance(value, Tensor):
            layout = call.layout(value)
            shape = list(value.shape)
            if isinstance(layout, Samples):
                shape[layout.dim] = shape[layout.dim] // count * (count + more)
            elif isinstance(layout, Owners):
                shape[layout.dim] += more
            return torch.empty(shape, dtype=value.dtype, device="meta")
        if isinstance(value, BatchSize):
            return int(value) // count * (count + more)
        if isinstance(value, list | tuple) and type(value) in (list, tuple, torch.Size):
            return tuple(grow(v) for v in value)
        return value

    kwargs = {k: grow(v) for k, v in call.kwargs.items()}
    with torch.no_grad():
        return [t.shape for t in tensors_in(call.func(*grow(call.args), **kwargs))]


def _trial(call: Call) -> list[list[int] | None] | str:
    """Probes a function that cannot run on meta tensors, such as one of numpy.

    Runs it on real values, with the last sample repeated.
    """
    count = call.scope.count

    def repeated(value: Any) -> Any:
        if isinstance(value, Tensor):
            layout = call.layout(value)
            if isinstance(layout, Samples):
                sizes = (layout.pre, count, layout.post)
                split = value.detach().unflatten(layout.dim, sizes)
                last = split.narrow(layout.dim + 1, count - 1, 1)
                both = torch.cat([split, last], layout.dim + 1)
                return both.flatten(layout.dim, layout.dim + 2)
            if isinstance(layout, Owners):
                last = value.detach().narrow(layout.dim, layout.size - 1, 1)
                return torch.cat([value.detach(), last], layout.dim)
            return value.detach()
        if isinstance(value, BatchSize):
            return int(value) // count * (count + 1)
        if isinstance(value, list | tuple) and type(value) in (list, tuple, torch.Size):
            return tuple(repeated(v) for v in value)
        return value

    try:
        with torch.no_grad(), torch.random.fork_rng():
            kwargs = {k: repeated(v) for k, v in call.kwargs.items()}
            found = tensors_in(call.func(*repeated(call.args), **kwargs))
    except Exception as error:  # as in `_probe`
        text = str(error).split("\n")[0]
        return f"{_UNKNOWN}: with one more sample it raises {type(error).__name__} ({text})"
    if len(found) != len(call.outputs):
        return "returns a number of tensors that depends on values"
    grown = [_differing(t.shape, more.shape) for t, more in zip(call.outputs, found, strict=True)]
    for t, more, dims in zip(call.outputs, found, grown, strict=True):
        if dims is not None and len(dims) == 1 and not _extends(more, t, _layout(call, t, dims)):
            return "mixes or reorders the samples"
    return grown


def _extends(more: Tensor, t: Tensor, layout: Layout) -> bool:
    """Whether a result with one more sample has the values of `t` for all other samples."""
    if not isinstance(layout, Samples | Owners):
        return False
    dim = layout.dim
    if isinstance(layout, Samples):
        sizes = (layout.pre, layout.scope.count + 1, layout.post)
        if more.shape[dim] != prod(sizes):
            return False
        first = more.unflatten(dim, sizes).narrow(dim + 1, 0, layout.scope.count)
        first = first.flatten(dim, dim + 2)
    else:
        first = more.narrow(dim, 0, layout.size)
    return first.shape == t.shape and torch.allclose(first, t.detach(), equal_nan=True)
