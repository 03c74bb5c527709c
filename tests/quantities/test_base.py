"""The contract of a quantity: when it is called, with which arguments, and that its result is its own."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.quantities import Batch, Quantity
from pergrad.quantities.base import Reduction
from pergrad.reductions import SampleGradients
from pergrad.testing import assert_near, loop_grads


class Diary(Quantity):
    """Writes down how it is called, and sums what it gets."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.sums: dict[str, Tensor] = {}

    def begin(self, batch: Batch) -> None:
        self.entries.append(f"begin {batch.size}")
        self.names = list(batch.parameters)

    def consume(self, name: str, gradients: SampleGradients) -> None:
        self.entries.append(name)
        self.sums[name] = self.sums.get(name, 0) + gradients.materialize()

    def end(self) -> None:
        self.entries.append("end")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).double()


def test_quantity_is_called_once_for_each_parameter_from_the_last_to_the_first() -> None:
    net, diary = model(), Diary()
    with pergrad.record(net, diary) as same:
        net(torch.randn(5, 3).double()).sum().backward()
    assert same is diary
    first, *middle, last = diary.entries
    assert (first, last) == ("begin 5", "end")
    assert sorted(middle) == sorted(diary.names) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert {*middle[:2]} == {"2.bias", "2.weight"}


def test_quantity_gets_all_uses_of_a_weight_at_once() -> None:
    net, diary = model(), Diary()
    twice = nn.Sequential(nn.Linear(3, 4).double(), net[2], net[2])
    x = torch.randn(5, 3).double()
    with pergrad.record(twice, diary):
        twice(x).sum().backward()
    assert diary.entries.count("1.weight") == 1
    expected = loop_grads(twice, lambda m, x: m(x).sum(1), x)
    for name, rows in expected.items():
        assert_near(diary.sums[name], rows, name)


def test_several_quantities_see_the_same() -> None:
    net, diary, grads = model(), Diary(), pergrad.Grads()
    with pergrad.record(net, diary, grads, loss_reduction="mean") as both:
        net(torch.randn(5, 3).double()).mean(0).sum().backward()
    assert both == (diary, grads)
    for name, rows in grads.result.items():
        assert_near(diary.sums[name], rows, name)


def test_quantity_is_not_ended_after_an_error() -> None:
    net, diary = model(), Diary()

    def fail() -> None:
        with pergrad.record(net, diary):
            net(torch.randn(5, 3).double()).sum().backward()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert "end" not in diary.entries


def test_backward_inside_of_autocast_gives_what_one_outside_gives() -> None:
    net = nn.Sequential(nn.Conv1d(3, 4, 2), nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 2))
    x = torch.randn(6, 3, 4)
    direction = {name: torch.randn_like(p) for name, p in net.named_parameters()}

    def quantities() -> list[Quantity]:
        return [
            pergrad.Norms(),
            pergrad.ClippedSum(0.5),
            pergrad.Dots(direction),
            pergrad.SecondMoment(),
            pergrad.Gram(),
            pergrad.Projection(8),
            pergrad.Projection(8, method="two_sided"),
        ]

    inside, outside = quantities(), quantities()
    with torch.autocast("cpu", torch.bfloat16), pergrad.record(net, *inside):
        net(x).float().square().sum().backward()
    with pergrad.record(net, *outside):
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(x).float().square().sum()
        loss.backward()
    for a, b in zip(inside, outside, strict=True):
        found, wanted = (q.result if isinstance(q.result, dict) else {"": q.result} for q in (a, b))
        for name, value in wanted.items():
            assert found[name].dtype == torch.float32
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


QUANTITIES: dict[str, Callable[[nn.Module], Quantity]] = {
    "norms": lambda _: pergrad.Norms(),
    "grads": lambda _: pergrad.Grads(),
    "clipped": lambda _: pergrad.ClippedSum(1.0),
    "clipped in low memory": lambda _: pergrad.ClippedSum(1.0, memory="low"),
    "clipped in high memory": lambda _: pergrad.ClippedSum(1.0, memory="high"),
    "dots": lambda net: pergrad.Dots({n: p.detach() for n, p in net.named_parameters()}),
    "gram": lambda _: pergrad.Gram(),
    "gram of others": lambda net: pergrad.Gram({n: p[None] for n, p in net.named_parameters()}),
    "second moment": lambda _: pergrad.SecondMoment(),
    "variance": lambda _: pergrad.Variance(),
    "noise scale": lambda _: pergrad.NoiseScale(),
    "projection": lambda _: pergrad.Projection(4),
}
LINEAR = {"grads", "dots", "gram of others", "projection"}
PRIORITIES = {"grads": 0, "clipped": 1, "clipped in low memory": 1, "clipped in high memory": 1}


@pytest.mark.parametrize("name", QUANTITIES)
def test_only_what_is_linear_adds_up_over_backwards(name: str) -> None:
    quantity = QUANTITIES[name](model())
    assert quantity.is_linear == (name in LINEAR)


@pytest.mark.parametrize("name", QUANTITIES)
def test_what_keeps_gradients_comes_before_what_can_reuse_them(name: str) -> None:
    quantity = QUANTITIES[name](model())
    assert quantity.priority == PRIORITIES.get(name, 2)
    assert quantity.passes == (2 if name == "clipped in low memory" else 1)


def test_norms_beside_gradients_are_computed_from_them() -> None:
    seen: list[list[str]] = []

    class Watching(pergrad.Norms):
        def consume(self, name: str, gradients: SampleGradients) -> None:
            seen.append(gradients.kinds)
            super().consume(name, gradients)

    net, x = model(), torch.randn(5, 3).double()
    with pergrad.record(net, Watching(), pergrad.Grads()):
        net(x).sum().backward()
    assert seen == [["Dense"]] * 4
    seen.clear()
    with pergrad.record(net, Watching()):
        net(x).sum().backward()
    assert ["OuterProduct"] in seen


@pytest.mark.parametrize("fails", [False, True], ids=["ended", "failed"])
@pytest.mark.parametrize("name", QUANTITIES)
def test_nothing_of_the_block_is_held_after_it(name: str, fails: bool) -> None:
    queues: list[weakref.ref[Any]] = []
    net = model()
    quantity = QUANTITIES[name](net)
    begin = quantity.begin

    def watched(batch: Batch) -> None:
        queues.append(weakref.ref(batch.queue))
        begin(batch)

    quantity.begin = watched  # type: ignore[method-assign]

    def step() -> None:
        with pergrad.record(net, quantity):
            net(torch.randn(5, 3).double()).sum().backward()
            if fails:
                raise KeyError

    if fails:
        with pytest.raises(KeyError):
            step()
    else:
        step()
    gc.collect()
    (queue,) = queues
    assert queue() is None
    assert quantity.has_ended is not fails
    assert isinstance(quantity, Reduction)
    with pytest.raises(AssertionError, match="between `begin` and `end` only"):
        _ = quantity.batch


def test_a_batch_without_parameters_is_on_the_cpu_and_in_float32() -> None:
    batch = Batch(3, {})
    assert batch.device == torch.device("cpu")
    assert batch.dtype == torch.float32
    double, single = torch.zeros(2, dtype=torch.float64, device="meta"), torch.zeros(2)
    assert Batch(3, {"a": single, "b": double}).dtype == torch.float64
    assert Batch(3, {"a": double, "b": single}).device == torch.device("meta")
    assert not batch.offload
    assert batch.stored(double) is double


@pytest.mark.parametrize(
    ("passed", "says"),
    [
        ([], "at least one quantity"),
        ([pergrad.Norms], r"Norms is a class: pass an object, such as Norms\(...\)"),
        (["norms"], "expected quantities, got str"),
        ([pergrad.Grads()] * 2, "passed twice"),
    ],
    ids=["nothing", "a class", "a name", "one twice"],
)
def test_what_is_no_set_of_quantities_is_refused(passed: list[Any], says: str) -> None:
    net = model()
    with pytest.raises(pergrad.PergradError, match=says), pergrad.record(net, *passed):
        net(torch.randn(5, 3).double()).sum().backward()
    assert not net._forward_hooks


SHOWN: dict[str, tuple[Callable[[], Any], str, str]] = {
    "settings": (
        lambda: pergrad.Norms(accumulate=True),
        "Norms(accumulate=True)",
        "result (5,) float64",
    ),
    "no settings": (lambda: pergrad.Norms(), "Norms()", "result (5,) float64"),
    "variance": (
        lambda: pergrad.Variance(),
        "Variance()",
        "result {'0.weight': (4, 3) float64, '0.bias': (4,) float64, ",
    ),
    "noise": (lambda: pergrad.NoiseScale(decay=0.5), "NoiseScale(decay=0.5)", "result "),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_quantity_shows_its_settings_and_what_it_has(name: str) -> None:
    build, settings, result = SHOWN[name]
    net, quantity = model(), build()
    assert repr(quantity) == f"<{settings}: no result yet>"
    with pergrad.record(net, quantity):
        out = net(torch.randn(5, 3).double())
        assert repr(quantity) == f"<{settings}: recording 5 samples>"
        out.square().sum().backward()
    assert repr(quantity).startswith(f"<{settings}: 5 samples, 4 parameters, {result}")
    assert "_batch" not in dir(quantity)
    assert {"result", "accumulate", "names"} <= {*dir(quantity)}


def test_a_noise_scale_of_one_sample_is_shown_as_undefined() -> None:
    net, noise = nn.Linear(3, 1).double(), pergrad.NoiseScale()
    with pergrad.record(net, noise):
        net(torch.randn(1, 3).double()).sum().backward()
    assert repr(noise).endswith(": 1 sample, 2 parameters, result undefined>")
