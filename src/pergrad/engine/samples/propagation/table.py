"""Maps names of torch functions to handlers that give the layouts of their outputs."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Layout, Lost, Owners, Samples, Scope, Why
from pergrad.engine.samples.origins import Origin
from pergrad.engine.samples.shares import origin_of_one
from pergrad.errors import MixedSamplesError
from pergrad.rules import RULES
from pergrad.rules.samples import DECLARED, LikeFunction, Movement
from pergrad.runtime import internals, is_traced
from pergrad.runtime.caches import cached

__all__ = [
    "HANDLERS",
    "Call",
    "Handler",
    "handler_of",
    "is_by_value",
    "is_own",
    "is_trusted",
    "mixed_samples",
    "moves_declared",
    "moves_samples",
    "name_of",
    "refuse_gradients",
    "refuse_lost",
    "refuse_mixed_samples",
    "refuse_unknown_samples",
    "tensors_in",
    "unknown_samples",
]

_ARITHMETIC = frozenset(
    "add sub mul div truediv floordiv mod pow matmul and or xor lshift rshift".split()
)


def tensors_in(*values: Any) -> list[Tensor]:
    """Returns the tensors among arguments or results, also inside lists, tuples and dicts."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


# Functions of C: only torch's own reach a recorder.
_COMPILED = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)
_PACKAGES = frozenset(["torch", "pergrad"])


@cached("whether a function is torch's own, by function")
def is_own(func: Callable[..., Any]) -> bool:
    """Whether a function belongs to torch or to this package: only then does its name say what it does.

    Others may have any name: a user's function that dispatches by `__torch_function__`, an
    autograd.Function, a custom operator.
    """
    if isinstance(func, _COMPILED):
        return True
    if isinstance(func, types.FunctionType):
        # Both a decorator and what it decorates: `wrap_torch_function` makes no function torch's own.
        inner = getattr(func, "__wrapped__", None)
        is_here = str(func.__globals__.get("__name__")).partition(".")[0] in _PACKAGES
        return is_here and (inner is None or is_own(inner))
    if getattr(func, "__module__", None) in internals.OWN_OPERATORS:
        return True
    return not hasattr(func, "function") and type(func).__module__.startswith("pergrad.")


def is_trusted(func: Callable[..., Any]) -> bool:
    """Whether an answer for one call of a function holds for all calls of the same signature.

    So it does for torch's own functions and for functions with a rule. Any other may depend on values, or on
    anything else.
    """
    return is_own(func) or func in RULES or getattr(func, "function", None) in RULES


@cached("names of operations, by function")
def name_of(func: Callable[..., Any]) -> str:
    """Returns one name for the function, method, operator, property and in-place forms of an operation.

    The name of a function that is not torch's own has its module in front, and so equals none of torch's.
    """
    name: str = func.__name__
    if not is_own(func):
        full: str = getattr(func, "__qualname__", name)
        if "::" in full:  # a custom operator
            return full
        return f"{getattr(func, '__module__', None) or 'unknown'}.{full}"
    if name == "__get__":
        return str(func.__self__.__name__)  # type: ignore[attr-defined]
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        return name[1:] if name[0] in "ir" and name[1:] in _ARITHMETIC else name
    return name[:-1] if name.endswith("_") else name


class Call:
    """Holds one call of a torch function: its arguments, its outputs and the layouts of its tensors."""

    __slots__ = (
        "_looked_at",
        "_with_samples",
        "args",
        "flows",
        "func",
        "hints",
        "is_of_weights",
        "is_overruled",
        "kwargs",
        "layouts",
        "leaves_data",
        "outputs",
        "reads_values",
        "scope",
        "tensors",
    )

    def __init__(
        self,
        scope: Scope,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[Tensor],
        tensors: list[Tensor],
        layouts: list[Layout],
        flows: bool | None = None,
        hints: Sequence[Layout | None] = (),
    ) -> None:
        self.scope = scope
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.outputs = outputs
        self.tensors = tensors
        self.layouts = layouts  # of the tensors
        self.hints = hints or [None] * len(outputs)  # layouts of the outputs that are not proved
        # Whether a gradient will flow through the outputs; given if weights are used on the arguments.
        self.is_of_weights = bool(flows)
        if flows is None:
            flows = torch.is_grad_enabled() and any(t.requires_grad for t in outputs)
        self.flows = flows
        self._with_samples = cast(
            list[tuple[Tensor, Samples | Owners]],
            [(t, layout) for t, layout in zip(tensors, layouts, strict=True) if layout.has_samples],
        )
        self._looked_at: list[
            int
        ] = []  # ids of the tensors whose layouts the handler has asked for
        self.reads_values = False  # whether the handler's answer depends on the values of tensors
        self.leaves_data = False  # whether it has written rows beside data of other samples
        self.is_overruled = False  # whether the graph gives another answer than the handler

    @property
    def name(self) -> str:
        return name_of(self.func)

    @property
    def output(self) -> Tensor:
        return self.outputs[0]

    @property
    def has_samples(self) -> bool:
        return bool(self._with_samples)

    @property
    def with_samples(self) -> list[tuple[Tensor, Samples | Owners]]:
        """Returns the arguments with samples, and their layouts; a handler that reads them knows all."""
        self._looked_at += [id(t) for t, _ in self._with_samples]
        return self._with_samples

    @property
    def is_accounted_for(self) -> bool:
        """Whether the handler has asked for the layout of every argument with samples and a gradient.

        The others are data: whatever they are, no gradient flows through them.
        """
        return all(
            self._looked_at.count(id(t)) >= sum(t is other for other, _ in self._with_samples)
            for t, _ in self._with_samples
            if t.requires_grad
        )

    @property
    def of_one(self) -> Owners | None:
        """Returns the layout of an argument if all samples among the arguments are the same one."""
        first: Owners | None = None
        for _, layout in self._with_samples:
            if not isinstance(layout, Owners) or not layout.is_one or not len(layout.owner):
                return None
            if first is not None:
                with internals.outside_of_trace():
                    if not torch.equal(first.owner[:1], layout.owner[:1]):
                        return None
            first = first or layout
        return first

    @property
    def has_scalars(self) -> bool:
        """Whether an argument is a scalar of one sample."""
        return any(not t.dim() for t, _ in self._with_samples)

    def without_scalars(self) -> Call:
        """Returns the call with scalars of one sample as terms of a sum over samples."""
        reason = "a scalar of one sample"
        layouts = [
            layout
            if t.dim() or not layout.has_samples
            else self.scope.total(reason, origin_of_one(t, self.scope))
            if t.requires_grad
            else self.scope.constant()
            for t, layout in zip(self.tensors, self.layouts, strict=True)
        ]
        return Call(
            self.scope,
            self.func,
            self.args,
            self.kwargs,
            self.outputs,
            self.tensors,
            layouts,
            self.flows,
            self.hints,
        )

    def take_answer_of(self, copy: Call) -> None:
        """Takes over what a handler has looked at in a copy of the call."""
        self.reads_values |= copy.reads_values
        self.is_overruled |= copy.is_overruled
        self.leaves_data |= copy.leaves_data
        self._looked_at += copy._looked_at

    def layout(self, t: Tensor) -> Layout:
        """Returns the layout of one of the arguments."""
        self._looked_at.append(id(t))
        for own, layout in zip(self.tensors, self.layouts, strict=True):
            if own is t:
                return layout
        return self.scope.constant()

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        return self.args[position] if len(self.args) > position else default

    def lost(self, reason: str) -> Layout:
        """Returns a layout for elements that were only moved, so that no dimension has the samples."""
        if self.scope.count == 1 and self.output.dim():
            return self._single_sample()
        return self.scope.lost(f"`{self.name}` {reason}")

    def after_select(self, part: Tensor, layout: Samples | Owners, index: int) -> Layout:
        """Returns the layout of `part`, one index of the sample dimension of a tensor."""
        if not part.dim() and not part.requires_grad:
            return self.scope.constant()
        owner = layout.owner_of_each(part.device)[index]
        return Owners(self.scope, 0, owner.reshape(1), True).of_one(part)

    def _single_sample(self) -> Layout:
        return self.scope.samples(0, 1, self.output.shape[0])

    def mixed(self, reason: str = "mixes the samples of the batch") -> Layout:
        """Returns a layout for mixed samples: an error once a gradient flows, a constant if none does."""
        return self._fatal(f"`{self.name}` {reason}", "mixed")

    def unknown(self, reason: str) -> Layout:
        """Returns a layout for samples that may have met: an error once a gradient flows."""
        return self._fatal(f"`{self.name}` {reason}", "unknown")

    def _fatal(self, reason: str, why: Why) -> Layout:
        if not self.flows:
            return self.scope.constant()
        if self.scope.count == 1 and self.output.dim():
            return self._single_sample()
        return self.scope.lost(reason, why)

    def agreed(self, layouts: Sequence[Samples | Owners]) -> Layout:
        """Returns the common layout of the arguments, given in dimensions of the output; mixed if none.

        Data that was moved beside data in order, as for mixup, is the context of the samples there.
        """
        if not layouts:
            return self.scope.constant()
        found = layouts[0]
        for layout in layouts[1:]:
            if layout == found:
                continue
            if layout.dim != found.dim or not self._same_owners(layout, found):
                return self.mixed() if self.flows else self._in_order(layouts)
            found = layout if isinstance(layout, Samples) else found
        return found

    def _in_order(self, layouts: Sequence[Samples | Owners]) -> Layout:
        first = next((la for la in layouts if isinstance(la, Samples)), None)
        is_told = first is not None and all(
            la == first
            if isinstance(la, Samples)
            else la.dim == first.dim and la.size == first.size
            for la in layouts
        )
        return first if first is not None and is_told else self.scope.constant()

    def _same_owners(self, a: Samples | Owners, b: Samples | Owners) -> bool:
        if isinstance(a, Owners) and isinstance(b, Owners) and a.owner is b.owner:
            return True
        if isinstance(a, Samples) and isinstance(b, Samples):  # which are not equal here
            return self.scope.count == 1
        device = self.output.device
        of_a, of_b = a.owner_of_each(device), b.owner_of_each(device)
        if is_traced(of_a) or is_traced(of_b):
            self.scope.misplaced.append((of_a != of_b).any())
            return True
        return torch.equal(of_a, of_b)

    def total(self, origin: Origin | None = None) -> Layout:
        """Returns the layout of a sum over the samples, such as a loss: each term has its own gradient."""
        if self.flows:
            return self.scope.total(f"`{self.name}` reduces over the batch", origin)
        return self.scope.constant()


def refuse_lost(t: Tensor, layout: Layout) -> None:
    """Makes a gradient that reaches a tensor with mixed or unknown samples an error."""
    if isinstance(layout, Lost) and layout.is_fatal and layout.scope.count > 1:
        refuse = refuse_mixed_samples if layout.why == "mixed" else refuse_unknown_samples
        refuse_gradients(t, functools.partial(refuse, layout.reason))


def refuse_gradients(t: Tensor, refuse: Callable[[Tensor], None]) -> None:
    """Calls `refuse`, which raises, when a gradient reaches `t`."""
    # Reading `grad_fn` renews the graph of a view of a tensor that was written to; torch crashes without.
    # Inside of an autograd.Function a result has no graph yet, and would lose the hook.
    if t.requires_grad and t.grad_fn is not None:
        t.register_hook(refuse)


def mixed_samples(reason: str) -> MixedSamplesError:
    return MixedSamplesError(
        f"{reason}, and the loss depends on its result, so no sample has a gradient of its own. Compute "
        "each term of the loss from one sample only, or compute the part that mixes samples under "
        "torch.no_grad()"
    )


def refuse_mixed_samples(reason: str, _: Tensor) -> None:
    """Raises an error when a gradient reaches a tensor with mixed samples; a backward hook."""
    raise mixed_samples(reason)


def unknown_samples(reason: str) -> MixedSamplesError:
    return MixedSamplesError(
        f"{reason}, so that it is unknown which sample each row belongs to, and the loss depends on it. Keep "
        "the samples in one dimension, or compute this part under torch.no_grad()"
    )


def refuse_unknown_samples(reason: str, _: Tensor) -> None:
    """Raises an error when a gradient reaches a tensor whose samples are unknown; a backward hook."""
    raise unknown_samples(reason)


Handler: TypeAlias = Callable[[Call], Layout | Sequence[Layout] | None]
H = TypeVar("H", bound=Handler)
HANDLERS: dict[str, Handler] = {}
_BY_VALUE: set[str | type[Movement]] = set()
_OF_DECLARED: dict[type[Movement], Callable[..., Any]] = {}


@cached("how a function moves samples, by function")
def handler_of(func: Callable[..., Any]) -> Handler | None:
    """Returns the handler for a function's declaration, or else for its name."""
    declared = DECLARED.get(func)
    if isinstance(declared, LikeFunction):
        return handler_of(declared.function)
    if declared is not None:
        return functools.partial(_OF_DECLARED[type(declared)], declared)
    return HANDLERS.get(name_of(func))


def is_by_value(func: Callable[..., Any]) -> bool:
    """Whether the layouts of its outputs depend on values, so that they hold for one call only."""
    declared = DECLARED.get(func)
    return (name_of(func) if declared is None else type(declared)) in _BY_VALUE


def moves_samples(*names: str, by_value: bool = False) -> Callable[[H], H]:
    """Registers a handler for the named operations; a handler returns None if it does not know the layout.

    `by_value`: see `is_by_value`.
    """

    def register(handler: H) -> H:
        for name in names:
            HANDLERS[name] = handler
        if by_value:
            _BY_VALUE.update(names)
        return handler

    return register


D = TypeVar("D", bound=Callable[..., Any])


def moves_declared(kind: type[Movement], *, by_value: bool = False) -> Callable[[D], D]:
    """Registers a handler for declarations of that kind; it takes the declaration and the call."""

    def register(handler: D) -> D:
        _OF_DECLARED[kind] = handler
        if by_value:
            _BY_VALUE.add(kind)
        return handler

    return register
