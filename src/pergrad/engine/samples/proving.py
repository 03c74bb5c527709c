"""Proves on the autograd graph that a result keeps the samples apart, whatever functions made it.

Row n of the result may depend on row n of the tensors behind it, and on no other. Output gradients that are
zero but for a subset of the samples are pulled back: whatever reaches a row of another sample must be exactly
zero. This is how a function is judged that no table can know: an autograd.Function, a custom operator, or a
tensor that was made out of sight (a scripted function, `torch.vmap`, numpy).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations, islice
from math import comb
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from pergrad.engine.samples.layouts import Layout, Owners, Samples, Scope, after_reshape
from pergrad.errors import MixedSamplesError
from pergrad.runtime import internals
from pergrad.runtime.caches import cached
from pergrad.runtime.tolerances import largest, tolerance_of_rerun

__all__ = [
    "Source",
    "candidates",
    "is_source",
    "is_total",
    "keeps_apart",
    "note",
    "note_on",
    "proved",
    "sources_of",
    "subsets",
]

# A tensor, or its place in the graph, behind a result; and where its samples are.
Source: TypeAlias = tuple[Tensor | GradientEdge, Samples | Owners]
# "thin": apart, but no gradient reached some sample, so that other values may show more.
Verdict: TypeAlias = Literal["apart", "thin", "mixed", "unknown"]

APART: tuple[Verdict, ...] = ("apart", "thin")
_Pulled: TypeAlias = tuple[Tensor, Sequence[Tensor | None]]
_KEY = "pergrad"  # in the metadata of an autograd node


@cached("families of subsets that separate all samples, by their number", most=100)
def subsets(count: int) -> Tensor:
    """Returns masks (k, count) such that for all m ≠ n some mask has m and not n, with the fewest rows k.

    Sample n is in the masks of the n-th subset of size ⌊k/2⌋ of k: none of these contains another.

    >>> subsets(3).int().tolist()
    [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    """
    k = 1
    while comb(k, k // 2) < count:
        k += 1
    masks = torch.zeros(k, count, dtype=torch.bool)
    for n, rows in enumerate(islice(combinations(range(k), k // 2), count)):
        masks[list(rows), n] = True
    return masks if count > 1 else masks[:0]


def note(
    t: Tensor, layout: Layout, shape: torch.Size | None = None, *, is_packed: bool = False
) -> None:
    """Notes on the autograd node of `t`, the result of a use of a weight, where the samples are.

    The layout is that of `t`, or, if `t` is the base of the result, of the result with its `shape`. Inside of
    a checkpoint saved tensors are packed, and only the recorder may unpack them.
    """
    if t.grad_fn is not None:
        held = None if shape is None else t.shape
        note_on(t.grad_fn, t.output_nr, layout, shape, held, is_packed=is_packed)


def note_on(
    node: Any,
    place: int,
    layout: Layout,
    shape: torch.Size | None = None,
    held: torch.Size | None = None,
    *,
    is_packed: bool = False,
) -> None:
    """Notes on an output of a node what `note` does on that of a tensor; `held` is the base's shape."""
    node.metadata[_KEY, place] = layout, shape, held, is_packed


def sources_of(t: Tensor, scope: Scope) -> tuple[list[Source] | None, bool]:
    """Finds the uses of weights that `t` depends on, and whether a checkpoint has packed one of them.

    None if one of them has lost its samples.
    """
    any_packed = False
    found: list[Source] = []
    seen: set[tuple[Any, int]] = set()
    todo: list[tuple[Any, int]] = [(t.grad_fn, t.output_nr)]
    while todo:
        node, place = todo.pop()
        if node is None or (node, place) in seen:
            continue
        seen.add((node, place))
        noted = node.metadata.get((_KEY, place))
        if noted is None or noted[0].scope is not scope:
            todo += node.next_functions
            continue
        layout, shape, held, is_packed = noted
        any_packed = any_packed or is_packed
        if shape is not None and isinstance(layout, Samples | Owners):
            layout = after_reshape(layout, shape, held)
        if not isinstance(layout, Samples | Owners):
            return None, any_packed
        found.append((GradientEdge(node, place), layout))
    return found, any_packed


def is_source(node: Any, place: int, scope: Scope) -> bool:
    """Whether an output of an autograd node is the result of a use of a weight."""
    noted = node.metadata.get((_KEY, place))
    return noted is not None and noted[0].scope is scope


def candidates(t: Tensor, layouts: Sequence[Samples | Owners], scope: Scope) -> list[Layout]:
    """Lists the layouts that the shape of a result allows, those of the tensors behind it first."""
    found: list[Layout] = []
    for layout in layouts:
        dims = [layout.dim, *(d for d in range(t.dim()) if d != layout.dim)]
        found += [layout.at(d) for d in dims if d < t.dim() and t.shape[d] == layout.size]
    for d, size in enumerate(t.shape):
        if size and size % scope.count == 0:
            times = size // scope.count
            found += [scope.samples(d, 1, times), scope.samples(d, times, 1)]
    return [layout for k, layout in enumerate(found) if layout not in found[:k]]


def proved(
    t: Tensor, sources: Sequence[Source], scope: Scope, hint: Layout | None = None
) -> tuple[Layout | None, Verdict]:
    """Returns the layout of a result that is proved on its graph, or None, and the verdict.

    `hint` is tried first, and taken if it holds; of other layouts exactly one must hold.
    """
    pulled = _pulled_back(t, sources, scope)  # the same for all layouts
    if hint is not None:
        verdict = keeps_apart(t, hint, sources, pulled)
        if verdict in APART:
            return hint, verdict
    found: list[tuple[Layout, Verdict]] = []
    verdicts: set[Verdict] = set()
    for allowed in candidates(t, [layout for _, layout in sources], scope):
        verdict = keeps_apart(t, allowed, sources, pulled)
        verdicts.add(verdict)
        if verdict in APART:
            found.append((allowed, verdict))
    if len(found) == 1 or (found and not t.numel()):  # without elements, any of them is right
        return found[0]
    return None, "mixed" if verdicts == {"mixed"} else "unknown"


def _pulled_back(t: Tensor, sources: Sequence[Source], scope: Scope) -> _Pulled | None:
    """Returns a random output gradient of `t`, and what it gives at the tensors behind; None without any."""
    if not sources:
        return None
    behind: Any = [edge for edge, _ in sources]
    with _undisturbed(t, scope):
        direction = torch.randn_like(t.detach())
        try:
            found = torch.autograd.grad(t, behind, direction, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise MixedSamplesError(
                "samples may meet inside of a checkpoint with use_reentrant=True, or leave it in another "
                "order, and its graph cannot be looked into: pass use_reentrant=False to "
                "torch.utils.checkpoint"
            ) from None
        return direction, found


def keeps_apart(
    t: Tensor, layout: Layout, sources: Sequence[Source], pulled: _Pulled | None = None
) -> Verdict:
    """Says whether the rows of `t`, by this layout, depend on no row of another sample.

    The backward must be linear, too: `g / g.norm()` keeps rows of zeros, and still mixes the samples.
    `pulled`: see `_pulled_back`.
    """
    if not isinstance(layout, Samples | Owners):
        return "unknown"
    if not sources:
        return "thin"
    behind: Any = [edge for edge, _ in sources]
    owners = [la.owner_of_each(t.device) for _, la in sources]
    reached = [torch.zeros(layout.scope.count, dtype=torch.bool, device=t.device) for _ in sources]
    mine = _spread(layout.owner_of_each(t.device), layout.dim, t.dim())
    pulled = pulled or _pulled_back(t, sources, layout.scope)
    assert pulled is not None
    direction, whole = pulled
    with _undisturbed(t, layout.scope):
        masks = subsets(layout.scope.count).to(t.device)
        parts: list[Tensor | None] = [None] * len(whole)
        is_certain = True
        for mask in masks:
            found: Sequence[Tensor | None] = torch.autograd.grad(
                t, behind, direction * mask[mine], retain_graph=True, allow_unused=True
            )
            parts = [_added(a, b) for a, b in zip(parts, found, strict=True)]
            for g, full, (_, la), owner, seen in zip(
                found, whole, sources, owners, reached, strict=True
            ):
                if g is None or full is None:
                    continue
                rows = _rows_of(g, la)
                is_zero = (rows == 0).all(1)
                # A number that is not finite makes its own row so, whatever the mask.
                is_excused = ~rows.isfinite().all(1) & ~_rows_of(full, la).isfinite().all(1)
                is_certain = is_certain and not bool(is_excused.any())
                if not bool((is_zero | mask[owner] | is_excused).all()):
                    return "mixed"
                seen[owner[~is_zero]] = True
        for g, part in zip(whole, parts, strict=True):
            if g is not None and is_certain and not _is_near(part, g * (len(masks) // 2)):
                return "mixed"
    is_full = is_certain and all(bool(seen.all()) for seen in reached)
    return "apart" if is_full else "thin"


def _rows_of(g: Tensor, layout: Samples | Owners) -> Tensor:
    """Returns the rows of the sample dimension, flat."""
    return g.movedim(layout.dim, 0).flatten(1) if g.dim() > 1 else g.reshape(-1, 1)


def _added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _is_near(a: Tensor | None, b: Tensor) -> bool:
    """Whether two sums of the same terms are equal up to rounding; None is zero."""
    a = torch.zeros_like(b) if a is None else a
    tolerance = tolerance_of_rerun(b.dtype)
    return largest(a - b) <= tolerance * max(largest(b), largest(a))


def is_total(t: Tensor, sources: Sequence[Source]) -> bool:
    """Whether `t` is a sum over samples: its gradient at one sample does not depend on another.

    That is so if the gradient, as a function of the tensors behind, keeps the samples apart.
    """
    if not sources or _leaves_torch(
        t, {edge.node for edge, _ in sources if isinstance(edge, GradientEdge)}
    ):
        return False
    with _undisturbed(t, sources[0][1].scope):
        direction = torch.randn_like(t.detach()).requires_grad_()
        behind: Any = [edge for edge, _ in sources]
        found: Sequence[Tensor | None] = torch.autograd.grad(
            t, behind, direction, retain_graph=True, create_graph=True, allow_unused=True
        )
        return all(
            g is None or (g.requires_grad and keeps_apart(g, layout, sources) in APART)
            for g, (_, layout) in zip(found, sources, strict=True)
        )


def _leaves_torch(t: Tensor, ends: set[Any]) -> bool:
    """Whether a function of Python or of an extension is in the graph: its derivatives prove nothing."""
    seen: set[Any] = set()
    todo: list[Any] = [t.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen or node in ends:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction) or "CppNode" in node.name():
            return True
        todo += [before for before, _ in node.next_functions]
    return False


def _spread(owner: Tensor, dim: int, rank: int) -> Tensor:
    """Reshapes the owners of a dimension so that they broadcast against the tensor."""
    return owner.view([-1 if d == dim else 1 for d in range(rank)])


@contextmanager
def _undisturbed(t: Tensor, scope: Scope) -> Iterator[None]:
    """Runs a probe that nobody notices: no mode sees it, nothing is recorded, the random state stays."""
    devices = [t.device] if t.is_cuda else []
    with (
        internals.DisableTorchFunction(),
        scope.pulling_back(),
        torch.random.fork_rng(devices=devices),
    ):
        yield
