"""The ledger: uses that are owed, factors that arrive, and the quantities that it feeds, in order."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import pergrad
from pergrad.distributed.spread import Spread
from pergrad.engine.collecting.ledger import Ledger, UseCounter
from pergrad.errors import ScopeError
from pergrad.factors import Dense
from pergrad.quantities import Batch, Quantity
from pergrad.reductions import SampleGradients
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import Formula, numbers

N = 3


class Watching(Quantity):
    """Writes down all that it is told."""

    def __init__(
        self,
        log: list[Any],
        label: str = "",
        priority: int = 2,
        passes: int = 1,
        linear: bool = False,
    ) -> None:
        self.log, self.label = log, label
        self.priority, self.passes, self.is_linear = priority, passes, linear  # type: ignore[misc]
        self.rows: dict[str, Tensor] = {}
        self.fails_at: str | None = None

    def _note(self, what: str) -> None:
        self.log.append(f"{self.label}{what}")
        if what == self.fails_at:
            raise KeyError(what)

    def begin(self, batch: Batch) -> None:
        self.batch = batch
        self._note("begin")

    def consume(self, name: str, gradients: SampleGradients) -> None:
        self._note(f"consume {name}")
        assert not torch.is_autocast_enabled("cpu")
        self.bound = gradients.bound
        rows = gradients.materialize()
        self.rows[name] = self.rows[name] + rows if name in self.rows else rows

    def end_pass(self) -> None:
        self._note("end_pass")

    def end(self) -> None:
        assert not torch.is_autocast_enabled("cpu")
        self._note("end")

    def settle(self) -> None:
        self._note("settle")

    def abandon(self) -> None:
        self._note("abandon")


def parameters(*names: str) -> dict[str, Tensor]:
    return {name: numbers(2) for name in names or ("w", "v")}


def opened(*quantities: Quantity, **options: Any) -> Ledger:
    ledger = Ledger(quantities, N, parameters(), **options)
    ledger.open()
    return ledger


def uses_of(*names: str) -> list[Any]:
    return [SimpleNamespace(counted=(name,)) for name in names]


def is_empty(ledger: Ledger) -> bool:
    """Whether no factor has arrived and no work waits, which a recording refuses at its end."""
    return not ledger.uses.arrived and not ledger.queue.work


def dense() -> Dense:
    return Dense(numbers(N, 2))


# -- counting uses


def test_the_last_of_the_expected_uses_is_told_from_the_others() -> None:
    uses = UseCounter()
    uses.expect(uses_of("w", "v", "w"))
    uses.expect(uses_of("w"))
    assert [uses.arrive("w") for _ in range(4)] == [False, False, True, True]
    assert uses.arrive("v")
    assert uses.arrived == {"w": 4, "v": 1}


def test_a_use_counts_for_every_parameter_that_the_weight_counts_for() -> None:
    uses = UseCounter()
    uses.expect([SimpleNamespace(counted=("w", "v")), SimpleNamespace(counted=())])
    uses.expect(uses_of("w"))
    assert not uses.arrive("w")
    assert uses.arrive("v")


def test_what_nobody_expected_is_the_last_at_once() -> None:
    assert UseCounter().arrive("w")


def test_a_use_inside_of_a_backward_is_not_counted() -> None:
    uses = UseCounter()

    class Recomputes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            uses.expect(uses_of("w", "w"))
            return grad

    uses.expect(uses_of("w"))
    Recomputes.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert uses.arrive("w")


def test_what_a_checkpoint_recomputes_has_no_last_use() -> None:
    uses = UseCounter()
    uses.expect_in_recomputation(["w", "v"])
    uses.expect_in_recomputation(["v"])
    uses.expect(uses_of("u"))
    assert not uses.arrive("w")
    assert uses.is_recomputed_once("w")
    assert not uses.is_recomputed_once("v")
    assert not uses.is_recomputed_once("u")
    uses.expect(uses_of("w"))
    assert not uses.is_recomputed_once("w")
    assert not uses.arrive("w")


# -- feeding the quantities


def test_a_parameter_is_consumed_with_its_last_factor_and_what_is_left_at_the_end() -> None:
    log: list[str] = []
    quantity = Watching(log)
    ledger = opened(quantity)
    ledger.uses.expect(uses_of("w", "w", "v", "v"))
    first, second, left = dense(), dense(), dense()
    ledger.add("w", first)
    ledger.add("v", left)
    assert log == ["begin"]
    ledger.add("w", second)
    assert log == ["begin", "consume w"]
    ledger.close()
    assert log == ["begin", "consume w", "consume v", "end", "settle"]
    torch.testing.assert_close(quantity.rows["w"], first.materialize() + second.materialize())
    torch.testing.assert_close(quantity.rows["v"], left.materialize())
    assert quantity.batch.size == N
    assert list(quantity.batch.parameters) == ["w", "v"]


def test_the_batch_knows_the_queue_and_whether_results_are_offloaded() -> None:
    for offload in (False, True):
        quantity = Watching([])
        ledger = opened(quantity, offload=offload)
        assert quantity.batch.offload is offload
        assert quantity.batch.queue is ledger.queue


def test_results_are_put_on_the_device_unless_told_otherwise() -> None:
    quantity = Watching([])
    opened(quantity)
    assert not quantity.batch.offload


def test_quantities_are_fed_in_the_order_of_their_priority() -> None:
    log: list[str] = []
    ledger = opened(Watching(log, "late ", 3), Watching(log, "early ", 0), Watching(log, "middle "))
    ledger.add("w", dense())
    ledger.close()
    assert [entry for entry in log if "consume" in entry] == [
        "early consume w",
        "middle consume w",
        "late consume w",
    ]


@pytest.mark.parametrize("scale", [1.0, 3.0, torch.tensor([0.0, 2.0, -1.0], dtype=torch.float64)])
def test_gradients_are_multiplied_by_the_scale(scale: Any) -> None:
    quantity = Watching([])
    ledger = opened(quantity, scale=scale)
    rows = dense()
    ledger.add("w", rows)
    ledger.close()
    factor = scale.unsqueeze(1) if isinstance(scale, Tensor) else scale
    torch.testing.assert_close(quantity.rows["w"], rows.materialize() * factor)


def test_gradients_are_not_scaled_unless_asked() -> None:
    quantity = Watching([])
    ledger = opened(quantity)
    ledger.add("w", rows := dense())
    torch.testing.assert_close(quantity.rows["w"], rows.materialize())


def test_reductions_are_told_how_much_memory_they_may_use() -> None:
    quantity = Watching([])
    ledger = opened(quantity, max_bytes=123)
    ledger.add("w", dense())
    assert quantity.bound == ledger.queue.bound == 123
    assert opened(Watching([])).queue.bound > 0


def test_rules_run_at_once_on_the_cpu_and_in_a_trace() -> None:
    assert not opened(Watching([])).queue.defers_rules
    with FakeTensorMode():
        traced = {"w": torch.empty(2)}
    assert not Ledger([Watching([])], N, traced).queue.defers_rules


def test_rules_wait_where_python_bounds_the_speed_of_a_step() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_gpu = torch.empty(2, device="cuda")
    assert not Ledger([Watching([])], N, {"w": on_gpu}, max_bytes=1).queue.defers_rules  # traced

    class Elsewhere:
        device = torch.device("cuda")

        def is_complex(self) -> bool:
            return False

    ledger = Ledger([Watching([])], N, {"w": Elsewhere()}, max_bytes=7)  # type: ignore[dict-item]
    assert ledger.queue.defers_rules
    assert ledger.queue.bound == 7


def test_nothing_settles_in_a_trace() -> None:
    log: list[str] = []
    with FakeTensorMode():
        traced = {"w": torch.empty(2)}
    ledger = Ledger([Watching(log)], N, traced)
    ledger.open()
    ledger.close()
    assert log == ["begin", "end"]


def test_a_module_without_parameters_has_a_ledger_too() -> None:
    log: list[str] = []
    ledger = Ledger([Watching(log)], N, {})
    ledger.open()
    ledger.close()
    assert log == ["begin", "end", "settle"]


def test_a_ledger_is_empty_until_a_factor_arrives_or_waits() -> None:
    ledger = opened(Watching([]))
    assert is_empty(ledger)
    ledger.queue.put(lambda: None)
    assert not is_empty(ledger)
    ledger.queue.drain()
    assert is_empty(ledger)
    ledger.add("w", dense())
    assert not is_empty(ledger)


def test_reductions_run_outside_of_autocast_at_the_end() -> None:
    ledger = opened(Watching([]))
    ledger.uses.expect(uses_of("w", "w"))
    ledger.add("w", dense())
    with torch.autocast("cpu"):
        ledger.close()


# -- gradients at the wrong time


def test_a_gradient_before_or_after_the_block_is_refused() -> None:
    ledger = Ledger([Watching([])], N, parameters())
    with pytest.raises(ScopeError, match="parameter 'w' arrived outside of its scope"):
        ledger.add("w", dense())
    ledger.open()
    ledger.add("w", dense())
    ledger.close()
    with pytest.raises(ScopeError, match="parameter 'w' arrived outside of its scope"):
        ledger.add("w", dense())


def test_a_paused_ledger_takes_nothing_and_refuses_nothing() -> None:
    log: list[str] = []
    ledger = opened(Watching(log))
    assert not ledger.is_paused
    assert ledger.expects("w")
    ledger.is_paused = True
    assert not ledger.expects("w")
    ledger.add("w", dense())
    assert is_empty(ledger)
    ledger.close()
    ledger.add("w", dense())  # of another backward, after the block
    assert log == ["begin", "end", "settle"]


def test_a_second_backward_adds_to_linear_quantities_and_is_refused_by_others() -> None:
    linear = Watching([], linear=True)
    ledger = opened(linear)
    first, second = dense(), dense()
    ledger.add("w", first)
    ledger.add("w", second)
    torch.testing.assert_close(linear.rows["w"], first.materialize() + second.materialize())

    ledger = opened(Watching([], linear=False))
    ledger.add("w", first)
    ledger.add("v", first)  # another parameter
    with pytest.raises(ScopeError, match="adds to parameter 'w', but Watching was already"):
        ledger.add("w", second)


# -- several passes


def test_a_quantity_of_one_pass_sees_the_last_pass_only() -> None:
    log: list[str] = []
    ledger = opened(Watching(log, "once "), Watching(log, "twice ", passes=2))
    assert ledger.passes == 2
    ledger.add("w", dense())
    ledger.end_pass()
    ledger.add("w", dense())
    ledger.close()
    assert log == [
        *("once begin", "twice begin", "twice consume w", "twice end_pass"),
        *("once consume w", "twice consume w"),
        *("once end", "once settle", "twice end", "twice settle"),
    ]


def test_what_is_left_of_an_earlier_pass_is_reduced_in_it() -> None:
    log: list[str] = []
    quantity = Watching(log, passes=2)
    ledger = opened(quantity)
    ledger.uses.expect(uses_of("w", "w"))
    ledger.add("w", dense())
    ledger.queue.put(lambda: log.append("waited"), 0)
    ledger.end_pass()
    assert log == ["begin", "waited", "consume w", "end_pass"]
    quantity.rows.clear()
    ledger.add("w", dense())
    assert log[4:] == []  # of its own pass, one of two
    ledger.add("w", dense())
    assert log[4:] == ["consume w"]


def test_more_passes_than_a_quantity_needs_are_refused() -> None:
    ledger = opened(Watching([], passes=2))
    ledger.end_pass()
    with pytest.raises(ScopeError, match="was run 2 times"):
        ledger.end_pass()
    ledger.open()  # the next block begins from the first pass again
    ledger.end_pass()


def test_one_pass_has_no_earlier_one() -> None:
    with pytest.raises(ScopeError, match="was run 1 times"):
        opened(Watching([])).end_pass()


# -- checkpoints, and errors


def test_the_only_use_in_a_checkpoint_is_reduced_when_its_backward_ends() -> None:
    log: list[str] = []
    ledger = opened(Watching(log))
    ledger.uses.expect_in_recomputation(["w", "v", "v"])
    ledger.add("v", dense())
    ledger.queue.put(lambda: ledger.add("w", dense()), 0)
    assert log == ["begin"]
    ledger.end_recomputation()
    assert log == ["begin", "consume w"]
    ledger.close()
    assert log == ["begin", "consume w", "consume v", "end", "settle"]


@pytest.mark.parametrize("where", ["consume w", "end"])
def test_an_error_of_a_quantity_at_the_end_leaves_nothing_behind(where: str) -> None:
    log: list[str] = []
    quantity = Watching(log)
    quantity.fails_at = where
    ledger = opened(quantity)
    ledger.uses.expect(uses_of("w", "w"))
    ledger.add("w", dense())
    with pytest.raises(KeyError, match=where):
        ledger.close()
    assert log[-1] == "abandon"
    assert is_empty(ledger)
    with pytest.raises(ScopeError):
        ledger.expects("w")


def test_an_abandoned_ledger_drops_everything_and_takes_nothing_more() -> None:
    log: list[str] = []
    ledger = opened(Watching(log))
    ledger.uses.expect(uses_of("w", "w"))
    ledger.add("w", dense())
    ledger.queue.put(lambda: log.append("never"), 0)
    ledger.abandon()
    assert is_empty(ledger)
    with pytest.raises(ScopeError):
        ledger.add("w", dense())
    ledger.open()
    ledger.close()
    assert log == ["begin", "abandon", "begin", "end", "settle"]


def test_a_closed_ledger_may_be_opened_again() -> None:
    quantity = Watching([])
    ledger = opened(quantity)
    ledger.add("w", dense())
    ledger.close()
    assert is_empty(ledger)
    ledger.open()
    quantity.rows.clear()
    ledger.add("w", last := dense())  # not a second backward of the first block
    ledger.close()
    torch.testing.assert_close(quantity.rows["w"], last.materialize())


# -- in a recording


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(3, 3), nn.Linear(3, 3)
        self.reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.shared, self.first(x), use_reentrant=self.reentrant)
        return checkpoint(self.shared, h.tanh(), use_reentrant=self.reentrant)  # type: ignore[no-any-return]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)  # type: ignore[no-any-return]


def test_norms_of_a_layer_in_two_reentrant_checkpoints_are_those_of_the_loop() -> None:
    torch.manual_seed(0)
    model, x = Checkpointed().double(), numbers(3, 3)
    with pergrad.record(model, pergrad.Norms()) as norms:
        loss(model, x).sum().backward()
    model.reentrant = False  # the loop asks for gradients of some tensors
    for name, rows in loop_grads(model, loss, x).items():
        assert_near(norms.per_param[name], rows.flatten(1).norm(dim=1), name)


def test_gradients_are_reduced_in_the_backward_and_not_held_until_the_end() -> None:
    model: Any = Formula(
        lambda m, x: F.linear(F.linear(x, m.a), m.b), a=numbers(3, 3), b=numbers(3, 3)
    )
    log: list[str] = []
    seen: list[Sequence[str]] = []

    def forward(x: Tensor) -> Tensor:
        h = F.linear(x, model.a)
        h.register_hook(lambda _: seen.append(list(log)))
        return F.linear(h, model.b)

    model.function = lambda m, x: forward(x)
    with pergrad.record(model, Watching(log)):
        model(numbers(3, 3)).sum().backward()
    assert seen == [["begin", "consume b"]]


def test_a_quantity_gets_whole_gradients_unless_it_takes_shards() -> None:
    class TakingShards(Watching):
        takes_shards = True

    whole, sharded = Watching([]), TakingShards([])
    piece = SimpleNamespace(whole_rows=lambda rows: torch.cat([rows, -rows], 1))
    parallel: Any = SimpleNamespace(pieces={"w": piece}, factor=lambda name, factor: factor)
    ledger = opened(whole, sharded, spread=Spread(tensor_parallel=parallel), scale=2.0)
    factors = {"w": dense(), "v": dense()}
    for name, factor in factors.items():
        ledger.add(name, factor)
    ledger.close()
    for name, factor in factors.items():
        own = 2 * factor.gradients
        assert_near(sharded.rows[name], own)
        assert_near(whole.rows[name], torch.cat([own, -own], 1) if name == "w" else own)
