"""Collects the factors of each parameter and reduces them as soon as the last one has arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from pergrad.distributed.spread import Spread
from pergrad.errors import ScopeError
from pergrad.factors import Dense, Factor
from pergrad.quantities import Batch, Quantity
from pergrad.reductions import SampleGradients, gradients_of
from pergrad.runtime import internals, wide, without_autocast
from pergrad.runtime.bounds import bound_of_trace, default_bound
from pergrad.runtime.queue import Queue

__all__ = ["Ledger", "Sink", "UseCounter"]


class Sink(Protocol):
    """Receives the factors of a recording."""

    passes: int  # number of backward passes for each one that the user calls
    queue: Queue

    def expects(self, name: str) -> bool: ...

    def add(self, name: str, factor: Factor) -> None: ...


class _Counted(Protocol):
    """Declares what the counter reads from a weight."""

    @property
    def counted(self) -> tuple[str, ...]:
        """Names of the parameters that a use of the weight counts for."""


class UseCounter:
    """Counts the uses of each parameter in the forward pass and the factors that have arrived for them."""

    def __init__(self) -> None:
        self._expected: dict[str, int] = {}
        self._to_recompute: dict[str, int] = {}
        self.arrived: dict[str, int] = {}

    def expect(self, weights: Iterable[_Counted]) -> None:
        """Counts one use of each weight.

        A use inside a backward pass is a checkpoint's recomputation and is not counted. Its first run was
        counted, or it ran without gradients; then its factor is reduced on arrival.
        """
        if internals.current_graph_task_id() == -1:
            expected = self._expected
            for weight in weights:
                for name in weight.counted:
                    expected[name] = expected.get(name, 0) + 1

    def expect_in_recomputation(self, names: Iterable[str]) -> None:
        """Counts a use without gradients, which a reentrant checkpoint may repeat in the backward pass."""
        for name in names:
            self._to_recompute[name] = self._to_recompute.get(name, 0) + 1

    def arrive(self, name: str) -> bool:
        """Counts a factor that has arrived; returns whether it is the last one."""
        arrived = self.arrived[name] = self.arrived.get(name, 0) + 1
        return arrived >= self._expected.get(name, 0) and name not in self._to_recompute

    @property
    def to_recompute(self) -> int:
        """Returns the number of uses without gradients."""
        return sum(self._to_recompute.values())

    def is_recomputed_once(self, name: str) -> bool:
        """Whether one reentrant checkpoint holds the only use."""
        return self._to_recompute.get(name) == 1 and name not in self._expected


class Ledger:
    """Holds the factors of each parameter in a recording and feeds the quantities."""

    def __init__(
        self,
        quantities: Sequence[Quantity],
        batch_size: int,
        parameters: Mapping[str, Tensor],
        *,
        scale: Tensor | float = 1.0,
        max_bytes: int | None = None,
        offload: bool = False,
        hooks: Mapping[str, Sequence[Callable[[Tensor], Tensor | None]]] | None = None,
        spread: Spread | None = None,
    ) -> None:
        first = next(iter(parameters.values()), None)
        self._shards = None if spread is None else spread.shards
        self._device = torch.device("cpu") if first is None else first.device
        if self._shards is not None:
            self._device = self._shards.device or self._device
        self._is_traced = isinstance(first, internals.FakeTensor)
        self.uses = UseCounter()
        # Rules may read weights, which are sharded again when a deferred rule runs.
        self._pieces = None if spread is None else spread.tensor_parallel
        may_defer = not self._is_traced and self._shards is None and self._pieces is None
        if max_bytes is None:
            bound_of = bound_of_trace if self._is_traced else default_bound
            max_bytes = bound_of(self._device)
        self.queue = _queue_for(self._device, may_defer, max_bytes)
        self.is_paused = False  # True while a backward pass runs that is not recorded
        self._quantities = sorted(quantities, key=_priority)
        self.passes = max([q.passes for q in quantities])
        self._batch = Batch(batch_size, parameters, offload, self.queue, spread or Spread())
        self.units = self._batch.units
        self.units.scale = scale
        self.calls: str | None = (
            None  # what several calls of the module are; "same": reduced at the end
        )
        self._passed: set[int] = set()  # calls that earlier backward passes have reached
        self.passed_alone: frozenset[int] = frozenset()  # the same, while there was only one call
        self.skips_sums = True  # whether a loss that is a plain sum over the samples needs no look
        self._hooks = hooks or {}  # of the user, on the gradients of parameters
        self._pass = 0
        self._reduced: set[str] = set()
        self._summed: set[str] = set()  # sharded parameters that were summed over ranks
        self._late: set[str] = set()  # those of them that got gradients later
        self._factors: dict[str, list[Factor]] = {}
        self._is_open = False

    def open(self) -> None:
        """Starts to take factors."""
        self._pass = 0
        self._is_open = True
        for quantity in self._quantities:
            quantity.begin(self._batch)

    def add(self, name: str, factor: Factor) -> None:
        """Takes one factor and reduces the parameter after the last; must run outside of autocast."""
        if self.expects(name):
            if self._pieces is not None:
                factor = self._pieces.factor(name, factor)
            self._factors.setdefault(name, []).append(factor)
            if self.uses.arrive(name) and self.calls != "same":
                self._reduce(name)

    def expects(self, name: str) -> bool:
        """Whether a gradient that arrives now is recorded; raises an error after the block has ended."""
        if self.is_paused:
            return False
        if not self._is_open:
            raise ScopeError(
                f"a gradient of parameter {name!r} arrived outside of its scope; call backward() "
                "inside the `record` block, or, with call_for_per_sample_grads, on a loss of the tensors "
                "that the call returned"
            )
        return True

    def _reduce(self, name: str) -> None:
        factors, bound = self._factors.pop(name), self.queue.bound
        if name in self._summed:
            self._late.add(name)  # raised when the block ends, on all ranks
            return
        gradients = SampleGradients(factors, self.units.scale, bound=bound)
        parameter = self._batch.parameters[name]
        if gradients.dtype.is_complex or parameter.is_complex():
            gradients = gradients_of(parameter, factors, self.units.scale, bound)
        if name in self._hooks:
            changed = _changed_by(self._hooks[name], gradients.materialize(parameter.dtype))
            gradients = gradients_of(parameter, [Dense(changed)], 1.0, bound)
        whole: SampleGradients | None = None
        for quantity in self._quantities:
            if self._pass < self.passes - quantity.passes:
                continue
            if name in self._reduced and not quantity.is_linear:
                raise ScopeError(
                    f"a second backward in the `record` block adds to parameter {name!r}, but "
                    f"{type(quantity).__name__} was already computed from the first; add the losses up and "
                    "call backward() once, use one block per backward, or, for a second call of the "
                    'module, pass calls="same" or calls="more"'
                )
            if quantity.takes_shards or self._pieces is None or name not in self._pieces.pieces:
                quantity.consume(name, gradients)
                continue
            if whole is None:
                whole = self._whole(name, factors, bound)
            quantity.consume(name, whole)
        self._reduced.add(name)

    def _whole(self, name: str, factors: Sequence[Factor], bound: int) -> SampleGradients:
        """Returns the gradients of the whole parameter, of which every rank has those of a shard."""
        assert self._pieces is not None
        own = SampleGradients(factors, self.units.scale, bound=bound)
        rows = self._pieces.pieces[name].whole_rows(own.materialize(wide(own.dtype)))
        found = SampleGradients([Dense(rows)], 1.0, bound=bound)
        found.dtype = own.dtype
        return found

    def end_backward(self, reached: set[int]) -> None:
        """Refuses a backward pass through calls of the module that no earlier one has reached.

        Their rows may be the same samples, or others.
        """
        passed = self._passed | self.passed_alone
        if passed and reached and not reached & passed and self.calls is None:
            raise ScopeError(
                "two calls of the module are backpropagated apart in one `record` block: pass "
                'calls="same" if their rows are the same samples, calls="more" if they are further ones, or '
                "give each a block of its own"
            )
        self._passed |= reached
        reached.clear()

    def end_recomputation(self) -> None:
        """Reduces the parameters that only one reentrant checkpoint uses, after its inner backward pass."""
        self.queue.drain()
        self._reduce_those([name for name in self._factors if self.uses.is_recomputed_once(name)])

    def sum_over_ranks(self, names: Iterable[str]) -> None:
        """Sums the quantities of sharded parameters over ranks; all ranks call it in the same order."""
        summing = [q for q in self._quantities if q.sums_over_ranks]
        if self._shards is None or not summing or self._pass < self.passes - 1:
            return
        names = [name for name in names if name not in self._summed]
        with torch.no_grad(), without_autocast(self._device):
            for name in names:
                if name in self._factors:
                    self._reduce(name)  # the loss does not depend on all of its uses
                for quantity in summing:
                    quantity.sum_over_ranks(name)
        self._summed.update(names)
        self._shards.summed(names)

    def _sum_rest_over_ranks(self) -> None:
        """Sums what is left over ranks; raises an error on all ranks if a gradient came too late on one."""
        if self._shards is None or not any(q.sums_over_ranks for q in self._quantities):
            return
        for names in self._shards.groups_of(self._shards.names):
            self.sum_over_ranks(names)
        if self._shards.count(len(self._late)):
            raise ScopeError(
                f"gradients of {sorted(self._late) or 'a parameter, on another rank,'} arrived after their "
                "module's parameters were summed over ranks: within fully_shard, use a parameter only in the "
                "forward of the module that shards it, and call backward() once in a `record` block"
            )

    def end_pass(self) -> None:
        """Ends a backward pass that is not the last."""
        if self._pass == self.passes - 1:
            raise ScopeError(
                f"a second backward in the `record` block cannot be recorded, because the first one was run "
                f"{self.passes} times; add the losses up and call backward() once, or use "
                'memory="kept"'
            )
        self._reduce_all()
        for quantity in self._quantities:
            if self._pass >= self.passes - quantity.passes:
                quantity.end_pass()
        self._pass += 1
        self._forget()

    def _reduce_all(self) -> None:
        """Reduces the remaining parameters, some of whose uses the loss does not depend on."""
        if self.queue.work:
            self.queue.drain()
        if self._factors:
            self._reduce_those(list(self._factors))
            self.queue.drain()

    def _reduce_those(self, names: Sequence[str]) -> None:
        with without_autocast(self._device):
            for name in names:
                self._reduce(name)

    def close(self) -> None:
        """Reduces the remaining parameters and ends the quantities."""
        try:
            self._reduce_all()
            self._sum_rest_over_ranks()
            self._is_open = False
            is_on = internals.is_any_autocast_enabled()
            with without_autocast(self._device) if is_on else nullcontext():
                for quantity in self._quantities:
                    quantity.end()
                    quantity.is_full = True
                    if not self._is_traced:
                        quantity.settle()
        except BaseException:
            self.abandon()
            raise
        self._forget()

    def abandon(self) -> None:
        """Drops all factors and results after an error."""
        self.queue.clear()
        self._forget()
        self._is_open = False
        for quantity in self._quantities:
            quantity.abandon()

    def _forget(self) -> None:
        self.uses.arrived.clear()
        self._factors.clear()
        self._reduced.clear()
        self._summed.clear()
        self._late.clear()
        if self._shards is not None:
            self._shards.begin_pass()


def _changed_by(hooks: Sequence[Callable[[Tensor], Tensor | None]], grads: Tensor) -> Tensor:
    """Gives each sample's gradient to the user's hooks, as a backward pass of that sample alone does."""
    rows = []
    for g in grads.unbind(0):
        for hook in hooks:
            changed = hook(g)
            g = g if changed is None else changed
        rows.append(g)
    return torch.stack(rows)


def _priority(quantity: Quantity) -> int:
    return quantity.priority


def _queue_for(device: torch.device, may_defer: bool, bound: int) -> Queue:
    """Makes the queue of one recording; it defers rules if the parameters are on a GPU.

    A trace runs rules at once, since a compiled step frees memory in the order of the trace.
    """
    defers_rules = _is_bound_by_python(device) and may_defer
    return Queue(bound, device, defers_rules=defers_rules)


def _is_bound_by_python(device: torch.device) -> bool:
    """Whether steps on this device are bound by Python overhead."""
    return device.type == "cuda"
