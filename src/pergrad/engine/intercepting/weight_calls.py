"""Computes functions of weights: chooses how the gradients of each use are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from pergrad.engine.collecting.journal import Journal, Rung
from pergrad.engine.intercepting.autograd_functions import Applied
from pergrad.engine.intercepting.composites import is_composite, without_override_check
from pergrad.engine.intercepting.derivation import (
    attach,
    derive,
    explicit_cast,
    look_up,
    mask,
    scale,
    transform,
)
from pergrad.engine.intercepting.ladder import (
    MixedCall,
    agrees_elsewhere,
    by_broadcast,
    by_masked_vjp,
    by_vmap,
    expanded,
    refused,
    run_under_autograd,
    same_values,
    valued,
    with_strides_of,
)
from pergrad.engine.intercepting.overwriting import Overwriting
from pergrad.engine.intercepting.rule_calls import call_with_rule, qualified_name, unsupported
from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.intercepting.weights import Weight, refuse_ordinary_gradients
from pergrad.engine.samples.layouts import Constant, Layout, Lost, Owners, Samples, samples_back
from pergrad.engine.samples.propagation import (
    ELEMENTWISE,
    mixed_samples,
    name_of,
    sizes_in,
    tensors_in,
    unknown_samples,
)
from pergrad.engine.samples.propagation.in_place import out_of_place
from pergrad.engine.samples.signatures import describe, signature_of_call
from pergrad.engine.samples.sizes import BatchSize
from pergrad.errors import UnsupportedFunctionError
from pergrad.rules import DECLARING, DECOMPOSITIONS, RULES
from pergrad.rules.samples import DECLARED
from pergrad.runtime import internals, is_traced
from pergrad.runtime.caches import Cache
from pergrad.runtime.containers import map_parts, parts_of, refilled

__all__ = ["WeightCalls"]

_STRIDES: Cache[list[tuple[int, ...]]] = Cache(
    __name__, "strides of results, by a call's shapes, strides and plain arguments"
)
_AGREED: Cache[bool] = Cache(__name__, "whether vmap of a call gave its values, by signature")
# Functions whose input may lack a batch dimension, and the number of dimensions that it has then.
_UNBATCHED: dict[Any, int] = {
    F.linear: 1,
    F.conv1d: 2,
    F.conv2d: 3,
    F.conv3d: 4,
    F.conv_transpose1d: 2,
    F.conv_transpose2d: 3,
    F.conv_transpose3d: 4,
}
_REPEATS = frozenset("expand broadcast_to repeat tile".split())
_JOINS = frozenset("cat concat concatenate stack".split())


def _describe_strides(t: Tensor, parts: list[Any]) -> bool:
    parts += t.shape, t.stride(), t.dtype
    return True


def _is_differentiable(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


class WeightCalls(TorchFunctionMode):
    """Computes the functions of weights of one scope; the functions that these call come back to the mode."""

    tracker: Tracker
    journal: Journal | None = None
    refusal: Exception | None = None  # the first error that a backward would raise
    _made_overwriting: Overwriting | None = None
    _body: Callable[..., Any] | None = None  # the function of torch whose body runs

    @property
    def overwriting(self) -> Overwriting:
        if self._made_overwriting is None:
            self._made_overwriting = Overwriting(self.tracker)
        return self._made_overwriting

    def _refresh_views(
        self, func: Callable[..., Any], tensors: Sequence[Tensor], tags: Sequence[Any]
    ) -> bool:
        """Gives weights that are views of overwritten ones their new values; returns False without any."""
        if not self.overwriting.has_written:
            return False
        stale = [k for k, tag in enumerate(tags) if tag.is_weight and tag.is_stale]
        for k in stale:
            self.overwriting.refresh(self.call_on_weights, func, tensors[k], tags[k])
        return bool(stale)

    def call_on_weights(
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
        if internals.level_of_transform() is not None or internals.forward_level() >= 0:
            weights = [w for t in tensors_in(args, kwargs) if (w := self.tracker.weight_of(t))]
            raise unsupported(
                func,
                weights,
                "torch.func or forward-mode differentiation transforms this call, or torch.vmap maps another "
                "dimension than that of the samples: write this dimension out, or map the samples",
            )
        cast = explicit_cast(func, args, kwargs)
        if cast is not None:
            with self:
                return cast()
        if self._is_alone(key, args):
            with self:
                return func(args[0].unsqueeze(0), *args[1:], **kwargs).squeeze(0)
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
                self.note_use(func, args, kwargs, "rule")
                return output
        elif is_composite(func) and func not in DECLARED and func is not self._body:
            return self._by_body(func, args, kwargs)
        if out_of_place(func) is not None:
            return self.overwriting.write(self.call_on_weights, func, args, kwargs)
        if not has_samples:
            return self._derived(func, args, kwargs)
        return self._mixed(func, args, kwargs)

    def _by_body(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs the Python body of a function of torch, whose inner calls are recorded.

        A helper of it, as of `torch.meshgrid`, may ask for overrides again: it gets the next method.
        """
        outer, self._body = self._body, func
        try:
            with self:
                return without_override_check(func)(*args, **kwargs)
        finally:
            self._body = outer

    def _with_own_strides(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Returns the output with the strides that the function itself gives it: a `view` may need them."""
        found = tensors_in(output)
        if not found or is_traced(found[0]) or (output is found[0] and output.is_contiguous()):
            return output
        # Not the tracker's signature: strides depend neither on the samples nor on which weights are frozen.
        key = signature_of_call(func, 0, args, kwargs, _describe_strides, describe)
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
            return map_parts(with_strides, output)

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
            given, named = map_parts(described, (args, kwargs))
            try:
                return [tuple(t.stride()) for t in tensors_in(func(*given, **named))]
            except (RuntimeError, NotImplementedError):  # not on meta tensors
                return []

    def note_use(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], rung: Rung
    ) -> None:
        if self.journal is not None:
            weights = [w for t in tensors_in(args, kwargs) if (w := self.tracker.weight_of(t))]
            self.journal.note(weights, qualified_name(func), rung)

    def _is_alone(self, key: Any, args: tuple[Any, ...]) -> bool:
        """Whether the input of a layer is one sample without a batch dimension, as in a loop over samples."""
        rank = _UNBATCHED.get(key)
        if rank is None or not args or not isinstance(args[0], Tensor) or args[0].dim() != rank:
            return False
        tag = self.tracker.tag(args[0])
        return isinstance(tag, Owners) and tag.is_one

    def _suits_rules(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the arguments are real, and none is a vector of one sample: rules expect a batch dimension.

        For complex numbers, autograd conjugates what a gradient needs.
        """
        for t in tensors_in(args, kwargs):
            if t.is_complex():
                return False
            tag = self.tracker.tag(t) if t.dim() <= 1 else None
            if isinstance(tag, Owners) and tag.is_one:
                return False
        return True

    def _has_samples(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether any argument is neither a weight nor a constant; a detached statistic is one."""
        return any(self._is_of_samples(t) for t in tensors_in(args, kwargs))

    def _is_of_samples(self, t: Tensor) -> bool:
        layout = self.tracker.layout(t)
        if isinstance(layout, Lost):
            return t.requires_grad
        return not isinstance(layout, Constant)

    def _derived(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a function of weights and constants, whose results are weights."""
        self.note_use(func, args, kwargs, "derived")
        beside = self._beside(func, args, kwargs)
        first = self.tracker.weight_of(args[0]) if args and isinstance(args[0], Tensor) else None
        if first is not None:
            if name_of(func) in _REPEATS and any(True for _ in sizes_in((args[1:], kwargs))):
                return self._repeated(func, first, args, kwargs)
            if sum(isinstance(t, Tensor) for t in tensors_in(args, kwargs)) == 1:
                lazy = transform(func, first, args, kwargs)
                if lazy is not None:
                    return args[0] if lazy is first else self._as_weight(lazy, args[0], beside)
        for lazily in (look_up, scale, mask):
            lazy = lazily(func, args, kwargs, self.tracker.weight_of)
            if lazy is not None:
                lazy = attach(lazy, func, args, kwargs, self.tracker.weight_of)
                return self._as_weight(lazy, None, beside)
        result, weights = derive(func, args, kwargs, self.tracker.weight_of)

        def marked(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            if id(t) in weights:
                base = args[0] if first is not None else None
                return self._as_weight(weights[id(t)], base, beside)
            self.tracker.mark(t, self.tracker.constant)
            return t

        return map_parts(marked, result)

    def _beside(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str:
        """Says which constant of a derived weight has the shape of samples; empty if none has."""
        found = ""
        for t in tensors_in(args, kwargs):
            weight = self.tracker.weight_of(t)
            if weight is not None:
                found = found or weight.beside
            elif self.tracker.could_have_samples(t):
                shape = tuple(t.shape)
                return f"`{qualified_name(func)}` got a tensor of shape {shape}"
        return found

    def _as_weight(self, weight: Weight, base: Tensor | None, beside: str = "") -> Tensor:
        """Returns a tensor tagged as the weight, for the model; an ordinary gradient for it is an error.

        `base` is the tensor that it is a view of, if it is one.
        """
        if base is not None and weight.is_view:
            self.overwriting.note_view(base, weight)
        t = weight.value.detach()
        if _is_differentiable(t):
            weight.beside = beside
            refuse_ordinary_gradients(
                t.requires_grad_(), weight.roots, self._may_reach_weights, beside
            )
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
        self.note_use(func, args, kwargs, "expanded")
        count = self.tracker.scope.count
        sizes = parts_of((args[1:], tuple(kwargs.values())))
        sizes = [s for s in sizes if isinstance(s, int)]
        dim = next(d for d, size in enumerate(sizes) if isinstance(size, BatchSize))
        own = [int(s) // count if d == dim else int(s) for d, s in enumerate(sizes)]
        whole = func(weight.value, *args[1:], **kwargs)
        (each,) = internals.vmapped(lambda w: [func(w, own)], [expanded(weight)], [0], count)
        layout = self.tracker.scope.samples(dim, 1, whole.shape[dim] // count)
        output = samples_back(each, layout)
        self.tracker.mark(output, layout)
        return output

    def _with_repeats_of_samples(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Gives each sample its own repeat of weights that were expanded to the batch; None without any.

        A size that einops has cached does not say that it counts samples. What is joined lies in line with
        the samples, so a weight with as many equal rows there (stride zero) was repeated for them.
        """
        tracker, found = self.tracker, tensors_in(args, kwargs)
        layouts = [tracker.layout(t) for t in found]
        dims = {la.dim for la in layouts if isinstance(la, Samples) and la.pre == 1}
        along = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
        if len(dims) != 1 or (name_of(func) != "stack" and along % found[0].dim() in dims):
            return None
        (dim,) = dims
        size = next(t.shape[dim] for t, la in zip(found, layouts, strict=True) if la.has_samples)

        def is_repeat(t: Any) -> bool:
            weight = tracker.weight_of(t) if isinstance(t, Tensor) and t.dim() > dim else None
            if weight is None or not t.shape[dim] == size > 1 or t.stride(dim) != 0:
                return False  # rows of its own, or as many as there are by chance
            own = [root.value for root in tracker.roots.values() if root.name in weight.roots]
            return all(0 not in value.stride() for value in own)

        def own(t: Any) -> Any:
            if not is_repeat(t):
                return t
            sizes = [BatchSize(n) if k == dim else n for k, n in enumerate(t.shape)]
            one = self._derived(torch.narrow, (t, dim, 0, 1), {})
            return self._derived(Tensor.expand, (one, sizes), {})

        return map_parts(own, (args, kwargs)) if any(map(is_repeat, found)) else None

    def _may_reach_weights(self) -> bool:
        return self.tracker.scope.may_reach_weights

    def _mixed(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a function of weights and samples without a rule, by the first rung that works."""
        tracker = self.tracker
        if name_of(func) in _JOINS:
            joined = self._with_repeats_of_samples(func, args, kwargs)
            if joined is not None:
                with self:
                    return func(*joined[0], **joined[1])
        call = MixedCall(func, args, kwargs, self.tracker.weight_of, tracker.layout)
        if any(w.value.layout is not torch.strided for w in call.weights.values()):
            raise unsupported(func, call.weights.values(), "its values are sparse")
        if name_of(func) in ELEMENTWISE:
            output = by_broadcast(call)
            if output is not None:
                self.note_use(func, args, kwargs, "broadcast")
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
        flat = parts_of(run.result)
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
        if results is None or not self._agree(call, args, kwargs, results, plain, layouts, places):
            results, rung = by_masked_vjp(run, plain, layouts), "masked VJP"
        else:
            results = valued(results, plain, layouts)
        self.note_use(func, args, kwargs, rung)
        for k, t, layout in zip(places, results, layouts, strict=True):
            flat[k] = with_strides_of(t, plain[places.index(k)].stride())
            tracker.mark(flat[k], layout)
        return refilled(run.result, flat)

    def _agree(
        self,
        call: MixedCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: Sequence[Tensor],
        plain: Sequence[Tensor],
        layouts: Sequence[Layout],
        places: Sequence[int],
    ) -> bool:
        """Whether vmap gives the function's values; for the first call of a signature, for other weights too.

        A traced call has no values: it takes the answer of an earlier call with the same signature.
        """
        _, _, signature = self.tracker.read(call.func, args, kwargs)
        known = _AGREED.get(signature)
        has_values = not any(map(is_traced, plain))
        if known is not None and not has_values:
            return known
        agrees = same_values(found, plain)
        if agrees and not known and has_values:
            with internals.DisableTorchFunction():
                agrees = agrees_elsewhere(call, layouts, places)
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
            names = " and ".join(dict.fromkeys(name for w in weights for name in w.roots))
            one = "; if the module runs for one sample after the other, pass batch_size="
            error = UnsupportedFunctionError(
                f"a term of the loss depends only on parameter {names}, as a weight penalty does, and "
                "belongs to no sample; leave it out of this loss and add its gradient yourself"
                + (one if self.tracker.scope.count == 1 else "")
            )
        else:
            error = unsupported(func, weights, lost.reason)
        self.refusal = self.refusal or error
        flat = parts_of(output)
        places = [k for k, t in enumerate(flat) if isinstance(t, Tensor)]
        results = refused(error, weights[0].anchor, [flat[k] for k in places])
        for k, t in zip(places, results, strict=True):
            self.tracker.mark(t, lost)
            flat[k] = t
        return refilled(output, flat)
