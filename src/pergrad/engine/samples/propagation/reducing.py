"""Propagates layouts through functions along dimensions: reductions, scans and sorts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pergrad.engine.samples.layouts import Layout, Owners, Samples
from pergrad.engine.samples.propagation.elementwise import aligned
from pergrad.engine.samples.propagation.table import Call, moves_samples
from pergrad.engine.samples.propagation.totals import counted, origin_of

__all__: list[str] = []

# The position of `dim` in functions where it is not the second argument, and its default.
_POSITION = {"topk": 2, "kthvalue": 2, "norm": 2, "vector_norm": 2, "normalize": 2, "diff": 2}
_DEFAULT = {"normalize": 1, "diff": -1}
_SOFTMAXES = frozenset("softmax log_softmax softmin".split())
_SUMS = frozenset("sum nansum mean nanmean".split())
_LAST_BY_DEFAULT = frozenset(
    """
    sort argsort msort topk kthvalue mode glu softmax log_softmax softmin gumbel_softmax
    """.split()
)


def _dims(call: Call, rank: int) -> list[int] | None:
    """Returns the dimensions that a call works along; None for all."""
    default = -1 if call.name in _LAST_BY_DEFAULT else _DEFAULT.get(call.name)
    dim = call.argument(_POSITION.get(call.name, 1), "dim", "axis", default=default)
    if dim is None or isinstance(dim, bool):
        return None if default is None else [default % rank]
    dims = [dim] if isinstance(dim, int) else list(dim)
    return [d % rank for d in dims] if dims else None


def _input(call: Call) -> tuple[Tensor, Layout]:
    t = call.argument(0, "input", "self")
    return t, call.layout(t)


@moves_samples(*"sum nansum mean nanmean amax amin prod std var logsumexp norm vector_norm".split())
@moves_samples(*"argmax argmin all any median nanmedian count_nonzero".split())
@moves_samples(*"max min std_mean var_mean aminmax kthvalue mode".split())
def _reduce(call: Call) -> Layout | None:
    t, layout = _input(call)
    if isinstance(call.argument(1, "other"), Tensor):
        return aligned(call)  # torch.max(a, b)
    if not isinstance(layout, Samples | Owners):
        return layout
    dims = _dims(call, t.dim())
    if dims is None or layout.dim in dims:
        if not call.flows:
            return counted(call, t, layout)
        return call.total(origin_of(call)) if call.name in _SUMS else call.mixed()
    if call.output.dim() == t.dim():
        return layout
    return layout.at(layout.dim - sum(d < layout.dim for d in dims))


@moves_samples(*"softmax log_softmax softmin gumbel_softmax cumsum cumprod cummax cummin".split())
@moves_samples(*"logcumsumexp glu normalize diff".split())
def _scan(call: Call) -> Layout | None:
    t, layout = _input(call)
    if not isinstance(layout, Samples | Owners):
        return layout
    dims = _dims(call, t.dim())
    if call.name in _SOFTMAXES and call.argument(1, "dim") is None:
        dims = [0 if t.dim() in (0, 1, 3) else 1]  # the default of torch.nn.functional
    if dims is None:
        return None
    return call.mixed() if layout.dim in dims else layout


@moves_samples("renorm")
def _renorm(call: Call) -> Layout:
    """Keeps the layout if `dim` is the sample dimension: each slice along `dim` is scaled independently."""
    t, layout = _input(call)
    if not isinstance(layout, Samples | Owners):
        return layout
    return layout if call.argument(2, "dim") % t.dim() == layout.dim else call.mixed()


@moves_samples("sort", "argsort", "msort", "topk", by_value=True)
def _sort(call: Call) -> Layout | Sequence[Layout] | None:
    """Sorts the owners with the values of a vector over the samples, as in mixtures of experts."""
    t, layout = _input(call)
    if not isinstance(layout, Samples | Owners):
        return layout
    dims = [0] if call.name == "msort" else _dims(call, t.dim())
    if dims is None:
        return None
    if layout.dim not in dims:
        return layout
    if t.dim() > 1 or call.name == "msort":
        return call.mixed()
    order = call.outputs[-1]  # sort and topk return (values, indices), argsort only indices
    return call.scope.owners(0, layout.owner_of_each(t.device)[order])


@moves_samples("unique", "unique_consecutive", "bincount", "histc", "item", "tolist", "_unique2")
def _statistics(call: Call) -> Layout:
    return call.scope.constant()
