"""Tracks the layout of every tensor in a recorded region."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from pergrad.engine.intercepting.weights import LateView, Root, Weight
from pergrad.engine.samples.beside_data import (
    is_across_data,
    is_beside_other_data,
    refuse_across_data,
)
from pergrad.engine.samples.layouts import (
    Constant,
    Key,
    Layout,
    Lost,
    Owners,
    Samples,
    Scope,
    Unfinished,
)
from pergrad.engine.samples.origins import MEAN, SUM, untold
from pergrad.engine.samples.out_of_sight import (
    Promise,
    check_promises,
    layout_out_of_sight,
    proved_on_graph,
)
from pergrad.engine.samples.propagation import (
    Call,
    handler_of,
    is_by_value,
    is_trusted,
    layout_of_write,
    layouts_of_outputs,
    name_of,
    refuse_lost,
    tensors_in,
)
from pergrad.engine.samples.propagation.elementwise import aligned
from pergrad.engine.samples.propagation.in_place import writes_in_place
from pergrad.engine.samples.propagation.shared_memory import layout_of_base, layout_of_view
from pergrad.engine.samples.shares import PASSING
from pergrad.engine.samples.signatures import PLAIN, Signature, describe
from pergrad.engine.samples.sizes import BatchSize
from pergrad.engine.samples.tags import DATA, TAG, VERSION, Tagged, remove_tags
from pergrad.errors import UnsupportedFunctionError
from pergrad.runtime import internals
from pergrad.runtime.caches import Cache

__all__ = ["Tracker", "is_same_view"]

_LAYOUTS: Cache[tuple[Key, ...]] = Cache(__name__, "the layouts of a call's outputs, by signature")
_TAGGED: Cache[torch.Size] = Cache(__name__, "shapes that count samples, by dimension and shape")
_SEQUENCES = (list, tuple)
_CONSTANT = Constant.key
_TOTAL = "total"
# Functions of several integer tensors, whose values say nothing about the places of the results.
_KEEPING_PLACES = frozenset(["embedding", "diff"])
_ORIGINS = {"sum": SUM, "mean": MEAN}


def _total_key(lost: Lost) -> Key:
    """Returns the key of a sum over the samples, whose terms have own gradients; None for other reasons."""
    origin = lost.origin
    if lost.why != "total" or origin is None or origin.has_factors:
        return None
    return _TOTAL, lost.reason, origin.how or "", origin.why_not


def _nested(func: Callable[..., Any], verb: str) -> UnsupportedFunctionError:
    return UnsupportedFunctionError(
        f"`{name_of(func)}` {verb} a nested tensor, whose samples cannot be followed: pad it "
        "(`torch.nn.utils.rnn.pad_sequence`), or compute on its rows and pass owners="
    )


def _is_by_shape(call: Call) -> bool:
    """Whether the layouts of a call's outputs depend only on its signature."""
    if writes_in_place(call.func) or not is_trusted(call.func):
        return False
    if not call.has_samples:
        return True
    if is_by_value(call.func) or call.reads_values:
        return False
    handler = handler_of(call.func)
    if all(t.is_floating_point() for t in call.tensors):
        return True
    # Integer tensors may be indices, whose values matter, unless there is nothing to index.
    is_alone = handler is not None and len(call.tensors) == 1
    return is_alone or handler is aligned or call.name in _KEEPING_PLACES


def is_same_view(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same elements of one tensor, as after `as_subclass`."""
    bases = [internals.base_of(t) for t in (a, b)]
    of_a, of_b = (t if base is None else base for t, base in zip((a, b), bases, strict=True))
    is_same_place = a.stride() == b.stride() and a.storage_offset() == b.storage_offset()
    return of_a is of_b and a.shape == b.shape and is_same_place


def _has_graph(t: Tensor) -> bool:
    """Whether functions in autograd's graph have made a tensor."""
    try:
        return t.requires_grad and t.grad_fn is not None
    except RuntimeError:  # of a view that was taken without gradients, once it is written to
        return False


def _without_overwritten(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
    layouts: list[Layout],
) -> tuple[list[Tensor], list[Layout]]:
    """Leaves out the tensors whose values get lost as samples are written over them, as with `out=`."""
    targets = [args[0]] if func is Tensor.copy_ else tensors_in(kwargs.get("out"))
    kept = [
        (t, layout)
        for t, layout in zip(tensors, layouts, strict=True)
        if not any(t is target for target in targets)
    ]
    if not any(isinstance(layout, Samples | Owners) for _, layout in kept):
        return tensors, layouts
    return [t for t, _ in kept], [layout for _, layout in kept]


class Tracker:
    """Tracks the layouts of one scope, whose inputs have their samples in dimension `batch_dim`."""

    def __init__(self, scope: Scope, batch_dim: int, own: Iterable[Tensor] = ()) -> None:
        self.scope = scope
        self._count = scope.count
        self.batch_dim = batch_dim
        self.constant = Constant(scope)
        self.tagged_here = Tagged()
        self.refer = self.tagged_here.append  # gets a weak reference to every tensor that is tagged
        self.untagged_are_constant = False  # while the module's own forward runs
        self.roots: dict[int, Root] = {}  # by id
        # Adds roots for the tensors that stand for sharded parameters just then.
        self.adopt: Callable[[], None] | None = None
        self._own = set(map(id, own))  # tensors of the model
        # Leaves with a gradient that are not of the model, by id.
        self.strangers: dict[int, Tensor] = {}
        self.promises: list[Promise] = []
        self.layouts: dict[Key, Layout] = {self.constant.key: self.constant}  # as `layout_for`
        # Untagged tensors seen in the forward: a checkpoint's recomputation uses them outside of it.
        self._untagged_seen: WeakValueDictionary[int, Tensor] | None = None

    # -- reading

    def tag(self, t: Tensor) -> Layout | Weight:
        """Returns the weight or the layout of a tensor."""
        root = self.roots.get(id(t))
        if root is not None:  # a loss may freeze some parameters for a while, as of a discriminator
            return root if t.requires_grad else self.constant
        tag: Layout | Weight | None = getattr(t, TAG, None)
        if tag is not None and tag.scope is self.scope:
            return self._after_changes(t, tag) if internals.version_of(t) else tag
        return self._tag_of_untagged(t)

    def _after_changes(self, t: Tensor, tag: Layout | Weight) -> Layout | Weight:
        """Returns the tag of a tensor that was written to in place, since it was tagged or before.

        A write through a view changes its base and all other views of that. Autograd knows about it: the
        graph of the tensor says what it depends on now.
        """
        if getattr(t, VERSION, 0) == internals.version_of(t) or tag.is_weight:
            return tag
        if not _has_graph(t) or internals.is_transformed(t):
            return self._view_of_weight(t) or self._after_writes(t, tag)  # data
        found = self._made_out_of_sight(t) or tag
        self._settle(t, found)
        return found

    def _after_writes(self, t: Tensor, tag: Layout | Weight) -> Layout | Weight:
        """Returns the tag of data that was written to elsewhere: it has the samples of its base."""
        base = internals.base_of(t)
        if base is None or tag.is_weight or not self.knows(base) or t.is_inference():
            return tag
        behind = self.tag(base)
        if behind.is_weight:
            return tag
        found = layout_of_view(base, behind, t, tag)  # type: ignore[arg-type]
        self._settle(t, found)
        return found

    def _view_of_weight(self, t: Tensor) -> Weight | None:
        """Returns a weight for a view of a tensor into which a weight was written meanwhile."""
        base = internals.base_of(t)
        behind = None if base is None else getattr(base, TAG, None)
        if behind is None or behind.scope is not self.scope or not behind.is_weight:
            return None
        return LateView(behind, t)

    def _tag_of_untagged(self, t: Tensor) -> Layout | Weight:
        """Returns the layout of an untagged tensor: constant for the model's own, else by its shape."""
        if id(t) in self._own:
            return self.constant
        inner: Layout | Weight | None = getattr(t, DATA, None)  # as `inner_tag`, inlined
        is_inner = inner is not None and inner.scope is self.scope
        if is_inner and not _has_graph(t):
            assert inner is not None
            return inner
        base = None if t.requires_grad else internals.base_of(t)
        if base is not None and self.knows(base) and is_same_view(t, base):
            tag = self.tag(base)  # made by `as_subclass`, which no mode sees
            if not tag.is_weight:
                return tag
        if t.requires_grad:
            if not _has_graph(t):
                if self.adopt is not None:
                    self.adopt()
                    if id(t) in self.roots:
                        return self.roots[id(t)]
                self.strangers[id(t)] = t
            elif not internals.is_transformed(t):
                found = self._made_out_of_sight(t)
                if found is not None:
                    self._settle(t, found)
                    return found
        if self.untagged_are_constant:
            if self._untagged_seen is None:
                self._untagged_seen = WeakValueDictionary()
            self._untagged_seen[id(t)] = t
            return self.constant
        is_recomputation = internals.current_graph_task_id() != -1
        if is_recomputation and self._untagged_seen and self._untagged_seen.get(id(t)) is t:
            return self.constant
        return self.by_shape(t, self.batch_dim)

    def _made_out_of_sight(self, t: Tensor) -> Layout | None:
        return layout_out_of_sight(t, self.scope, self.promises)

    def check_promises(self) -> None:
        """Raises an error if the layout of a tensor inside of a checkpoint was not proved."""
        check_promises(self.promises)

    def is_own(self, t: Tensor) -> bool:
        """Whether the tensor is a parameter or a buffer of the module."""
        return id(t) in self._own

    def weight_of(self, t: Tensor) -> Weight | None:
        tag = self.tag(t)
        return tag if tag.is_weight else None  # type: ignore[return-value]

    def forget_detached(self, t: Tensor) -> None:
        """Makes a derived weight constant that has lost its gradient in place, by `detach_`."""
        weight = None if t.requires_grad or not self.knows(t) else self.weight_of(t)
        if weight is not None and (weight.value.is_floating_point() or weight.value.is_complex()):
            self.mark(t, self.constant)

    def layout(self, t: Tensor) -> Layout:
        tag = self.tag(t)
        return self.constant if tag.is_weight else tag  # type: ignore[return-value]

    def knows(self, t: Tensor) -> bool:
        tag: Layout | Weight | None = getattr(t, TAG, None)
        return tag is not None and tag.scope is self.scope

    def by_shape(self, t: Tensor, dim: int) -> Layout:
        """Infers the layout of an input from its shape."""
        if t.dim() > dim and t.shape[dim] == self.scope.count:
            return self.layout_for((dim, 1, 1))
        return self.constant

    def could_have_samples(self, t: Tensor) -> bool:
        """Whether the shape of a tensor that is not the model's own allows samples."""
        return id(t) not in self._own and isinstance(self.by_shape(t, self.batch_dim), Samples)

    def tagged(self, t: Tensor, shape: torch.Size) -> torch.Size:
        """Returns the shape with the size of the sample dimension as a BatchSize."""
        tag = getattr(t, TAG, None)  # the common case of `tag`, inlined
        if tag is None or tag.scope is not self.scope or internals.version_of(t):
            tag = self.tag(t)
        if type(tag) is not Samples:
            return shape
        known = _TAGGED.get((tag.dim, shape))
        if known is None:
            sizes = list(shape)
            sizes[tag.dim] = BatchSize(sizes[tag.dim])
            known = torch.Size(sizes)
            _TAGGED.put((tag.dim, shape), known)
        return known

    def read(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Tensor], list[Any], Signature | None]:
        """Returns the tensors among a call's arguments, their tags, and the call's signature or None."""
        tensors: list[Tensor] = []
        tags: list[Layout | Weight] = []
        parts: list[Any] = [func, self._count]
        try:
            has_signature = self._read(args, tensors, tags, parts)
            if kwargs:
                parts += dict, *kwargs
                has_signature = self._read(kwargs.values(), tensors, tags, parts) and has_signature
        except RuntimeError:
            if any(t.is_nested for t in tensors_in(args, kwargs)):  # it has no shape
                raise _nested(func, "gets") from None
            raise
        return tensors, tags, tuple(parts) if has_signature else None

    def _read(
        self, values: Iterable[Any], tensors: list[Tensor], tags: list[Any], parts: list[Any]
    ) -> bool:
        """Reads all values, in one pass since it runs for every call; returns False without a signature."""
        has_signature = True
        scope, version_of = self.scope, internals.version_of
        for value in values:
            kind = type(value)
            if kind is Tensor or (kind not in PLAIN and isinstance(value, Tensor)):
                tag: Any = getattr(value, TAG, None)  # as `tag`, inlined
                if tag is None or tag.scope is not scope:
                    root = self.roots.get(id(value))
                    if root is not None:
                        tag = root if value.requires_grad else self.constant
                    else:
                        tag = getattr(value, DATA, None)  # as `_tag_of_untagged`, of data
                        is_data = tag is not None and tag.scope is scope
                        if not is_data or value.requires_grad or id(value) in self._own:
                            tag = self._tag_of_untagged(value)
                elif version_of(value):
                    tag = self._after_changes(value, tag)
                key = tag.key
                tensors.append(value)
                tags.append(tag)
                parts += key, value.shape, value.dtype
                if key is None:
                    has_signature = False
            elif kind in PLAIN:
                parts.append(value)
            elif isinstance(value, _SEQUENCES):
                parts += kind, len(value)
                has_signature = self._read(value, tensors, tags, parts) and has_signature
            elif kind is dict:
                self._read(value.values(), tensors, tags, parts)
                has_signature = False
            else:
                has_signature = describe(value, parts) and has_signature
        return has_signature

    # -- writing

    def _settle(self, t: Tensor, tag: Layout | Weight) -> None:
        """Tags a tensor by its graph, whether gradients are on or off just then."""
        with torch.enable_grad():
            self.mark(t, tag)

    def mark(self, t: Tensor, tag: Layout | Weight) -> None:
        if self.scope.known and isinstance(tag, Unfinished):
            tag = self.scope.completed(tag)
        self.refer(ref(t))
        # Without gradients it may be inside of an autograd.Function, whose result gets another graph.
        if torch.is_grad_enabled():
            setattr(t, TAG, tag)
        else:
            setattr(t, DATA, tag)
            if t.is_inference():
                return  # it has no version
            if not t.requires_grad and self.knows(t):
                setattr(t, TAG, tag)  # data from before, written to
        version = internals.version_of(t)
        if version:
            setattr(t, VERSION, version)

    def mark_input(self, t: Tensor, dim: int) -> bool:
        """Tags an input by its shape; returns False if it had a tag.

        Before the first call of the module nothing says where the samples are, as in `model(x[:2])` with a
        given batch size: what was constant until then may be the batch.
        """
        tag: Layout | Weight | None = getattr(t, TAG, None)
        if (
            tag is None and not torch.is_grad_enabled()
        ):  # as in the forward of a reentrant checkpoint
            tag = getattr(t, DATA, None)
        is_known = tag is not None and tag.scope is self.scope
        if is_known and (self.scope.call or not isinstance(tag, Constant)):
            return False
        layout = self.by_shape(t, dim)
        if is_known and layout is self.constant:
            return False
        if t.is_inference():
            raise UnsupportedFunctionError(
                "an argument of the module is an inference tensor, which autograd cannot save: clone it "
                "outside of torch.inference_mode(), or make it under torch.no_grad()"
            )
        if not torch.is_grad_enabled():
            self.mark(t, layout)
            return True
        setattr(t, TAG, layout)  # as `mark`, inlined
        self.refer(ref(t))
        if internals.version_of(t):
            setattr(t, VERSION, internals.version_of(t))
        return True

    @staticmethod
    def unmark(*tensors: Tensor) -> None:
        for t in tensors:
            remove_tags(t)

    def untag(self) -> None:
        """Takes all tags of this scope off: those of the caller's tensors, and of results that are kept."""
        self.tagged_here.untag(self.scope)

    def propagate(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        flows: bool | None = None,
    ) -> None:
        """Tags the outputs of a call; `flows` says whether a gradient will flow through them."""
        tensors, tags, signature = self.read(func, args, kwargs)
        if not self.recall(signature, output, flows):
            self.propagate_from(func, args, kwargs, output, tensors, tags, signature, flows)

    def recall(self, signature: Signature | None, output: Any, flows: bool | None = None) -> bool:
        """Tags the outputs like those of an earlier call with that signature; returns False if none was."""
        known = _LAYOUTS.get(signature)
        if known is None:
            return False
        if type(output) is Tensor:  # most calls: one output with a key
            layout = self.layouts.get(known[0])
            if layout is not None and layout.key is not None:
                self.refer(ref(output))  # as `mark`, inlined
                if torch.is_grad_enabled():
                    setattr(output, TAG, layout)
                else:
                    setattr(output, DATA, layout)
                    if output.is_inference():
                        return True
                version = internals.version_of(output)
                if version:
                    setattr(output, VERSION, version)
                return True
        outputs = (output,) if isinstance(output, Tensor) else output
        assert len(outputs) == len(known)
        if known[0] is not None and known[0][0] is _TOTAL and flows is None:
            node = outputs[0].grad_fn
            if node is None:
                return False  # of data, which may count something
            behind = node.next_functions  # torch makes them anew for each look
            before = behind[0][0] if behind else None
            if type(before).__name__ in PASSING:
                return False  # what was divided before may be a mean
        has_gradients = torch.is_grad_enabled()
        for t, key in zip(outputs, known):  # noqa: B905  # `strict` takes as long as the loop
            layout = self.layouts.get(key) or self.layout_for(key)
            if layout.key is None and not (t.requires_grad if flows is None else flows):
                layout = self.constant  # a total through which no gradient flows
            if has_gradients:  # as `mark`, inlined
                setattr(t, TAG, layout)
                self.refer(ref(t))
                version = internals.version_of(t)
                if version:
                    setattr(t, VERSION, version)
            else:
                self.mark(t, layout)
        return True

    @staticmethod
    def known(signature: Signature) -> tuple[Key, ...] | None:
        """Returns the cached layouts of the outputs for a signature; None if there are none."""
        return _LAYOUTS.get(signature)

    def propagate_from(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        tensors: list[Tensor],
        tags: list[Layout | Weight],
        signature: Signature | None,
        flows: bool | None = None,
    ) -> None:
        """Computes the layouts of the outputs from the tags of the arguments; weights count as constants."""
        layouts: list[Layout] = [self.constant if tag.is_weight else tag for tag in tags]  # type: ignore[misc]
        if output is None:
            if func is Tensor.__setitem__ and not tags[0].is_weight:
                call = Call(self.scope, func, args, kwargs, [args[0]], tensors, layouts)
                is_tensor = isinstance(args[2], Tensor)
                found = [layout_of_write(call) if is_tensor else layouts[0]]
                self._refuse_other_data(call, found)
                self._mark_all(call, found)
                self._mark_bases(call, found)
            return
        outputs = [output] if isinstance(output, Tensor) else tensors_in(output)
        if not outputs or any(map(internals.is_transformed, outputs)):
            return  # inside of torch.vmap or torch.func, whose own result is judged
        is_out = kwargs.get("out") is not None
        is_write = is_out or writes_in_place(func)
        if is_out or func is Tensor.copy_:
            tensors, layouts = _without_overwritten(func, args, kwargs, tensors, layouts)
        if any(t.is_nested for t in outputs):
            raise _nested(func, "makes")
        if flows is None and not any(t.requires_grad for t in tensors):
            # What requires grad was made of tensors that the arguments hide: its graph says of which.
            outputs = [t for t in outputs if not _has_graph(t)]
            if not outputs:
                return
        hints = () if is_trusted(func) else [self._hint(t) for t in outputs]
        call = Call(self.scope, func, args, kwargs, outputs, tensors, layouts, flows, hints)
        found = layouts_of_outputs(call)
        self._refuse_other_data(call, found)
        self._mark_all(call, found)
        if is_write:
            self._mark_bases(call, found)
        else:
            self._remember(call, output, found, signature)

    def _refuse_other_data(self, call: Call, found: list[Layout]) -> None:
        if call.flows and call.has_samples:
            for k, t in enumerate(call.outputs):
                if call.leaves_data or self._is_beside(call, t, found[k]):
                    found[k] = call.mixed("combines rows of samples with data of others")

    def _is_beside(self, call: Call, t: Tensor, layout: Layout | None) -> bool:
        """Whether rows are combined with data of other samples."""
        if is_beside_other_data(call, t, layout, self.knows):
            return True
        is_across = is_across_data(call, t, layout, self.knows, self.batch_dim)
        if is_across and not call.is_of_weights:
            refuse_across_data(call, t)
            return False
        return is_across

    def _mark_all(self, call: Call, found: list[Layout]) -> None:
        """Tags the outputs; a gradient through one that has lost its samples is an error.

        If the call itself does not tell, because it has written in place or an argument has no separate
        samples, the graph may: it goes back to the last uses of weights.
        """
        for k, (t, layout) in enumerate(zip(call.outputs, found, strict=True)):
            if isinstance(layout, Lost) and layout.is_fatal and call.flows:
                if not any(layout is own for own in call.layouts):
                    proved = proved_on_graph(t, self.scope)
                    if proved is not None and not self._is_beside(call, t, proved):
                        found[k] = proved
                    call.reads_values = True
                refuse_lost(t, found[k])
            self.mark(t, found[k])

    def _mark_bases(self, call: Call, found: list[Layout]) -> None:
        """Tags the tensors of which those that a call has written to are views; of data alone.

        Where a gradient flows, the graph of the base says what was written.
        """
        for t, layout in zip(call.outputs, found, strict=True):
            base = None if t.requires_grad or t.is_inference() else internals.base_of(t)
            if base is None or base.requires_grad:
                continue
            before = self.tag(base)
            if not before.is_weight:
                self.mark(base, layout_of_base(base, before, t, layout))  # type: ignore[arg-type]
                self.mark(t, layout)

    def inner_tag(self, t: Tensor) -> Any:
        """Returns the tag that a tensor got while gradients were off; None if it has none."""
        tag: Layout | Weight | None = getattr(t, DATA, None)
        return tag if tag is not None and tag.scope is self.scope else None

    def _hint(self, t: Tensor) -> Layout | None:
        """Returns the samples that the functions inside of a call gave its output; None if there are none."""
        tag: Any = self.inner_tag(t)
        return tag if isinstance(tag, Samples | Owners) else None

    def _remember(
        self, call: Call, output: Any, found: list[Layout], signature: Signature | None
    ) -> None:
        """Caches the layouts by signature if they hold for all of its calls."""
        if signature is None or not _is_by_shape(call):
            return
        flows = any(t.is_floating_point() or t.is_complex() for t in call.outputs)
        keys = tuple(_total_key(la) if isinstance(la, Lost) else la.key for la in found)
        if call.has_samples and flows and _CONSTANT in keys:
            return  # constant only because no gradient flowed this time
        flat = [output] if isinstance(output, Tensor) else output
        is_flat = isinstance(flat, _SEQUENCES) and list(map(id, flat)) == list(
            map(id, call.outputs)
        )
        if is_flat and None not in keys:
            _LAYOUTS.put(signature, keys)

    def layout_for(self, key: Key) -> Layout:
        """Returns this scope's layout with that key."""
        made = self.layouts.get(key)
        if made is None:
            assert key is not None
            if key[0] == _TOTAL:
                _, reason, how, why_not = key
                origin = _ORIGINS.get(str(how)) or untold(str(why_not))
                made = Lost(self.scope, str(reason), "total", origin=origin)
            else:
                made = Samples(self.scope, *key)  # type: ignore[arg-type]
            self.layouts[key] = made
        return made
