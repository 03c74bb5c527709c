"""Intercepts every torch function and chooses how to compute the gradients of each use of a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError, CheckpointFunction

from pergrad.engine.collecting.hooks import guarded
from pergrad.engine.collecting.ledger import Ledger, Sink, UseCounter
from pergrad.engine.intercepting.autograd_functions import Applied
from pergrad.engine.intercepting.composites import (
    is_composite,
    run_backward,
    without_override_check,
)
from pergrad.engine.intercepting.derivation import derive, explicit_cast, transform
from pergrad.engine.intercepting.function_kinds import Kind, kind_of
from pergrad.engine.intercepting.in_place import out_of_place
from pergrad.engine.intercepting.journal import Journal, Rung
from pergrad.engine.intercepting.ladder import (
    MixedCall,
    by_broadcast,
    by_masked_vjp,
    by_vmap,
    expanded,
    refused,
    run_under_autograd,
    same_values,
    with_strides_of,
)
from pergrad.engine.intercepting.overwriting import Overwriting
from pergrad.engine.intercepting.rule_calls import (
    cached_plan,
    call_by_plan,
    call_with_rule,
    qualified_name,
    unsupported,
)
from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.intercepting.weights import Root, Weight, refuse_ordinary_gradients
from pergrad.engine.samples.layouts import Constant, Lost, Owners, Samples, samples_back
from pergrad.engine.samples.propagation import (
    ELEMENTWISE,
    mixed_samples,
    name_of,
    sizes_in,
    tensors_in,
    unknown_samples,
)
from pergrad.engine.samples.sizes import BatchSize
from pergrad.errors import PergradError, UnsupportedFunctionError
from pergrad.rules import DECLARING, DECOMPOSITIONS, RULES
from pergrad.rules.samples import DECLARED
from pergrad.runtime import internals, is_traced
from pergrad.runtime.caches import Cache

__all__ = ["Recorder"]

_PASSIVE, _SHAPE, _SIZE = Kind.PASSIVE, Kind.SHAPE, Kind.SIZE
_SET_DATA, _HOOK, _TRANSPARENT = Kind.SET_DATA, Kind.HOOK, Kind.TRANSPARENT
_BACKWARD, _ORDINARY, _WRITING = Kind.BACKWARD, Kind.ORDINARY, Kind.WRITING
_STRIDES: Cache[list[tuple[int, ...]]] = Cache(
    __name__, "strides of results, by signature and strides"
)
_AGREED: Cache[bool] = Cache(__name__, "whether vmap of a call gave its values, by signature")
_REPEATS = frozenset("expand broadcast_to repeat tile".split())


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


def _is_differentiable(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


class Recorder(TorchFunctionMode):
    """Intercepts the functions of one scope; `parameters` are the recorded tensors by name."""

    tracker: Tracker
    uses: UseCounter
    _ledger: Ledger | None  # none for an `ExpandedWeight`, which sees no backward pass

    def __init__(self, parameters: Mapping[str, Tensor], journal: Journal | None = None) -> None:
        super().__init__()
        self._parameters = parameters  # keeps the ids valid
        self._journal = journal
        self._begun = False
        self._made_overwriting: Overwriting | None = None
        self._refusal: Exception | None = None  # the first error that a backward would raise
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}  # buffers before the first write to them

    def begin(self, tracker: Tracker, uses: UseCounter, sink: Sink) -> None:
        """Starts to record; until then, functions run unchanged."""
        self.tracker = tracker
        self.uses = uses
        self._ledger = sink if isinstance(sink, Ledger) else None
        with internals.DisableTorchFunction():  # the module's first call begins it, inside the mode
            self._anchor = torch.zeros((), requires_grad=True)
            for name, p in self._parameters.items():
                tracker.roots[id(p)] = Root(tracker.scope, name, p, uses, sink, self._anchor)
        self._begun = True

    @property
    def _overwriting(self) -> Overwriting:
        if self._made_overwriting is None:
            self._made_overwriting = Overwriting(self.tracker)
        return self._made_overwriting

    def wants_function(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an autograd.Function with these arguments uses a weight.

        If it does not, the recorder intercepts the functions that it calls instead.
        """
        if not self._begun or not torch.is_grad_enabled():
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
        kind = kind_of(func)
        if kind is _PASSIVE or not self._begun:
            return func(*args, **kwargs)
        if kind is _SHAPE:
            return self.tracker.tagged(args[0], func(*args))
        if kind is _SIZE:
            return self._size(func(*args, **kwargs), args, kwargs)
        if kind is _BACKWARD:
            return self._backward(func, args, kwargs)
        if kind is _HOOK:
            return self._register_hook(*args, **kwargs)
        if kind is _SET_DATA:
            weight = self.tracker.weight_of(args[0])
            func(*args, **kwargs)
            if weight is not None:
                weight.value = args[0].detach()
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
        looks_at_weights = False
        for t, tag in zip(tensors, tags, strict=True):
            if not tag.is_weight:
                continue
            looks_at_weights = True
            if tag.is_stale:  # what it is a view of was overwritten
                self._overwriting.refresh(self._call_on_weights, func, t, tag)
                return self.__torch_function__(func, types, args, kwargs)
            if kind is not _ORDINARY:
                continue
            if torch.is_grad_enabled():
                plan = cached_plan(signature)
                if plan is not None:
                    output = call_by_plan(plan, args, kwargs, tracker, tags, signature)
                    if output is not NotImplemented:
                        if self._journal is not None:
                            self._note(func, args, kwargs, "rule")
                        return output
                return self._call_on_weights(func, args, kwargs)
            self.uses.expect_in_recomputation(tag.roots)
        output = func(*args, **kwargs)
        if looks_at_weights and any(output is t for t in tensors):
            return output  # `w.float()` of a float weight: it keeps its tag
        if not tracker.recall(signature, output):
            tracker.propagate_from(func, args, kwargs, output, tensors, tags, signature)
        return output

    def _backward(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a backward pass; one for selected tensors only (`grad`, `inputs=`) records nothing."""
        ledger = self._ledger
        assert ledger is not None
        self._refuse_gradients_of_weights(func, args, kwargs)
        if func is Tensor.backward:  # calls torch.autograd.backward, which would come here again
            func, (args, kwargs) = torch.autograd.backward, _as_function(*args, **kwargs)
        some_only = func is torch.autograd.grad or kwargs.get("inputs") is not None
        is_nested = internals.current_graph_task_id() != -1  # within a reentrant checkpoint
        is_missed = is_nested and ledger.passes > 1  # earlier passes do not run that checkpoint
        before = sum(ledger.uses.arrived.values()) if is_missed else 0
        was_paused, ledger.is_paused = ledger.is_paused, some_only or ledger.is_paused
        try:
            if ledger.passes > 1 and not some_only and not is_nested:
                self._run_earlier_passes(ledger, *args, **kwargs)
            result = run_backward(func, self, args, kwargs)
        except (
            CheckpointError
        ) as error:  # a recomputation takes another way where a call was refused
            if self._refusal is None:
                raise
            raise self._refusal from error
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
        return result

    def _refuse_gradients_of_weights(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raises an error if a backward pass asks for the ordinary gradient of a weight, which has none."""
        place = {torch.autograd.grad: 1, torch.autograd.backward: 4}.get(func, 4)
        inputs = kwargs.get("inputs", args[place] if len(args) > place else None)
        if inputs is None:
            return
        for t in tensors_in(inputs if isinstance(inputs, list | tuple) else [inputs]):
            weight = self.tracker.weight_of(t)
            if weight is not None:
                raise UnsupportedFunctionError(
                    f"{qualified_name(func)} asks for the ordinary gradient of parameter {weight.name!r} "
                    "inside a recording, where it has none: an autograd.Function whose backward does so (an "
                    "adjoint method, for example) cannot be recorded; use the plain way through autograd, "
                    "or run this outside of the recording"
                )

    def _run_earlier_passes(
        self, ledger: Ledger, tensors: Any, gradients: Any = None, *_: Any, **kwargs: Any
    ) -> None:
        """Runs all passes but the last, which the caller runs, for quantities with several passes."""
        gradients = kwargs.get("grad_tensors", gradients)
        for _pass in range(ledger.passes - 1):
            # Only as far as the taps, so that no other leaf accumulates its gradient twice.
            only_taps = {"retain_graph": True, "inputs": [self._anchor]}
            try:
                run_backward(torch.autograd.backward, self, (tensors, gradients), only_taps)
            except RuntimeError as error:
                if "use_reentrant" not in str(error):
                    raise
                raise _reentrant_checkpoint() from error
            ledger.end_pass()

    def _register_hook(self, t: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        weight = self.tracker.weight_of(t)
        if weight is not None:
            raise unsupported(
                Tensor.register_hook, [weight], "a hook inside of the recording would not run"
            )
        layout = self.tracker.layout(t)
        if isinstance(layout, Samples | Owners) and layout.scope.count > 1:
            hook = guarded(hook, layout)
        return t.register_hook(hook)

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

    def _size(self, size: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(size, int):
            return self.tracker.tagged(args[0], size)
        dim = args[1] if len(args) > 1 else kwargs["dim"]
        return self.tracker.tagged(args[0], args[0].shape)[dim]

    def _note(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], rung: Rung
    ) -> None:
        if self._journal is not None:
            weights = [w for t in tensors_in(args, kwargs) if (w := self.tracker.weight_of(t))]
            self._journal.note(weights, qualified_name(func), rung)

    # -- functions that use weights

    def _call_on_weights(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Computes a function of weights by the first method that applies.

        In order: a derived weight, a decomposition, a rule, the function's Python body, its out-of-place
        form, and the rungs without a rule (`_mixed`).
        """
        key = func.function if isinstance(func, Applied) else func
        if key is CheckpointFunction:
            weights = [w for t in tensors_in(args, kwargs) if (w := self.tracker.weight_of(t))]
            raise unsupported(
                func,
                weights,
                "a reentrant checkpoint got the parameter as an argument; pass use_reentrant=False",
            )
        if any(map(internals.is_transformed, tensors_in(args, kwargs))):
            weights = [w for t in tensors_in(args, kwargs) if (w := self.tracker.weight_of(t))]
            raise unsupported(
                func,
                weights,
                "torch.vmap or torch.func transforms this call, and recorded weights cannot be used there",
            )
        cast = explicit_cast(func, args, kwargs)
        if cast is not None:
            with self:
                return cast()
        has_samples = self._has_samples(args, kwargs)
        writes = out_of_place(func) is not None or kwargs.get("inplace", False)
        if not has_samples and key not in DECLARING and not writes:
            return self._derived(func, args, kwargs)
        decomposition = DECOMPOSITIONS.get(key)
        if decomposition is not None:
            with self:
                output = decomposition(*args, **kwargs)
            if output is not NotImplemented:
                return self._with_own_strides(func, args, kwargs, output)
        rule = RULES.get(key)
        if rule is not None and self._suits_rules(args, kwargs):
            output = call_with_rule(rule, func, args, kwargs, self.tracker)
            if output is not NotImplemented:
                self._note(func, args, kwargs, "rule")
                return output
        elif is_composite(func) and func not in DECLARED:
            with self:
                return without_override_check(func)(*args, **kwargs)
        if out_of_place(func) is not None:
            return self._overwriting.write(self._call_on_weights, func, args, kwargs)
        if not has_samples:
            return self._derived(func, args, kwargs)
        return self._mixed(func, args, kwargs)

    def _with_own_strides(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Returns the output with the strides that the function itself gives it: a `view` may need them."""
        found = tensors_in(output)
        if not found or is_traced(found[0]) or (output is found[0] and output.is_contiguous()):
            return output
        tensors, _, signature = self.tracker.read(func, args, kwargs)
        key = None if signature is None else (signature, tuple([t.stride() for t in tensors]))
        expected = _STRIDES.get(key)
        if expected is None:
            expected = self._strides_of(func, args, kwargs)
            if key is not None:
                _STRIDES.put(key, expected)
        if len(expected) != len(found):
            return output
        wanted = iter(expected)

        def with_strides(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            strides = next(wanted)
            return with_strides_of(t, strides) if len(strides) == t.dim() else t

        with self:
            return internals.pytree.tree_map(with_strides, output)

    def _strides_of(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[int, ...]]:
        """Returns the strides of the function's own results; none if it does not run on meta tensors."""

        def described(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )

        with internals.DisableTorchFunction(), torch.no_grad():
            given, named = internals.pytree.tree_map(described, (args, kwargs))
            try:
                return [tuple(t.stride()) for t in tensors_in(func(*given, **named))]
            except (RuntimeError, NotImplementedError):  # not on meta tensors
                return []

    def _suits_rules(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the arguments are real, and none is a vector of one sample: rules expect a batch dimension.

        For complex numbers, autograd conjugates what a gradient needs.
        """
        for t in tensors_in(args, kwargs):
            if t.is_complex():
                return False
            tag = self.tracker.tag(t) if t.dim() == 1 else None
            if isinstance(tag, Owners) and tag.is_one:
                return False
        return True

    def _has_samples(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether any argument is neither a weight nor a constant."""
        return any(
            not isinstance(self.tracker.layout(t), Constant) for t in tensors_in(args, kwargs)
        )

    def _derived(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a function of weights and constants, whose results are weights."""
        self._note(func, args, kwargs, "derived")
        first = self.tracker.weight_of(args[0]) if args and isinstance(args[0], Tensor) else None
        if first is not None:
            if name_of(func) in _REPEATS and any(True for _ in sizes_in((args[1:], kwargs))):
                return self._repeated(func, first, args, kwargs)
            if sum(isinstance(t, Tensor) for t in tensors_in(args, kwargs)) == 1:
                lazy = transform(func, first, args, kwargs)
                if lazy is not None:
                    return self._as_weight(lazy, args[0])
        result, weights = derive(func, args, kwargs, self.tracker.weight_of)

        def marked(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            if id(t) in weights:
                return self._as_weight(weights[id(t)], args[0] if first is not None else None)
            self.tracker.mark(t, self.tracker.constant)
            return t

        return internals.pytree.tree_map(marked, result)

    def _as_weight(self, weight: Weight, base: Tensor | None) -> Tensor:
        """Returns a tensor tagged as the weight, for the model; an ordinary gradient for it is an error.

        `base` is the tensor that it is a view of, if it is one.
        """
        if base is not None and weight.is_view:
            self._overwriting.note_view(base, weight)
        t = weight.value.detach()
        if _is_differentiable(t):
            refuse_ordinary_gradients(t.requires_grad_(), weight.name, self._may_reach_weights)
        self.tracker.mark(t, weight)
        return t

    def _repeated(
        self,
        func: Callable[..., Any],
        weight: Weight,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Repeats the weight once per sample, as `token.expand(batch_size, -1, -1)` does."""
        self._note(func, args, kwargs, "expanded")
        count = self.tracker.scope.count
        sizes = internals.pytree.tree_leaves((args[1:], tuple(kwargs.values())))
        sizes = [s for s in sizes if isinstance(s, int)]
        dim = next(d for d, size in enumerate(sizes) if isinstance(size, BatchSize))
        own = [int(s) // count if d == dim else int(s) for d, s in enumerate(sizes)]
        whole = func(weight.value, *args[1:], **kwargs)
        each = torch.vmap(lambda w: func(w, own))(expanded(weight))
        layout = self.tracker.scope.samples(dim, 1, whole.shape[dim] // count)
        output = samples_back(each, layout)
        self.tracker.mark(output, layout)
        return output

    def _may_reach_weights(self) -> bool:
        return self.tracker.scope.may_reach_weights

    def _mixed(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a function of weights and samples without a rule, by the first rung that works."""
        tracker = self.tracker
        call = MixedCall(func, args, kwargs, self.tracker.weight_of, tracker.layout)
        if name_of(func) in ELEMENTWISE:
            output = by_broadcast(call)
            if output is not None:
                self._note(func, args, kwargs, "broadcast")
                given = {k: w.value for k, w in call.weights.items()}
                for value in given.values():
                    tracker.mark(value, tracker.constant)
                tracker.propagate(func, *call.arguments(given), output)
                return output
        lost = next((la for la in call.inputs.values() if isinstance(la, Lost)), None)
        is_function = isinstance(func, Applied)
        run = run_under_autograd(call, keeps_weights=is_function)
        if lost is not None:
            return self._refused(func, call, run.result, lost)
        for t, layout in zip(run.inputs, run.input_layouts, strict=True):
            tracker.mark(t, layout)
        if not is_function:
            for t in run.leaves:
                tracker.mark(t, tracker.constant)
        scope = tracker.scope
        with scope.pulling_back(may_reach_weights=True) if is_function else nullcontext():
            tracker.propagate(func, *run.arguments, run.result, flows=True)
        flat, spec = internals.pytree.tree_flatten(run.result)
        places = [k for k, t in enumerate(flat) if isinstance(t, Tensor) and t.requires_grad]
        plain = [flat[k] for k in places]
        if not plain:
            return run.result
        layouts = [tracker.layout(t) for t in plain]
        lost = next((la for la in layouts if isinstance(la, Lost)), None)
        if any(isinstance(la, Constant) for la in layouts):
            lost = tracker.scope.lost("the samples of its result are unknown", "unknown")
        if lost is not None:
            return self._refused(func, call, run.result, lost)
        results: list[Tensor] | None = None
        rung: Rung = "vmap"
        if not is_function:  # a function of the user is run once, whatever it does
            results = by_vmap(call, layouts, places)
        if results is None or not self._agree(func, args, kwargs, results, plain):
            results, rung = by_masked_vjp(run, plain, layouts), "masked VJP"
        self._note(func, args, kwargs, rung)
        for k, t, layout in zip(places, results, layouts, strict=True):
            flat[k] = with_strides_of(t, plain[places.index(k)].stride())
            tracker.mark(flat[k], layout)
        return internals.pytree.tree_unflatten(flat, spec)

    def _agree(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: Sequence[Tensor],
        plain: Sequence[Tensor],
    ) -> bool:
        """Whether vmap gives the function's values.

        A traced call has no values: it takes the answer of an earlier call with the same signature.
        """
        _, _, signature = self.tracker.read(func, args, kwargs)
        known = _AGREED.get(signature)
        if known is not None and any(map(is_traced, plain)):
            return known
        agrees = same_values(found, plain)
        if signature is not None:
            _AGREED.put(signature, agrees)
        return agrees

    def _refused(self, func: Callable[..., Any], call: MixedCall, output: Any, lost: Lost) -> Any:
        """Returns a result that raises an error once it is differentiated."""
        weights = list(call.weights.values())
        error: Exception
        if lost.why == "mixed":
            error = mixed_samples(lost.reason)
        elif lost.why == "unknown":
            error = unknown_samples(lost.reason)
        elif lost.why == "total" and not any(la.has_samples for la in call.inputs.values()):
            error = UnsupportedFunctionError(
                f"a term of the loss depends only on parameter {' and '.join(w.name for w in weights)}, as "
                "a weight penalty does, and belongs to no sample; leave it out of this loss and add its "
                "gradient yourself"
            )
        else:
            error = unsupported(func, weights, lost.reason)
        self._refusal = self._refusal or error
        flat, spec = internals.pytree.tree_flatten(output)
        results = refused(error, weights[0].anchor, flat)
        for t in results:
            self.tracker.mark(t, lost)
        return internals.pytree.tree_unflatten(results, spec)
