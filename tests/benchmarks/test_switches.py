from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import pergrad
from benchmarks.scaling import AXES, SWEEPS, Shape
from benchmarks.switches import Place, kept_way, layers, main, norm_pieces, norm_way, switches
from pergrad.reductions import choosing, gradients, norms
from pergrad.runtime import bounds

CPU = Place.of("cpu", "float32")
BASE = Shape(batch=3, length=4, width=8, depth=1, vocabulary=11)
USES = {"attention": 4, "up": 1, "down": 1, "head": 1}  # weights of a block and of the head


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Callable[[Shape], Counter[str]]:
    """How often the norms of linear layers are found in each way in one step, be there little to do."""
    monkeypatch.setattr(choosing, "_LITTLE", 0)
    monkeypatch.setattr(gradients, "small_gradients", lambda *_: None)
    seen: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(factor: Any, *rest: Any) -> Any:
            first = factor[0] if isinstance(factor, list) else factor
            if type(first).__name__ == "OuterProduct":
                seen[name] += 1
            return function(factor, *rest)

        return call

    for way in ("inner products", "gradients", "rank one"):
        name = "gram" if way == "inner products" else way
        monkeypatch.setitem(
            norms.OUTER_PRODUCT_WAYS, way, counted(name, norms.OUTER_PRODUCT_WAYS[way])
        )

    def run(shape: Shape) -> Counter[str]:
        seen.clear()
        task = shape.task(seed=0, device=torch.device("cpu"))
        pergrad.norms(task.model, lambda m, x, y: task.loss(m(x), y), task.inputs, task.targets)
        return Counter(seen)

    return run


def expected(shape: Shape) -> Counter[str]:
    found: Counter[str] = Counter()
    for layer in layers(shape):
        found[norm_way(shape, layer, CPU)] += USES[layer]
    return found


def test_ways_that_are_told_are_the_ways_that_are_gone_on_both_sides_of_each_switch(
    ways: Callable[[Shape], Counter[str]],
) -> None:
    found = [s for s in switches(BASE, "length", [1, 12], CPU) if "norms" in s.quantities]
    assert len(found) >= 3
    for switch in found:
        before = replace(BASE, length=switch.value - 1)
        after = replace(BASE, length=switch.value)
        assert ways(before) == expected(before)
        assert ways(after) == expected(after)
        assert expected(before) != expected(after)


def test_gradients_come_in_pieces_where_the_tiles_are_cut() -> None:
    shape = replace(SWEEPS["gpu"].base, batch=256)
    each = 4 * shape.width**2
    assert norm_pieces(shape, "attention", CPU) == "in pieces"
    fitting = replace(shape, batch=bounds.ENOUGH // each)
    assert norm_pieces(fitting, "attention", CPU) == "at once"


def test_what_a_clipped_sum_is_said_to_keep_is_what_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: Counter[str] = Counter()
    worth = gradients._is_worth_keeping_dense

    def noted(factor: Any) -> bool:
        is_dense = worth(factor)
        if type(factor).__name__ == "OuterProduct":
            seen["kept gradients" if is_dense else "kept factors"] += 1
        return is_dense

    clipped = [s for s in switches(BASE, "length", [1, 12], CPU) if s.quantities == ("clipped",)]
    assert clipped
    monkeypatch.setattr(gradients, "_is_worth_keeping_dense", noted)
    for length in {value for s in clipped for value in (s.value - 1, s.value)}:
        shape = replace(BASE, length=length)
        told: Counter[str] = Counter()
        for layer in layers(shape):
            told[kept_way(shape, layer, CPU)] += USES[layer]
        seen.clear()
        task = shape.task(seed=0, device=torch.device("cpu"))
        with pergrad.record(task.model, pergrad.ClippedSum(1.0)):
            task.loss(task.model(task.inputs), task.targets).backward()
        assert seen == told


@pytest.mark.parametrize("size", SWEEPS)
def test_no_switch_lies_outside_of_its_axis(size: str) -> None:
    for axis in AXES:
        values = SWEEPS[size].values[axis]
        for switch in switches(SWEEPS[size].base, axis, values, CPU):
            assert min(values) < switch.value <= max(values)
            assert switch.before != switch.after


def test_layers_are_those_of_the_model() -> None:
    model = BASE.task(seed=0, device=torch.device("cpu")).model
    shapes = Counter(
        tuple(m.weight.shape) for m in model.modules() if isinstance(m, torch.nn.Linear)
    )
    told = Counter({layers(BASE)[name]: count for name, count in USES.items()})
    assert shapes == told


def test_switches_of_a_sweep_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--size", "cpu"]) == 0
    assert "length 64: norms and clipped of attention: gram → gradients" in capsys.readouterr().out


def test_kernels_are_among_the_ways_of_a_gpu() -> None:
    pytest.importorskip("triton")
    base, gpu = SWEEPS["gpu"].base, Place.of("gpu", "bfloat16")
    ways = {norm_way(replace(base, length=t), "up", gpu) for t in SWEEPS["gpu"].values["length"]}
    assert "gram kernel" in ways
