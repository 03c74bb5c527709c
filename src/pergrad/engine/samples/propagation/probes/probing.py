"""Finds the layouts of functions that no table lists, and proves them.

Where a gradient flows, the autograd graph of the call decides: see `proving`. Otherwise a probe runs the
function with one more sample, and looks which dimension grows; then with other values in a subset of the
samples, which may change no row of another sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pergrad.engine.samples.known_indices import known_index
from pergrad.engine.samples.layouts import Key, Layout, Lost, Owners, Samples
from pergrad.engine.samples.moving import layouts_after_moves
from pergrad.engine.samples.origins import SUM
from pergrad.engine.samples.propagation.probes.other_values import (
    devices_of,
    itself,
    nearby,
    others_stay,
    runs,
    with_other_values,
    with_values,
    within_range,
)
from pergrad.engine.samples.propagation.table import (
    Call,
    is_own,
    is_trusted,
    refuse_lost,
    tensors_in,
)
from pergrad.engine.samples.propagation.totals import origin_of
from pergrad.engine.samples.proving import Source, candidates, proved, subsets
from pergrad.engine.samples.signatures import Signature, describe_hashable, signature_of_call
from pergrad.engine.samples.sizes import BatchSize
from pergrad.errors import PergradError
from pergrad.runtime import internals, is_traced
from pergrad.runtime.caches import Cache
from pergrad.runtime.containers import map_parts
from pergrad.runtime.tolerances import largest

__all__ = ["layouts_by_probe", "proved_apart"]

# Maps the signature of a call to the keys of its outputs' layouts, or to the reason why they are unknown.
# The signature has the function, the batch size, every plain argument with its type, and the shape, dtype and
# layout of every tensor, but no values of tensors. So answers are kept for functions of torch and for those
# with a rule, if random numbers in all arguments give the same answer; not for calls with integers, which may
# be indices; nor if numbers are not finite.
_ANSWERS: Cache[tuple[Key, ...] | str] = Cache(__name__, "answers of probes, by signature")
# Signatures whose answers depend on values: the product with a diagonal matrix keeps the samples apart.
_BY_VALUES: Cache[bool] = Cache(__name__, "calls whose samples depend on values, by signature")
# Layouts, or the reason why there are none; and whether other values would give the same answer.
Found: TypeAlias = tuple[list[Layout] | str, bool]
_MIXES = "mixes or reorders the samples"
_UNKNOWN = "has a result whose samples cannot be told apart"


def layouts_by_probe(call: Call) -> list[Layout]:
    """Returns one layout per output: proved, or an error once a gradient flows."""
    if call.scope.count == 1:
        return [_of_one_sample(call, t) for t in call.outputs]
    if any(t.layout is not torch.strided for t in call.outputs):
        return _refused(call, f"{_UNKNOWN}: it is sparse")
    signature = _signature(call)
    known = _ANSWERS.get(signature)
    if isinstance(known, str):
        return _refused(call, known)
    if known is not None:
        return [call.scope.samples(*key) for key in known]  # type: ignore[misc]
    # A traced step has no values to probe with; the untraced step before it has probed the model's calls.
    if any(t.is_meta for t in call.tensors):
        return _refused(call, "cannot be probed during a trace")
    if any(map(is_traced, call.tensors)):
        return _probed_in_trace(call)
    call.reads_values = True  # until it is clear that they do not matter
    try:
        found = _proved_by_graph(call) if any(t.requires_grad for t in call.outputs) else None
        layouts, is_certain = found or _found_by_values(call)
        if isinstance(layouts, str):
            moved = _by_moves(call, layouts)
            layouts, is_certain = (layouts, is_certain) if moved is None else (moved, False)
    except RuntimeError as error:  # a trace of the user's own has no values to compare
        if isinstance(error, PergradError | torch.OutOfMemoryError):
            raise
        return _refused(call, f"{_UNKNOWN}: probing it raises {_first_line(error)}")
    answer = layouts if isinstance(layouts, str) else tuple(layout.key for layout in layouts)
    is_kept = is_certain and (
        answer == _MIXES or all(isinstance(layout, Samples) for layout in layouts)
    )
    if (
        signature is not None
        and is_kept
        and not _BY_VALUES.get(signature)
        and all(bool(t.isfinite().all()) for t in call.tensors)
    ):
        if _holds_for_other_values(call, layouts):
            _ANSWERS.put(signature, answer)
            call.reads_values = False
        else:
            _BY_VALUES.put(signature, True)
    return _refused(call, layouts) if isinstance(layouts, str) else layouts


def _holds_for_other_values(call: Call, layouts: Sequence[Layout] | str) -> bool:
    """Whether the answer does not depend on the values of the arguments, constant ones included.

    Random numbers stand for all values; where the function refuses them, numbers close to the given ones.
    """
    if isinstance(layouts, str):  # other values of a constant may keep the samples apart
        return not call.flows or all(layout.has_samples for layout in call.layouts)
    for draw in (within_range, nearby):
        twin = with_values(call, draw)
        if twin is None:
            continue
        try:
            proof = _proved_by_graph(twin) if any(t.requires_grad for t in twin.outputs) else None
            return (proof or _found_by_values(twin))[0] == layouts
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return False
    return False


def _probed_in_trace(call: Call) -> list[Layout]:
    """Probes a call of a traced step on random values: a graph runs the same operations on any values.

    Integers may be indices, so that other values do not stand for them, unless they do not depend on the
    inputs; and a function that draws random numbers would draw others. The call is then refused.
    """
    twin = None if is_trusted(call.func) else _with_random_values(call)
    if twin is None:
        return _refused(call, "cannot be probed during a trace")
    with internals.outside_of_trace():
        found = layouts_by_probe(twin)
    call.reads_values = True
    is_apart = all(isinstance(layout, Samples) for layout in found)
    return list(found) if is_apart else _refused(call, "cannot be probed during a trace")


def _with_random_values(call: Call) -> Call | None:
    """Runs the call again on random numbers, on the CPU; None if it cannot be."""
    known = {id(t): known_index(t) for t in call.tensors}
    if not all(
        t.layout is torch.strided
        and (t.is_floating_point() or t.dtype is torch.bool or known[id(t)] is not None)
        for t in call.tensors
    ):
        return None
    values: dict[int, Tensor] = {}

    def drawn(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in values:
            constant = known.get(id(value))
            if constant is not None:
                values[id(value)] = constant.clone()
            elif value.dtype is torch.bool:  # a mask: rows that it selects would have another shape
                values[id(value)] = torch.rand(value.shape) < 0.5
            else:
                made = torch.randn(value.shape, dtype=value.dtype)
                values[id(value)] = made.requires_grad_(value.requires_grad)
        return values[id(value)]

    try:
        with internals.outside_of_trace(), torch.random.fork_rng(devices=()), torch.enable_grad():
            args, kwargs, tensors = map_parts(drawn, (call.args, call.kwargs, call.tensors))
            outputs = tensors_in(call.func(*args, **kwargs))
    except Exception:  # any error means "unknown": a kernel for GPUs alone
        return None
    if [t.shape for t in outputs] != [t.shape for t in call.outputs]:
        return None
    return Call(call.scope, call.func, args, kwargs, outputs, tensors, call.layouts, call.flows)


def proved_apart(call: Call) -> list[Layout] | None:
    """Proves on the graph of this one call that its values keep the samples apart; None if they do not.

    The answer holds for these values alone. Every argument with a gradient must have known samples, or none.
    """
    if not call.flows or any(t.layout is not torch.strided for t in (*call.outputs, *call.tensors)):
        return None
    if not all(
        t.dim() for t in call.outputs
    ):  # terms of several samples may add up to a linear sum
        return None
    if any(map(is_traced, call.tensors)) or any(map(internals.is_transformed, call.tensors)):
        return None
    if any(
        t.requires_grad and isinstance(layout, Lost)
        for t, layout in zip(call.tensors, call.layouts, strict=True)
    ):
        return None
    if any(out is t for out in call.outputs for t in call.tensors):  # written in place
        return None
    call.reads_values = True
    found = _proved_by_graph(call)
    return None if found is None or isinstance(found[0], str) else found[0]


def _of_one_sample(call: Call, t: Tensor) -> Layout:
    """Returns the layout of a result for a batch of one: all of it belongs to the one sample."""
    if t.dim():
        return call.scope.samples(0, 1, t.shape[0])
    return call.total(SUM)


def _refused(call: Call, reason: str) -> list[Layout]:
    made = call.unknown(reason) if reason.startswith(_UNKNOWN) else call.mixed(reason)
    for t in call.outputs:
        refuse_lost(t, made)
    return [made] * len(call.outputs)


def _proved_by_graph(call: Call) -> Found | None:
    """Proves the layouts of the outputs on their graph; None if the graph does not decide.

    Outputs without a gradient keep their hint: they are data.
    """
    sources: list[Source] = [(t, la) for t, la in call.with_samples if t.requires_grad]
    if not sources:
        return None
    hints: Sequence[Layout | None] = call.hints
    if is_own(call.func):
        grown = _by_growth(call)
        hints = hints if isinstance(grown, str) else grown
    outputs = call.outputs
    if (
        internals.top_saved_tensors_hooks(False) is not None
    ):  # a checkpoint has packed the saved tensors
        at = [next(k for k, own in enumerate(call.tensors) if own is s) for s, _ in sources]
        leaves, outputs = _run_apart(call, None, at)
        sources = [(leaf, layout) for leaf, (_, layout) in zip(leaves, sources, strict=True)]
    found: list[Layout] = []
    is_certain = True
    for t, hint in zip(outputs, hints, strict=True):
        if not t.requires_grad or (not t.numel() and len(outputs) > 1):
            found.append(hint or call.scope.constant())
            continue
        try:
            layout, verdict = proved(t, sources, call.scope, hint)
        except Exception as error:  # of a backward that cannot run by itself, or may not
            error.__traceback__ = None  # its frames hold the tensors
            return f"{_UNKNOWN}: its backward raises {_first_line(error)}", False
        if layout is None and not t.dim() and _is_total_by_values(call, len(found)):
            found.append(call.total(origin_of(call)))
            continue
        if layout is None:
            return _MIXES if verdict == "mixed" else _UNKNOWN, verdict == "mixed"
        is_certain = is_certain and verdict == "apart"
        found.append(layout)
    return found, is_certain


def _run_apart(
    call: Call, mask: Tensor | None, at: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Runs the function again in a graph of its own; samples in the mask have other values.

    Returns the leaves for the tensors `at`, and the outputs.
    """
    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(itself, itself),
        torch.random.fork_rng(devices=devices_of(call)),
    ):
        args, kwargs = with_other_values(call, mask)
        given = tensors_in(args, kwargs)
        leaves = [given[k].requires_grad_() for k in at]
        return leaves, tensors_in(call.func(*args, **kwargs))


def _is_total_by_values(call: Call, place: int) -> bool:
    """Whether a scalar, such as a loss by an autograd.Function, is a sum over samples.

    That is so if other values in a subset of the samples do not change the gradients of the others. `place`
    is its number among the outputs.
    """
    at = [k for k, t in enumerate(call.tensors) if t.requires_grad and call.layouts[k].has_samples]
    own = [call.layouts[k] for k in at]

    def gradients(mask: Tensor | None) -> list[Tensor]:
        leaves, outputs = _run_apart(call, mask, at)
        with call.scope.pulling_back():
            found = torch.autograd.grad(outputs[place], leaves, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]

    plain = gradients(None)
    for mask in subsets(call.scope.count):
        try:
            others = gradients(mask)
        except (RuntimeError, ValueError, IndexError):  # the function refuses these values
            return False
        for a, b, layout in zip(plain, others, own, strict=True):
            assert isinstance(layout, Samples | Owners)
            rows = ~mask.to(a.device)[layout.owner_of_each(a.device)]
            mine, again = (g.movedim(layout.dim, 0)[rows] for g in (a, b))
            floor = 1e-9 * largest(a[a.isfinite()])  # what is not finite belongs to its row
            if not torch.allclose(mine, again, rtol=1e-6, atol=floor, equal_nan=True):
                return False
    return True


def _found_by_values(call: Call) -> Found:
    """Finds the layouts by running the function again, on a batch that grows and on other values."""
    if not is_trusted(call.func) and not call.flows:  # data, which no gradient depends on
        return [hint or call.scope.constant() for hint in call.hints], False
    owners = [layout for _, layout in call.with_samples if isinstance(layout, Owners)]
    kinds = {type(layout) for _, layout in call.with_samples}
    if owners and (len(kinds) > 1 or any(la.owner is not owners[0].owner for la in owners)):
        return "moves samples in an unknown way", False
    layouts = _by_growth(call)
    if isinstance(layouts, str):
        told = _by_other_values(call) if call.flows else None
        return (layouts, False) if told is None else (told, True)
    if _values_stay_apart(call, layouts):
        return layouts, True
    return _MIXES, True


def _by_other_values(call: Call) -> list[Layout] | None:
    """Returns the only layouts whose other rows stay if some samples change; None without such.

    For a function that takes no further sample, such as one of a constant with a row for each sample.
    """
    given = [layout for _, layout in call.with_samples]
    allowed = [candidates(t, given, call.scope) for t in call.outputs]
    for before, after, mask in runs(call):
        if len(before) != len(after) or not all(allowed):
            return None
        allowed = [
            [layout for layout in layouts if others_stay(a, b, layout, mask)]
            for a, b, layouts in zip(before, after, allowed, strict=True)
        ]
    return [layouts[0] for layouts in allowed] if {*map(len, allowed)} == {1} else None


def _by_moves(call: Call, why_not: str) -> list[Layout] | None:
    """Returns the layouts after a function that only moves the elements of its one tensor, such as `rot90`.

    The gradients of torch's own functions move back, unless the graph has shown that samples meet there; the
    gradients of views always do.
    """
    if len(call.tensors) != 1:
        return None
    if call.flows:
        is_view = all(internals.base_of(t) is not None for t in call.outputs)
        if call.is_of_weights or not is_own(call.func) or (why_not == _MIXES and not is_view):
            return None
    if call.name.startswith("_"):
        return (
            None  # private operators, such as _convert_indices_from_coo_to_csr, trust their values
        )
    (t,), (layout,) = call.tensors, call.layouts
    assert isinstance(layout, Samples | Owners)

    def moved(numbers: Tensor) -> list[Tensor]:
        args, kwargs = internals.pytree.tree_map(
            lambda value: numbers if value is t else value, (call.args, call.kwargs)
        )
        return tensors_in(call.func(*args, **kwargs))

    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices_of(call)):
            return layouts_after_moves(moved, t, layout, call.outputs)
    except (RuntimeError, ValueError, IndexError):  # the function refuses these values
        return None


def _values_stay_apart(call: Call, layouts: Sequence[Layout]) -> bool:
    """Whether other values in a subset of the samples change no row of another sample."""
    for before, after, mask in runs(call):
        if len(before) != len(after):
            return False
        for a, b, layout in zip(before, after, layouts, strict=True):
            if not others_stay(a, b, layout, mask):
                return False
    return True


def _first_line(error: Exception) -> str:
    text = str(error).split("\n")[0]
    return f"{type(error).__name__} ({text})"


def _by_growth(call: Call) -> list[Layout] | str:
    """Guesses the layouts from the dimensions that grow with the batch; the reason if there are none."""
    grown = _probe(call)
    if isinstance(grown, str):
        return grown
    found = [_layout(call, t, dims) for t, dims in zip(call.outputs, grown, strict=True)]
    for layout in found:
        if isinstance(layout, str):
            return layout
    return found  # type: ignore[return-value]


def _layout(call: Call, output: Tensor, grown: list[int] | None) -> Layout | str:
    if grown is None or len(grown) > 1:
        return "moves samples in an unknown way"
    if not grown:
        return "mixes the samples of the batch"
    (dim,) = grown
    size = output.shape[dim]
    for _, layout in call.with_samples:
        if layout.size == size:
            return layout.at(dim)
    if size % call.scope.count or any(isinstance(la, Owners) for _, la in call.with_samples):
        return f"{_UNKNOWN}: a dimension is not a multiple of the batch size"
    return call.scope.samples(dim, 1, size // call.scope.count)


def _signature(call: Call) -> Signature | None:
    """Returns the signature of a call; None if a probe may depend on tensor values and cannot be cached."""

    def describe_tensor(t: Tensor, parts: list[Any]) -> bool:
        layout = call.layout(t)
        parts += t.shape, t.dtype, layout.key, t.requires_grad
        # Integers may be indices, and a sparse tensor has some.
        is_numbers = t.is_floating_point() or t.is_complex()
        return layout.key is not None and is_numbers and t.layout is torch.strided

    if not is_trusted(call.func):
        return None
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


# Not nested: a nested function that calls itself would hold itself, and the tensors of the call.
def _grown(call: Call, value: Any, more: int) -> Any:
    """Returns an argument for a batch with `more` additional samples; tensors are on the meta device."""
    count = call.scope.count
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
        return tuple(_grown(call, v, more) for v in value)
    return value


def _shapes(call: Call, more: int) -> list[torch.Size]:
    """Returns the shapes of the outputs for a batch with `more` additional samples."""
    args = _grown(call, call.args, more)
    kwargs = {k: _grown(call, v, more) for k, v in call.kwargs.items()}
    with torch.no_grad():
        return [t.shape for t in tensors_in(call.func(*args, **kwargs))]


def _repeated(call: Call, value: Any) -> Any:
    """Returns an argument with the last sample repeated."""
    count = call.scope.count
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
        return tuple(_repeated(call, v) for v in value)
    return value


def _trial(call: Call) -> list[list[int] | None] | str:
    """Probes a function that cannot run on meta tensors, such as one of numpy.

    Runs it on real values, with the last sample repeated.
    """
    try:
        with torch.no_grad(), torch.random.fork_rng():
            kwargs = {k: _repeated(call, v) for k, v in call.kwargs.items()}
            found = tensors_in(call.func(*_repeated(call, call.args), **kwargs))
    except Exception as error:  # as in `_probe`
        return f"{_UNKNOWN}: with one more sample it raises {_first_line(error)}"
    if len(found) != len(call.outputs):
        return "returns a number of tensors that depends on values"
    grown = [_differing(t.shape, more.shape) for t, more in zip(call.outputs, found, strict=True)]
    for t, more, dims in zip(call.outputs, found, grown, strict=True):
        if dims is not None and len(dims) == 1 and not _extends(more, t, _layout(call, t, dims)):
            return _MIXES
    return grown


def _extends(more: Tensor, t: Tensor, layout: Layout | str) -> bool:
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
