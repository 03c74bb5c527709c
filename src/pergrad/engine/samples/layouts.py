"""Describes where the samples are in a tensor: `Samples`, `Owners`, `Constant` or `Lost`.

The recorder tags each tensor with one of these. A layout belongs to one scope, so that tags of another
recorder, step or thread have no meaning here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from pergrad.engine.samples.origins import How, Origin
from pergrad.engine.samples.tags import Tag
from pergrad.runtime import is_traced

__all__ = [
    "ROWS",
    "Constant",
    "Counted",
    "Key",
    "Layout",
    "Lost",
    "Owners",
    "Samples",
    "Scope",
    "Unfinished",
    "Why",
    "after_reshape",
    "samples_back",
    "samples_first",
]

# Identifies a layout independently of its scope. None for layouts that a small key cannot describe.
Key: TypeAlias = tuple[int | str, ...] | None

ROWS: Key = (0, 1, 1)  # one row per sample

# Why samples cannot be separated any more. A gradient through "mixed" or "unknown" is an error. The elements
# of a "cut" tensor were only moved, those of a "total" only summed over samples, as in a loss: each term has
# still a gradient of its own, and only combining them with others is an error.
Why: TypeAlias = Literal["total", "cut", "mixed", "unknown"]


@dataclass(eq=False)
class Scope:
    """Identifies one recording of `count` samples and makes the layouts of its tensors."""

    count: int
    is_pulling_back: bool = (
        False  # while the engine itself runs a backward pass: it is not recorded
    )
    may_reach_weights: bool = False  # whether that pass may compute ordinary gradients of weights
    known: list[Tensor] = field(default_factory=list)  # the owners of rows that the user has given
    call: int = 0  # number of calls of the module so far
    reached: set[int] = field(
        default_factory=set
    )  # calls that the present backward pass has reached
    tells_reduction: bool = True  # whether somebody asks if a loss is a sum or a mean
    has_losses: bool = False  # whether row n of the losses, (B,), is known to be that of sample n
    takes_losses: bool = False  # while losses that are given for each sample, (B,), are added up
    # Of means over valid positions: whether samples have different numbers of them. Traced steps look later.
    uneven: list[Tensor] = field(default_factory=list)
    # Of rows that a traced step moves by value: whether a sample gets those of another. Looked at later, too.
    misplaced: list[Tensor] = field(default_factory=list)

    @contextmanager
    def pulling_back(self, *, may_reach_weights: bool = False) -> Iterator[None]:
        """Marks a backward pass of the engine itself, for a proof or for a weight without a rule."""
        was = self.is_pulling_back, self.may_reach_weights
        self.is_pulling_back = True
        self.may_reach_weights = may_reach_weights or self.may_reach_weights
        try:
            yield
        finally:
            self.is_pulling_back, self.may_reach_weights = was

    def samples(self, dim: int, pre: int = 1, post: int = 1) -> Samples:
        return Samples(self, dim, pre, post)

    def owners(self, dim: int, owner: Tensor) -> Samples | Owners:
        if is_traced(owner):
            return Owners(self, dim, owner)
        if len(owner) == self.count and torch.equal(
            owner, torch.arange(self.count, device=owner.device)
        ):
            return self.samples(dim)
        return Owners(self, dim, owner)

    def owned(self, dim: int, owner: Tensor) -> Samples | Owners:
        """Returns the layout of given owners: `Samples` where they repeat the samples in order."""
        times, left = divmod(len(owner), self.count)
        if not left:
            order = torch.arange(self.count, device=owner.device)
            if torch.equal(owner, order.repeat(times)):
                return self.samples(dim, times, 1)
            if torch.equal(owner, order.repeat_interleave(times)):
                return self.samples(dim, 1, times)
        return Owners(self, dim, owner)

    def completed(self, layout: Unfinished) -> Layout:
        """Gives rows without an owner those of a known vector that agrees with all others.

        They are constant, and may count as part of any sample.
        """
        if layout.owner is not None:
            for owner in self.known:
                given = owner.to(layout.owner.device)
                is_like = len(owner) == len(layout.owner)
                if is_like and bool(((layout.owner < 0) | (layout.owner == given)).all()):
                    return self.owned(layout.dim, given)
        return layout

    def constant(self) -> Constant:
        return Constant(self)

    def lost(self, reason: str, why: Why = "cut") -> Lost:
        return Lost(self, reason, why)

    def total(self, reason: str, origin: Origin | None) -> Lost:
        return Lost(self, reason, "total", origin=origin)


@dataclass(slots=True, init=False)  # many are made: a frozen one takes three times as long
class Samples(Tag):
    """Index i of dimension `dim`, of size pre·count·post, belongs to sample (i // post) % count."""

    has_samples: ClassVar[bool] = True
    is_weight: ClassVar[bool] = False
    scope: Scope
    dim: int
    pre: int
    post: int
    key: Key = field(compare=False, repr=False)

    def __init__(self, scope: Scope, dim: int, pre: int = 1, post: int = 1) -> None:
        self.scope, self.dim, self.pre, self.post = scope, dim, pre, post
        self.key = dim, pre, post

    def at(self, dim: int) -> Samples:
        return self if dim == self.dim else self.scope.samples(dim, self.pre, self.post)

    @property
    def size(self) -> int:
        return self.pre * self.scope.count * self.post

    def owner_of_each(self, device: torch.device) -> Tensor:
        """Returns the sample of each index, (size,)."""
        return torch.arange(self.size, device=device) // self.post % self.scope.count


@dataclass(frozen=True, eq=False, slots=True)
class Owners(Tag):
    """Index i of dimension `dim` belongs to sample owner[i], as after indexing by value."""

    has_samples: ClassVar[bool] = True
    is_weight: ClassVar[bool] = False
    key: ClassVar[Key] = None
    scope: Scope
    dim: int
    owner: Tensor  # (size of dim,)
    is_one: bool = False  # whether the whole tensor is known to belong to one sample
    presumed: Tensor | None = (
        None  # indices that no sample has written; a write may give them another owner
    )

    def at(self, dim: int) -> Owners:
        return self if dim == self.dim else Owners(self.scope, dim, self.owner)

    def of_one(self, t: Tensor) -> Owners:
        """Returns the layout of another tensor of the one sample; a scalar counts as one row."""
        return Owners(self.scope, 0, self.owner[:1].expand(t.shape[0] if t.dim() else 1), True)

    @property
    def size(self) -> int:
        return len(self.owner)

    def owner_of_each(self, device: torch.device) -> Tensor:
        return self.owner.to(device)


@dataclass(frozen=True, slots=True)
class Constant(Tag):
    """Marks a tensor that is the same for every sample."""

    has_samples: ClassVar[bool] = False
    is_weight: ClassVar[bool] = False
    key: ClassVar[Key] = ("constant",)
    scope: Scope


@dataclass(frozen=True, slots=True, eq=False)
class Counted(Constant):
    """Marks a scalar of data that adds up parts of the samples, such as a number of valid positions."""

    key: ClassVar[Key] = None
    how: How  # whether the parts are summed or averaged
    summed: Tensor  # the tensor that was reduced
    layout: Samples | Owners  # of that tensor


@dataclass(frozen=True, slots=True)
class Lost(Tag):
    """Marks a tensor whose samples cannot be separated any more, with the reason."""

    has_samples: ClassVar[bool] = False
    is_weight: ClassVar[bool] = False
    key: ClassVar[Key] = None
    scope: Scope
    reason: str
    why: Why = "cut"
    origin: Origin | None = field(default=None, kw_only=True)  # of a total

    @property
    def is_fatal(self) -> bool:
        """Whether a gradient that flows through the tensor is an error."""
        return self.why in ("mixed", "unknown")


@dataclass(frozen=True, slots=True, eq=False)
class Unfinished(Lost):
    """Marks a constant with samples written into part of it: lost until each index has an owner."""

    dim: int = 0
    owner: Tensor | None = None  # -1 for an index without an owner


Layout: TypeAlias = Samples | Owners | Constant | Lost


def samples_first(x: Tensor, layout: Samples | Owners) -> Tensor:
    """Moves the samples to a new first axis: (n, *x.shape), dimension `dim` reduced to the sample's indices.

    With `Owners`, each index becomes a sample; the caller sums them by owner afterwards.
    """
    dim = layout.dim
    if isinstance(layout, Owners) or layout.pre == layout.post == 1:
        return x.unsqueeze(1) if dim == 0 else x.movedim(dim, 0).unsqueeze(dim + 1)
    if layout.pre == 1:
        split = x.view(*x.shape[:dim], layout.scope.count, layout.post, *x.shape[dim + 1 :])
        return split.movedim(dim, 0) if dim else split
    split = x.unflatten(dim, (layout.pre, layout.scope.count, layout.post))
    return split.movedim(dim + 1, 0).flatten(dim + 1, dim + 2)


def samples_back(x: Tensor, layout: Samples) -> Tensor:
    """Inverts `samples_first`: returns the tensor that has that layout."""
    dim = layout.dim
    if layout.pre == 1:
        return x.movedim(0, dim).flatten(dim, dim + 1)
    split = x.unflatten(dim + 1, (layout.pre, layout.post))
    return split.movedim(0, dim + 1).flatten(dim, dim + 2)


def after_reshape(layout: Samples | Owners, old: torch.Size, new: torch.Size) -> Layout:
    """Returns the layout after a reshape from shape `old` to `new`."""
    if old == new:
        return layout
    if isinstance(layout, Owners):
        return _owners_after_reshape(layout, old, new)
    before = prod(old[: layout.dim]) * layout.pre
    after = layout.post * prod(old[layout.dim + 1 :])
    found: Layout | None = None
    left = 1
    for dim, size in enumerate(new):
        right = prod(new[dim + 1 :])
        if left and right and before % left == 0 and after % right == 0:
            pre, post = before // left, after // right
            if pre * layout.scope.count * post == size:
                candidate = layout.scope.samples(dim, pre, post)
                if pre == post == 1:
                    return candidate
                found = found or candidate
        left *= size
    if found is None and layout.scope.count == 1 and len(new) and all(new):
        return layout.scope.samples(
            0, new[0], 1
        )  # there is nothing to cut: all is of the one sample
    return found or layout.scope.lost(
        f"a reshape from {tuple(old)} to {tuple(new)} does not keep the samples in one dimension"
    )


def _owners_after_reshape(layout: Owners, old: torch.Size, new: torch.Size) -> Layout:
    before, size = prod(old[: layout.dim]), old[layout.dim]
    left = 1
    for dim, n in enumerate(new):
        if left == before and n == size:
            return layout.at(dim)
        if not size or not left:
            break  # without elements, nothing tells the dimensions apart
        if (
            left == before
            and n
            and n % size == 0
            and prod(old[layout.dim + 1 :]) % (n // size) == 0
        ):
            return Owners(layout.scope, dim, layout.owner.repeat_interleave(n // size))
        if left == before and 1 < n < size and size % n == 0:
            rows = layout.owner.view(n, -1)
            if is_traced(rows):
                layout.scope.misplaced.append((rows != rows[:, :1]).any())
                return Owners(layout.scope, dim, rows[:, 0])
            if bool((rows == rows[:, :1]).all()):
                return Owners(layout.scope, dim, rows[:, 0])
            if bool((rows == rows[:1]).all()):
                return Owners(layout.scope, dim + 1, rows[0])
        if before % left == 0 and (before // left) * size == n:
            return Owners(layout.scope, dim, layout.owner.repeat(before // left))
        left *= n
    return layout.scope.lost(
        f"a reshape from {tuple(old)} to {tuple(new)} does not keep the samples in one dimension"
    )
