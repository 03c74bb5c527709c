"""Where along a sweep pergrad changes its way, told by the cost functions that it decides with.

``python -m benchmarks.switches --size gpu`` lists them; ``benchmarks.plot`` marks them in the curves. A step
or a bend of a curve is explained where one of them lies, and is to be looked into where none does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from benchmarks.scaling import AXES, SWEEPS, Shape
from pergrad.factors import allocation
from pergrad.reductions import tiles
from pergrad.reductions.norms import gram_is_cheaper


@dataclass(frozen=True)
class Switch:
    """From `value` on, along the axis, the layers go the way `after`."""

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
    """The linear layers of the transformer: (outputs, inputs)."""
    w = shape.width
    return {
        "attention": (w, w),
        "up": (4 * w, w),
        "down": (w, 4 * w),
        "head": (shape.vocabulary, w),
    }


def norm_way(shape: Shape, layer: str, device: str) -> str:
    """How the squared norms of the layer's gradients are found."""
    if shape.length == 1:
        return "rank one"
    return "gram" if gram_is_cheaper(shape.length, *layers(shape)[layer]) else "gradients"


def norm_pieces(shape: Shape, layer: str, device: str) -> str:
    """Whether the gradients whose norms are taken are all there at once."""
    outputs, inputs = layers(shape)[layer]
    bound = tiles._ENOUGH if device == "cpu" else tiles._ENOUGH_ON_GPU
    is_cut = shape.batch > tiles.at_once(4 * outputs * inputs, bound)
    return "in pieces" if is_cut and norm_way(shape, layer, device) == "gradients" else "at once"


def gradient_pages(shape: Shape, layer: str, device: str) -> str:
    """What memory the full gradients of a layer are written to."""
    outputs, inputs = layers(shape)[layer]
    size = 4 * shape.batch * outputs * inputs
    is_large = device == "cpu" and size >= allocation._FRESHLY_MAPPED
    return "huge pages" if is_large else "torch's allocator"


# A clipped sum keeps the gradients where they take less room than their factors: where grams cost more too.
WAYS: list[tuple[tuple[str, ...], Callable[[Shape, str, str], str]]] = [
    (("norms", "clipped"), norm_way),
    (("norms",), norm_pieces),
    (("grads",), gradient_pages),
]


def switches(base: Shape, axis: str, values: list[int], *, device: str) -> Iterator[Switch]:
    """All changes of way between the smallest and the largest value, layers that change together as one."""
    for quantities, way in WAYS:
        found: dict[tuple[int, str, str], list[str]] = {}
        for layer in layers(base):
            before = way(replace(base, **{axis: min(values)}), layer, device)
            for value in range(min(values) + 1, max(values) + 1):
                after = way(replace(base, **{axis: value}), layer, device)
                if after != before:
                    found.setdefault((value, before, after), []).append(layer)
                    before = after
        for (value, before, after), names in sorted(found.items()):
            yield Switch(axis, value, quantities, ", ".join(names), before, after)


def main(arguments: list[str] | None = None) -> int:
    """List the switches of a sweep."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.switches", description=__doc__)
    parser.add_argument("--size", choices=SWEEPS, default="cpu")
    options = parser.parse_args(arguments)
    sweep, device = SWEEPS[options.size], "cuda" if options.size == "gpu" else "cpu"
    for axis in AXES:
        for switch in switches(sweep.base, axis, sweep.values[axis], device=device):
            print(switch.text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
