"""Intercepts every torch function of a recording."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError

from pergrad.engine.collecting.hooks import guard_nodes, guarded, lasting_nodes
from pergrad.engine.collecting.journal import Journal
from pergrad.engine.collecting.kept_gradients import KeptGradients
from pergrad.engine.collecting.ledger import Ledger, Sink, UseCounter
from pergrad.engine.intercepting.backward_passes import (
    ReadLoss,
    refuse_gradients_of_weights,
    run_passes,
    run_passes_of_empty_batch,
)
from pergrad.engine.intercepting.composites import (
    CONTROL_FLOW,
    watched,
    without_override_check,
)
from pergrad.engine.intercepting.function_kinds import Kind, kind_of
from pergrad.engine.intercepting.mapping import mapped_over_samples, mapped_over_weights
from pergrad.engine.intercepting.rule_calls import cached_plan, call_by_plan, unsupported
from pergrad.engine.intercepting.tracker import Tracker, is_same_view
from pergrad.engine.intercepting.weight_calls import WeightCalls
from pergrad.engine.intercepting.weights import Root, quoted
from pergrad.engine.samples.layouts import Owners, Samples
from pergrad.engine.samples.propagation import name_of, refuse_lost, tensors_in
from pergrad.engine.samples.propagation.in_place import only_moves, out_of_place
from pergrad.engine.samples.sizes import BatchSize
from pergrad.engine.samples.tags import TAG, leaving_tags_out_of_files
from pergrad.errors import UnsupportedFunctionError
from pergrad.rules import DECLARING, DECOMPOSITIONS, RULES
from pergrad.rules.samples import DECLARED
from pergrad.runtime import internals, is_traced
from pergrad.runtime.containers import parts_of

__all__ = ["Recorder"]

_PASSIVE, _SHAPE, _SIZE = Kind.PASSIVE, Kind.SHAPE, Kind.SIZE
_SET_DATA, _HOOK, _NODE, _TRANSPARENT = Kind.SET_DATA, Kind.HOOK, Kind.NODE, Kind.TRANSPARENT
_BACKWARD, _ORDINARY, _WRITING = Kind.BACKWARD, Kind.ORDINARY, Kind.WRITING
_FOLLOWED = frozenset([_ORDINARY, _WRITING, _TRANSPARENT])
_HARMLESS, _CONTROL_FLOW, _PLACE = Kind.HARMLESS, Kind.CONTROL_FLOW, Kind.PLACE
_REDUCE = Tensor.__reduce_ex__
_MANY_TAGGED = 256  # tensors, above which those that are gone are forgotten after a backward pass
_MOST_EARLIER = 64  # functions; a recording holds their tensors until it begins


def _refuse_in_trace(args: tuple[Any, ...]) -> None:
    """Raises an error where a trace would go on with the values from before `t.data = ...`."""
    if any(isinstance(t, Tensor) and is_traced(t) for t in args):
        raise UnsupportedFunctionError(
            "it assigns to the `.data` of a tensor: write to it in place"
        )


# `__torch_function__` of tensors and of parameters.
_FUNCTIONS = (Tensor.__torch_function__.__func__, nn.Parameter.__torch_function__)  # type: ignore[attr-defined]
_PLAIN_CLASSES = frozenset([Tensor, nn.Parameter, nn.Buffer])  # of which `_is_of_torch` is true


def _is_of_torch(kind: type) -> bool:
    """Whether functions of tensors of a class are torch's own, whatever torch itself makes of them."""
    if not issubclass(kind, Tensor):
        return False
    own = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    return own in _FUNCTIONS or kind.__module__.partition(".")[0] == "torch"


class _Results(TorchFunctionMode):
    """Keeps the results of the functions that a class of the user calls."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self.made += tensors_in(output)
        return output


Earlier: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]
_NO_EARLIER: deque[Earlier] = deque(maxlen=0)  # stays empty, so that all recordings may have it


class Recorder(WeightCalls):
    """Intercepts the functions of one scope; `parameters` are the recorded tensors by name."""

    uses: UseCounter
    read_loss: ReadLoss | None = None  # finds how the loss came to be
    _ledger: Ledger | None  # none for an `ExpandedWeight`, which sees no backward pass

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        journal: Journal | None = None,
        kept: KeptGradients | None = None,
    ) -> None:
        super().__init__()
        self._kept = kept
        self.journal = journal
        self._parameters = parameters  # keeps the ids valid
        self._begun = False
        self._of_empty_batch: Ledger | None = None
        # Begins the recording when a weight is used before the module is called, if the batch is known.
        self.start: Callable[[], None] | None = None
        # The last functions before that, without weights: their results may have samples.
        self.earlier: deque[Earlier] = deque(maxlen=_MOST_EARLIER)
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}  # buffers before the first write to them
        self._nodes: list[Any] = []  # of autograd's graph, that the user has looked at

    def begin(self, tracker: Tracker, uses: UseCounter, sink: Sink) -> None:
        """Starts to record; until then, functions run unchanged."""
        self.tracker = tracker
        self.uses = uses
        self._ledger = sink if isinstance(sink, Ledger) else None
        self._sink = sink
        with internals.DisableTorchFunction():  # the module's first call begins it, inside the mode
            self._anchor = self._new_anchor()
            for name, p in self._parameters.items():
                root = tracker.roots[id(p)] = Root(tracker.scope, name, p, uses, sink, self._anchor)
                if self._kept is not None:
                    root.operand = self._kept.attached(name, p)
        self._begun = True
        self.start = None
        self.earlier = _NO_EARLIER

    def _new_anchor(self) -> Tensor:
        """Makes a leaf, of any shape; zeros take twice as long as a detached parameter."""
        first = next(iter(self._parameters.values()), None)
        if type(first) is nn.Parameter and first.is_cpu:
            return first.detach().requires_grad_()
        return torch.zeros((), requires_grad=True)

    def follow(self, earlier: Iterable[Earlier], marked: Iterable[Tensor] = ()) -> None:
        """Tags the results of functions that ran before the recording began; marked ones stay."""
        known = {id(t) for t in marked}
        with internals.DisableTorchFunction():
            for func, args, kwargs, output in earlier:
                if known.isdisjoint(map(id, parts_of(output))):
                    self.tracker.propagate(func, args, kwargs, output)

    def _before(
        self,
        kind: Kind,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs a function before the recording has begun; begins it if the function uses a weight."""
        if kind is _SET_DATA:
            _refuse_in_trace(args)
        if kind is _HOOK:
            self._refuse_hook(func, args[0])
        if self._of_empty_batch is not None and kind is _BACKWARD:
            return run_passes_of_empty_batch(func, args, kwargs, self._of_empty_batch)
        # `weight.new_zeros(d, d)` is constant, whatever the number of samples.
        is_made_of_weight = (
            kind is _HARMLESS and name_of(func).startswith("new_") and args[0].is_leaf
        )
        is_followed = kind in _FOLLOWED or (is_made_of_weight and args[0].requires_grad)
        if not is_followed or self.start is None or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if not is_made_of_weight and self._begins(args, kwargs):
            return self.__torch_function__(func, (), args, kwargs)
        output = func(*args, **kwargs)
        self.earlier.append((func, args, kwargs, output))
        return output

    def _begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Begins the recording if an argument is a weight and the batch is known; returns whether it has."""
        for t in tensors_in(args, kwargs):
            if t.requires_grad and t.is_leaf and any(t is p for p in self._parameters.values()):
                if self.start is not None:
                    self.start()
                return self._begun
        return False

    def begin_without_samples(self, ledger: Ledger) -> None:
        """Records nothing, but runs as many backward passes as on ranks with samples."""
        self._of_empty_batch = ledger

    def add_root(self, name: str, t: Tensor) -> None:
        """Records uses of a tensor as uses of a parameter; the caller keeps the tensor alive."""
        with internals.DisableTorchFunction():
            scope = self.tracker.scope
            root = Root(scope, name, t, self.uses, self._sink, self._anchor)
            if self._kept is not None:
                root.operand = self._kept.attached(name, t)
            self.tracker.roots[id(t)] = root

    def mapped(
        self, func: Callable[..., Any], in_dims: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], Any, list[Any]] | None:
        """Returns what `torch.vmap` has to map instead, if it maps over the samples; else None."""
        if not self._begun and self.start is not None and torch.is_grad_enabled():
            self.start()  # inside of the mapped function a first use of a weight would be too late
        if not self._begun:
            return None
        with internals.DisableTorchFunction():
            return mapped_over_samples(self.tracker, func, in_dims, args, kwargs)

    def unrolled(
        self, func: Callable[..., Any], in_dims: Any, out_dims: Any, args: Sequence[Any]
    ) -> Callable[..., Any] | None:
        """Returns a loop that stands for `torch.vmap` if it maps over a weight; else None."""
        if not self._begun:
            return None
        with internals.DisableTorchFunction():
            return mapped_over_weights(self.tracker, func, in_dims, out_dims, args)

    def wants_function(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an autograd.Function with these arguments uses a weight.

        If it does not, the recorder intercepts the functions that it calls instead.
        """
        if not torch.is_grad_enabled() or not (self._begun or self._begins(args, kwargs)):
            return False
        return any(self.tracker.tag(t).is_weight for t in tensors_in(args, kwargs))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if (
            types
            and not _PLAIN_CLASSES.issuperset(types)  # most have none but parameters
            and internals.has_subclass_functions()
            and not all(map(_is_of_torch, types))
        ):
            return self._by_their_classes(func, types, args, kwargs)
        kind = kind_of(func)
        if kind is not _ORDINARY:  # as most are
            if kind is _PASSIVE:
                found = func(*args, **kwargs)
                return leaving_tags_out_of_files(found) if func is _REDUCE else found
            if kind is _CONTROL_FLOW:
                known = CONTROL_FLOW.get(func)
                if known is not None:
                    with self:
                        return known(*args, **kwargs)
                args, kwargs = watched(func, args, kwargs, self._described)
                kind = _ORDINARY
        if not self._begun:
            return self._before(kind, func, args, kwargs)
        if kind is not _ORDINARY:
            if kind is _SHAPE:
                return self.tracker.tagged(args[0], func(*args))
            if kind is _SIZE:
                return self._size(func, args, kwargs)
            if kind is _BACKWARD:
                return self._backward(func, args, kwargs)
            if kind is _HOOK:
                return self._register_hook(func, *args, **kwargs)
            if kind is _PLACE:
                return func(*args) if args[0].grad_fn is not None else self._place(func, args[0])
            if kind is _NODE:
                node = func(*args) or self._place(func, args[0])
                if node is not None:
                    self._nodes += lasting_nodes(node)
                return node
            if kind is _SET_DATA:
                _refuse_in_trace(args)
                weight = self.tracker.weight_of(args[0])
                layout = self.tracker.layout(args[1])
                func(*args, **kwargs)
                if weight is None and not args[0].requires_grad:
                    self.tracker.mark(args[0], layout)
                elif weight is not None:
                    weight.value = weight.operand = args[0].detach()
                    if self._kept is not None:
                        weight.operand = self._kept.attached(weight.name, args[0])
                return None
            if kind is _TRANSPARENT:
                if not any(func in table for table in (RULES, DECOMPOSITIONS, DECLARING, DECLARED)):
                    with self:
                        return without_override_check(func)(*args, **kwargs)
                kind = _ORDINARY

        tracker = self.tracker
        tensors, tags, signature = tracker.read(func, args, kwargs)
        if kind is _WRITING:
            kind = _ORDINARY
            self._save_buffers(tensors)
            if only_moves(func) and not tags[0].is_weight:
                return self._move(func, args, kwargs)
        looks_at_weights = False
        for tag in tags:
            if not tag.is_weight:
                continue
            looks_at_weights = True
            if self._made_overwriting is not None and self._refresh_views(func, tensors, tags):
                return self.__torch_function__(func, types, args, kwargs)
            if kind is not _ORDINARY:
                continue
            if torch.is_grad_enabled():
                plan = cached_plan(signature)
                if (
                    plan is not None
                    and internals.forward_level() < 0
                    and internals.level_of_transform() is None
                ):
                    output = call_by_plan(plan, args, kwargs, tracker, tags, signature)
                    if output is not NotImplemented:
                        if self.journal is not None:
                            self.note_use(func, args, kwargs, "rule")
                        return output
                return self.call_on_weights(func, args, kwargs)
            if only_moves(func):
                raise unsupported(func, [tag], "the function changes where a weight's elements are")
            self.uses.expect_in_recomputation(tag.roots)
        output = func(*args, **kwargs)
        if looks_at_weights and any(output is t for t in tensors):
            tracker.forget_detached(output)
            return output  # `w.float()` of a float weight: it keeps its tag
        if id(output) in tracker.roots:
            return output  # `w.requires_grad_()` of a frozen one: a tag would hide the weight
        if not tracker.recall(signature, output):
            tracker.propagate_from(func, args, kwargs, output, tensors, tags, signature)
        return output

    def _move(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Changes the shape of a tensor in place; its samples are where they are in a view of that shape."""
        pure = out_of_place(func)
        assert pure is not None
        layout = self.tracker.layout(self.__torch_function__(pure, (), args, kwargs))
        output = func(*args, **kwargs)
        refuse_lost(output, layout)
        self.tracker.mark(output, layout)
        return output

    def _described(self, t: Tensor) -> str | None:
        """Says what a tensor that requires grad is; None if the recording does not know it."""
        weight = self.tracker.weight_of(t) if self._begun and self.tracker.knows(t) else None
        names = [name for name, p in self._parameters.items() if p is t]
        if weight is not None or names:
            return quoted(names[:1] if weight is None else weight.roots)
        is_known = self._begun and self.tracker.knows(t)
        return f"a tensor of shape {tuple(t.shape)}" if is_known else None

    def _by_their_classes(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs a function as the classes of its arguments do, as torch does: what they call is recorded.

        These stand for tensors, or are subclasses that change results, which they get by `as_subclass`: no
        mode sees that.
        """
        with self, _Results() as within:
            for kind in types:
                output = kind.__torch_function__(func, types, args, kwargs)  # type: ignore[attr-defined]
                if output is not NotImplemented:
                    break
        if output is not NotImplemented:
            if self._begun and within.made:
                with internals.DisableTorchFunction():
                    self._hand_on(tensors_in(output), within.made)
            return output
        names = ", ".join(kind.__name__ for kind in types)
        raise TypeError(f"no implementation of `{name_of(func)}` for {names}")

    def _hand_on(self, given: Iterable[Tensor], made: Sequence[Tensor]) -> None:
        """Gives results without a tag those of the tensors that they are."""
        for t in given:
            if not self.tracker.knows(t) and id(t) not in self.tracker.roots:
                for other in reversed(made):
                    if is_same_view(t, other):
                        self.tracker.mark(t, self.tracker.tag(other))
                        break

    def _backward(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        assert self._ledger is not None
        refuse_gradients_of_weights(func, args, kwargs, self.tracker.weight_of)
        if self._nodes:
            guard_nodes(self._nodes)
            self._nodes.clear()
        try:
            return run_passes(
                func,
                args,
                kwargs,
                self,
                self._ledger,
                self._anchor,
                read_loss=self.read_loss,
                scope=self.tracker.scope,
            )
        except CheckpointError as error:
            # A recomputation takes another way where a call was refused.
            if self.refusal is None:
                raise
            raise self.refusal from error
        finally:
            if len(self.tracker.tagged_here) > _MANY_TAGGED:
                self.tracker.tagged_here.forget_dead()

    def _register_hook(self, func: Any, t: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        self._refuse_hook(func, t)
        if func is not Tensor.register_hook:
            return func(t, hook)
        layout = self.tracker.layout(t)
        if isinstance(layout, Samples | Owners) and layout.scope.count > 1:
            hook = guarded(hook, layout)
        return t.register_hook(hook)

    def _refuse_hook(self, func: Any, t: Tensor) -> None:
        """Raises an error for a hook on a weight: the recording runs those that were there before it."""
        is_of_gradient = func is Tensor.register_hook
        if self._kept is not None and not is_of_gradient:
            return  # `.grad` is kept, and autograd runs the hook
        roots = tuple(name for name, p in self._parameters.items() if p is t)[:1]
        if not roots and self._begun:
            weight = self.tracker.weight_of(t)
            roots = () if weight is None else weight.roots
        if roots:
            next_step = (
                "register it before" if is_of_gradient else "remove it, or freeze the parameter"
            )
            raise UnsupportedFunctionError(
                f"a hook by `{func.__name__}` on {quoted(roots)} is registered inside of the recording, "
                f"and would not run: {next_step}"
            )

    def _place(self, func: Callable[..., Any], t: Tensor) -> Any:
        """Asks for the place in autograd's graph of a tensor without a node; a derived weight is no leaf."""
        tag: Any = getattr(t, TAG, None)
        if tag is None or not tag.is_weight or tag.scope is not self.tracker.scope:
            return func(t)
        name = name_of(func)
        if name == "is_leaf":
            return False
        raise UnsupportedFunctionError(
            f"`{name}` is asked of a tensor computed from {quoted(tag.roots)}, which has no place in "
            "autograd's graph inside of a recording: ask before it, or freeze the parameter"
        )

    def _save_buffers(self, tensors: Iterable[Tensor]) -> None:
        for t in tensors:
            if self.tracker.is_own(t) and id(t) not in self._saved and not t.requires_grad:
                with internals.DisableTorchFunction():
                    self._saved[id(t)] = t, t.detach().clone()

    def restore_buffers(self) -> None:
        """Undoes all writes to buffers of the module: a call that is refused has not happened."""
        with internals.DisableTorchFunction(), torch.no_grad():
            for t, value in self._saved.values():
                t.copy_(value)
        self._saved.clear()

    def _size(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        size = func(*args, **kwargs)
        if not isinstance(size, int):
            return self.tracker.tagged(args[0], size)
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if dim is None:  # the number of rows or of elements
            layout = self.tracker.layout(args[0])
            is_first = isinstance(layout, Samples) and layout.dim == 0 and layout.pre == 1
            return BatchSize(size) if is_first else size
        return self.tracker.tagged(args[0], args[0].shape)[dim]
