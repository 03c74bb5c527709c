"""Finds where along a sweep pergrad's cost functions choose another algorithm.

``python -m benchmarks.switches --size gpu`` lists these switches; ``benchmarks.plot`` marks them in the
curves. A step or bend of a curve without a switch needs another explanation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch

from benchmarks.precision import PRECISIONS
from benchmarks.scaling import AXES, SWEEPS, Shape
from pergrad.factors import OuterProduct
from pergrad.reductions import gradients, tiles
from pergrad.reductions.choosing import chooser_for
from pergrad.runtime import MACHINES, bounds


@dataclass(frozen=True)
class Place:
    """Device of a step, and the dtype of its linear layers."""

    device: str
    dtype: torch.dtype

    @classmethod
    def of(cls, size: str, precision: str) -> Place:
        dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        return cls("cuda" if size == "gpu" else "cpu", dtype)


@dataclass(frozen=True)
class Switch:
    """A change of algorithm: from `value` on along the axis, the layers use `after`."""

    axis: str
    value: int
    quantities: tuple[str, ...]
    layers: str
    before: str
    after: str

    @property
    def text(self) -> str:
        what = " and ".join(self.quantities)
        return f"{self.axis} {self.value}: {what} of {self.layers}: {self.before} → {self.after}"


def layers(shape: Shape) -> dict[str, tuple[int, int]]:
    """Returns the linear layers of the transformer: (outputs, inputs)."""
    w = shape.width
    return {
        "attention": (w, w),
        "up": (4 * w, w),
        "down": (w, 4 * w),
        "head": (shape.vocabulary, w),
    }


def _factor(shape: Shape, layer: str, place: Place) -> OuterProduct:
    """Returns the layer's factor without values: costs depend on shapes, dtypes and device only."""
    device = "meta" if place.device == "cuda" else "cpu"
    grad_output, input = (
        torch.empty((), dtype=place.dtype, device=device).expand(shape.batch, shape.length, width)
        for width in layers(shape)[layer]
    )
    return OuterProduct(grad_output, input)


def norm_way(shape: Shape, layer: str, place: Place) -> str:
    """Returns how the squared norms of the layer's gradients are computed."""
    if shape.length == 1:
        return "rank one"
    factor = _factor(shape, layer, place)
    g, x = factor.grad_output, factor.input
    sizes = g.shape, x.shape, g.dtype, x.dtype
    is_gpu = place.device == "cuda"
    machine = MACHINES["cuda" if is_gpu else "cpu", "eager"]
    chooser = chooser_for(machine, is_gpu)
    if is_gpu:
        shared = (*sizes, bounds.ENOUGH_ON_GPU, None)
        if chooser.pick("launch of an outer product", shared) == "shared":
            return "gram kernel"
    way = chooser.pick("norms of an outer product", sizes)
    if way == "torch":
        way = chooser_for(machine, False).pick("norms of an outer product", sizes)
    return "gram" if way == "inner products" else way


def norm_pieces(shape: Shape, layer: str, place: Place) -> str:
    """Returns whether norms are computed from all gradients at once or in pieces."""
    outputs, inputs = layers(shape)[layer]
    bound = bounds.ENOUGH if place.device == "cpu" else bounds.ENOUGH_ON_GPU
    is_cut = shape.batch > tiles.at_once(4 * outputs * inputs, bound)
    return "in pieces" if is_cut and norm_way(shape, layer, place) == "gradients" else "at once"


def kept_way(shape: Shape, layer: str, place: Place) -> str:
    """Returns what a clipped sum keeps of the layer until all norms are known."""
    is_dense = gradients._is_worth_keeping_dense(_factor(shape, layer, place))
    return "kept gradients" if is_dense else "kept factors"


Way = Callable[[Shape, str, Place], str]

WAYS: list[tuple[tuple[str, ...], Way]] = [
    (("norms", "clipped"), norm_way),
    (("norms",), norm_pieces),
    (("clipped",), kept_way),
]


def _way_at(way: Way, base: Shape, axis: str, layer: str, place: Place, value: int) -> str:
    return way(replace(base, **{axis: value}), layer, place)


def switches(base: Shape, axis: str, values: list[int], place: Place) -> Iterator[Switch]:
    """Yields the changes of algorithm between each value and the next, where they happen.

    If it changes back and forth between two values, only the last change is reported, which the curve shows.
    Layers that change together are one switch.
    """
    for quantities, way in WAYS:
        found: dict[tuple[int, str, str], list[str]] = {}
        for layer in layers(base):
            at = partial(_way_at, way, base, axis, layer, place)
            for low, high in pairwise(sorted(values)):
                after = at(high)
                if at(low) != after:
                    last = next(v for v in range(high - 1, low - 1, -1) if at(v) != after)
                    found.setdefault((last + 1, at(last), after), []).append(layer)
        for (value, before, after), names in sorted(found.items()):
            yield Switch(axis, value, quantities, ", ".join(names), before, after)


def main(arguments: list[str] | None = None) -> int:
    """Lists the switches of a sweep."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.switches", description=__doc__)
    parser.add_argument("--size", choices=SWEEPS, default="cpu")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    options = parser.parse_args(arguments)
    sweep, place = SWEEPS[options.size], Place.of(options.size, options.precision)
    for axis in AXES:
        for switch in switches(sweep.base, axis, sweep.values[axis], place):
            print(switch.text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
