"""Represents weights: recorded parameters (roots) and tensors derived from them.

Every weight takes factors. A root passes them to the sink. A transposed or cast weight transforms them and
passes them to its parent. Any other derived weight materialises them as the gradient of its `carrier`, a
tensor of shape (n, *shape) without storage; its position in the autograd graph sets the order.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from pergrad.distributed.placing import is_sharded, spread_rows
from pergrad.engine.collecting.kept_gradients import KeptGradients
from pergrad.engine.collecting.ledger import Sink, UseCounter
from pergrad.engine.samples.layouts import Key, Scope
from pergrad.engine.samples.tags import Tag
from pergrad.errors import PergradError, UnseenUseError
from pergrad.factors import Dense, Factor
from pergrad.runtime import internals, without_autocast

__all__ = [
    "Derived",
    "LateView",
    "Root",
    "Transformed",
    "Weight",
    "carriers_of",
    "graph_of_its_own",
    "quiet_vmap",
    "quoted",
    "refuse_ordinary_gradients",
    "refusing_ordinary_gradients",
    "vjp_of_each",
]


class Weight(Tag):
    """Represents a tensor that all samples share and that has a gradient per sample."""

    has_samples: ClassVar[bool] = False
    is_weight: ClassVar[bool] = True
    key: ClassVar[Key] = ("weight",)
    is_view = False  # whether it shares memory with the weight that it comes from
    views_parameter = False  # whether that memory is a parameter's
    may_hook = False  # whether taps may be hooks: nothing flows on, and no pass skips them
    counted: tuple[str, ...] = ()  # parameters whose uses it counts for
    beside = ""  # a function behind it, and what it got whose samples may be out of sight
    _writes: list[None] | None = (
        None  # one entry for each write to its memory; views share the list
    )
    _seen = 0  # the number of writes before it was made

    def __init__(
        self,
        scope: Scope,
        roots: tuple[str, ...],
        value: Tensor,
        uses: UseCounter,
        sink: Sink,
        anchor: Tensor,
    ) -> None:
        self.scope = scope
        self.roots = roots  # names of the parameters that it is, or is derived from
        self.name = roots[0] if len(roots) == 1 else " and ".join(roots)
        self.value = value.detach()
        self.operand = (
            self.value
        )  # what functions get; attached to the parameter if it keeps its `.grad`
        self.uses = uses
        self.sink = sink
        self.anchor = anchor  # an input of its taps in the graph; `take` returns its gradient

    @property
    def is_stale(self) -> bool:
        """Whether the weight that it is a view of was written to in place since."""
        return self._writes is not None and len(self._writes) != self._seen

    def view(self, other: Weight) -> None:
        """Declares that its value is a view of another weight's."""
        self.is_view = True
        self.views_parameter = isinstance(other, Root) or other.views_parameter
        if other._writes is None:
            other._writes = []
        self._writes, self._seen = other._writes, len(other._writes)

    def write(self) -> None:
        """Declares that its memory was written to: its views are stale."""
        if self._writes is None:  # it has no views
            return
        self._writes.append(None)
        self._seen += 1

    @property
    def carrier(self) -> Tensor:
        """Tensor (n, *shape) without storage; its gradient is the per-sample gradient of this weight."""
        raise NotImplementedError

    def take(self, factor: Factor) -> Tensor | None:
        """Takes the factor of one use; returns the gradient of the anchor."""
        raise NotImplementedError

    @property
    def keeps_gradient(self) -> bool:
        """Whether autograd computes the ordinary gradient as well."""
        return self.operand is not self.value

    def _empty_carrier(self) -> Tensor:
        # Not `value.new_zeros`, which would be sparse for a sparse value.
        empty = torch.zeros((), dtype=self.value.dtype, device=self.value.device)
        return empty.expand(self.scope.count, *self.value.shape)


class Root(Weight):
    """Represents a recorded parameter."""

    is_stale = False  # nothing writes to it
    _carrier: Tensor | None = None

    def __init__(
        self,
        scope: Scope,
        name: str,
        parameter: Tensor,
        uses: UseCounter,
        sink: Sink,
        anchor: Tensor,
    ) -> None:
        # Not by `super`: one is made for each parameter in every step.
        self.scope, self.uses, self.sink, self.anchor = scope, uses, sink, anchor
        self.roots = self.counted = (name,)
        self.name = name
        self.value = self.operand = parameter.detach()
        self.may_hook = sink.passes == 1  # earlier passes run only nodes that lead to anchors

    @property
    def carrier(self) -> Tensor:
        if self._carrier is None:
            self.uses.expect([self])
            self._carrier = _Arrive.apply(self.sink, self.name, self._empty_carrier(), self.anchor)
        return self._carrier

    def take(self, factor: Factor) -> Tensor | None:
        self.sink.add(self.name, factor)
        return None


class Transformed(Weight):
    """Represents a lazily transformed weight, such as a transpose; `back` maps factors to its parent's."""

    def __init__(self, parent: Weight, value: Tensor, back: Callable[[Factor], Factor]) -> None:
        super().__init__(parent.scope, parent.roots, value, parent.uses, parent.sink, parent.anchor)
        if value is parent.value or internals.base_of(value) is not None:
            self.view(parent)
        self.may_hook = parent.may_hook
        self.counted = parent.counted
        self._parent = parent
        self._back = back

    @property
    def carrier(self) -> Tensor:
        return _Back.apply(self, self._parent.carrier)

    def take(self, factor: Factor) -> Tensor | None:
        return self._parent.take(self._back(factor))

    def pull_back(self, gradients: Tensor) -> Tensor:
        return self._back(Dense(gradients)).materialize()


class Derived(Weight):
    """Represents any other function of weights and constants; gradients flow to its parents' carriers."""

    @property
    def carrier(self) -> Tensor:
        return self.anchor

    def take(self, factor: Factor) -> Tensor | None:
        rows = factor.materialize().to(self.value.dtype)
        return spread_rows(rows, self.value) if is_sharded(self.value) else rows


class LateView(Weight):
    """Represents a view of a tensor into which a weight was written after the view was taken."""

    is_view = True
    is_stale = True

    def __init__(self, behind: Weight, value: Tensor) -> None:
        parts = behind.scope, behind.roots, value, behind.uses, behind.sink, behind.anchor
        super().__init__(*parts)


class _Arrive(torch.autograd.Function):
    """Makes the carrier of a root; its gradient goes to the sink."""

    @staticmethod
    def forward(ctx: Any, sink: Sink, name: str, empty: Tensor, anchor: Tensor) -> Tensor:
        ctx.sink, ctx.name = sink, name  # not the root, which holds this carrier: a cycle
        return empty

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[None, None, None, None]:
        with internals.DisableTorchFunction(), without_autocast(gradients.device):
            ctx.sink.add(ctx.name, Dense(gradients))
        return None, None, None, None


class _Back(torch.autograd.Function):
    """Makes the carrier of a transformed weight from its parent's."""

    @staticmethod
    def forward(ctx: Any, weight: Transformed, parent: Tensor) -> Tensor:
        ctx.weight = weight
        return weight._empty_carrier()

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[None, Tensor]:
        with internals.DisableTorchFunction(), without_autocast(gradients.device):
            return None, ctx.weight.pull_back(gradients)


class _PullBack(torch.autograd.Function):
    """Makes the carriers of derived weights from those of their parents.

    Tensors that are no weights may follow the parents: they get the gradient of the whole batch.
    """

    @staticmethod
    def forward(
        ctx: Any,
        outputs: Sequence[Tensor],
        leaves: Sequence[Tensor],
        count: int,
        parents: int,
        *parents_and_others: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.parents = parents
        ctx.outputs, ctx.leaves, ctx.count = outputs, leaves, count
        ctx.set_materialize_grads(False)
        # Not `t.new_zeros`, which would be sparse for sparse outputs.
        empty = [torch.zeros((), dtype=t.dtype, device=t.device) for t in outputs]
        return tuple(e.expand(count, *t.shape) for e, t in zip(empty, outputs, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        reached = [(t, g) for t, g in zip(ctx.outputs, gradients, strict=True) if g is not None]
        with internals.DisableTorchFunction():
            pulled = vjp_of_each(
                [t for t, _ in reached], [g.to(t.dtype) for t, g in reached], ctx.leaves, ctx.count
            )
        own, others = pulled[: ctx.parents], pulled[ctx.parents :]
        summed = [None if g is None else g.sum(0) for g in others]
        return None, None, None, None, *own, *summed


def _unchanged(saved: tuple[Tensor, int]) -> Tensor:
    """Returns a saved tensor; with hooks of saved tensors, autograd does not look at versions itself."""
    t, version = saved
    if not t.is_inference() and internals.version_of(t) != version:
        raise PergradError(
            f"a tensor of shape {tuple(t.shape)} was changed in place after a function of a weight used it, "
            "but the gradients need its old value: change a copy of it"
        )
    return t


def graph_of_its_own(kept: Sequence[Tensor] = ()) -> torch.autograd.graph.saved_tensors_hooks:
    """Keeps the hooks of a checkpoint out of a small graph that the engine makes for itself.

    A node that saves its own output would hold itself: saved tensors must not have the node. Only the tensors
    `kept` are saved as they are, for a backward that differentiates by them.
    """
    own = {id(t) for t in kept}

    def pack(t: Tensor) -> tuple[Tensor, int]:
        version = 0 if t.is_inference() else internals.version_of(t)
        return t if id(t) in own else t.detach(), version

    return torch.autograd.graph.saved_tensors_hooks(pack, _unchanged)


@contextmanager
def quiet_vmap() -> Iterator[None]:
    """Silences vmap's warnings about functions that it runs as a loop, which is slow but correct."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def vjp_of_each(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    leaves: Sequence[Tensor],
    count: int,
    *,
    may_batch: bool = True,
) -> list[Tensor | None]:
    """Computes the vector-Jacobian products of all samples: (n, *output) to (n, *leaf) gradients."""
    if may_batch and not any(map(is_sharded, (*outputs, *leaves))):
        try:
            with quiet_vmap():
                found: list[Tensor | None] = internals.batched_gradients(
                    outputs, leaves, gradients, count
                )
            return found
        except RuntimeError as error:  # a function has no batching rule
            error.__traceback__ = None  # its frames hold the tensors
    each = [
        torch.autograd.grad(
            outputs, leaves, [g[n] for g in gradients], retain_graph=True, allow_unused=True
        )
        for n in range(count)
    ]
    return [None if of[0] is None else torch.stack(of) for of in zip(*each, strict=True)]


def carriers_of(
    outputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    parents: Sequence[Weight],
    others: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:
    """Makes carriers for `outputs`, which autograd computed from `leaves`.

    The leaves are the values of `parents`, then those of `others`.
    """
    count, carriers = parents[0].scope.count, [p.carrier for p in parents]
    return _PullBack.apply(outputs, leaves, count, len(parents), *carriers, *others)


_KEYS = itertools.count(-1, -1)  # negative, since torch's own handles have positive ids


def _never() -> bool:
    return False


def _refuse(
    name: str,
    is_allowed: Callable[[], bool],
    kept: KeptGradients | None,
    gradient: Tensor,
) -> None:
    if is_allowed() or (kept is not None and kept.has_made(name, gradient)):
        return
    raise _unseen_use((name,))


def _refuse_derived(
    roots: Sequence[str], beside: str, is_allowed: Callable[[], bool], gradient: Tensor
) -> None:
    if is_allowed():
        return
    if not beside:
        raise _unseen_use(roots)
    raise UnseenUseError(
        f"{beside} beside {quoted(roots)}, and its samples are unknown: the recorder cannot follow "
        "samples through `tolist`, numpy, sparse tensors or `unique`, so that one gradient came, "
        "summed over the batch; pass this tensor to the module as an argument, compute it from the "
        "inputs by other functions of torch, or call pergrad.grads or pergrad.norms with the loss "
        "function"
    )


def _unseen_use(roots: Sequence[str]) -> UnseenUseError:
    return UnseenUseError(
        f"an ordinary gradient, summed over the batch, reached {quoted(roots)}: a function used it "
        "out of sight of the recorder (C++ code, or a graph built before the recording began); freeze "
        "the parameter, or write the function in torch and register a rule for it with "
        "@pergrad.implements_per_sample_grads"
    )


def quoted(roots: Sequence[str]) -> str:
    """Writes "parameter 'a'", or "parameters 'a' and 'b'".

    >>> quoted(["weight", "bias"])
    "parameters 'weight' and 'bias'"
    """
    return f"parameter{'s' * (len(roots) > 1)} {' and '.join(map(repr, roots))}"


def refuse_ordinary_gradients(
    t: Tensor, roots: Sequence[str], is_allowed: Callable[[], bool] = _never, beside: str = ""
) -> None:
    """Makes an ordinary gradient for a recorded tensor an error, unless it is allowed just then."""
    t.register_hook(functools.partial(_refuse_derived, roots, beside, is_allowed))


class refusing_ordinary_gradients:  # noqa: N801  # a context manager, as in contextlib
    """Makes an ordinary gradient for a parameter an error within the block, unless it is allowed.

    With `kept`, only one that does not come from recorded uses alone.
    """

    __slots__ = ("_is_allowed", "_kept", "_key", "_parameters")

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        is_allowed: Callable[[], bool] = _never,
        kept: KeptGradients | None = None,
    ) -> None:
        self._kept = kept
        self._parameters = parameters
        self._is_allowed = is_allowed
        self._key = next(_KEYS)

    def __enter__(self) -> None:
        hooks_of, key = internals.hooks_of, self._key
        for name, p in self._parameters.items():
            hooks = hooks_of(p)
            if hooks is None:
                p.register_hook(_refuse).remove()  # creates the dict of hooks
                hooks = hooks_of(p)
            # Like `register_hook` without a handle: handles double the time.
            hooks[key] = functools.partial(_refuse, name, self._is_allowed, self._kept)

    def __exit__(self, *_: object) -> None:
        hooks_of, key = internals.hooks_of, self._key
        for p in self._parameters.values():
            hooks = hooks_of(p)
            if hooks is not None:
                hooks.pop(key, None)
