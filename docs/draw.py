"""Draws the pictures of "How it works": ``python docs/draw.py`` writes them to docs/assets/.

The background is transparent, and the text must be readable on white and on black: it is white on a dark
colour inside of a box, and medium grey outside. The pictures are narrow, so that a phone shows them at nearly
full size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

ASSETS = Path(__file__).parent / "assets"
WIDTH = 480

BLUE, GREEN, BROWN, VIOLET, RED = "#1f5f99", "#2f6b45", "#8a4b08", "#6b3fa0", "#a32a2a"
GREY = "#7b808c"
SAMPLES = (BLUE, BROWN, GREEN)  # a colour for each sample of a batch
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, monospace"


def text(
    x: float,
    y: float,
    line: str,
    *,
    colour: str = GREY,
    size: int = 14,
    mono: bool = False,
    anchor: str = "middle",
    bold: bool = False,
) -> str:
    family = MONO if mono else SANS
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-family="{family}" font-size="{size}"{weight} '
        f'text-anchor="{anchor}">{escape(line)}</text>'
    )


def box(
    x: float, y: float, w: float, h: float, colour: str, *lines: str, size: int = 14
) -> str:
    """Draws a filled box with centred lines: the first bold, lines that begin with ` as code."""
    parts = [
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" fill="{colour}"/>'
    ]
    top = y + h / 2 - (len(lines) - 1) * (size + 5) / 2 + size * 0.35
    for k, line in enumerate(lines):
        code = line.startswith("`")
        at = top + k * (size + 5)
        parts.append(
            text(
                x + w / 2,
                at,
                line.strip("`"),
                colour="#ffffff",
                size=size - (1 if code else 0),
                mono=code,
                bold=k == 0 and not code,
            )
        )
    return "".join(parts)


def arrow(x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{GREY}" stroke-width="2"{dash} '
        'marker-end="url(#head)"/>'
    )


def cells(
    x: float,
    y: float,
    colours: Sequence[Sequence[str]],
    *,
    w: float = 22,
    h: float = 22,
) -> str:
    """Draws a grid with a colour for each cell."""
    return "".join(
        f'<rect x="{x + c * w:g}" y="{y + r * h:g}" width="{w - 2:g}" height="{h - 2:g}" rx="3" '
        f'fill="{colour}"/>'
        for r, row in enumerate(colours)
        for c, colour in enumerate(row)
    )


def picture(height: int, title: str, parts: Iterable[str]) -> str:
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" '
        f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{GREY}"/></marker></defs>'
    )
    body = "\n".join([head, *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img"><title>{escape(title)}</title>\n{body}\n</svg>\n'
    )


def pipeline() -> str:
    """Draws the way from a call to a result."""
    stages = [
        (GREY, "call", "`F.linear(x, W)`"),
        (BLUE, "rule", "per function: the gradient of each sample"),
        (GREEN, "factor", "`OuterProduct(g, x)`"),
        (BROWN, "reduction", "per kind of factor: |G|², sums, inner products"),
        (VIOLET, "quantity", "`Norms, ClippedSum, Gram, ...`"),
    ]
    dark = {GREY: "#4a4f5a"}
    parts = []
    for k, (colour, name, line) in enumerate(stages):
        top = 8 + k * 84
        parts.append(box(40, top, 400, 56, dark.get(colour, colour), name, line))
        if k < len(stages) - 1:
            parts.append(arrow(240, top + 58, 240, top + 80))
    return picture(
        8 + 4 * 84 + 64, "A call, its rule, factor, reduction and quantity", parts
    )


def factor() -> str:
    """Draws the gradient of a linear layer as a product, and its norm from the factors."""
    parts = [
        text(240, 20, "one sample, a linear layer, three positions", size=15),
        box(92, 62, 46, 116, BLUE, "g"),
        text(115, 54, "out × 3"),
        box(156, 62, 176, 46, BROWN, "x"),
        text(244, 54, "3 × in"),
        text(156, 140, "the factor: output gradients", anchor="start"),
        text(156, 159, "and inputs of the layer", anchor="start"),
        arrow(240, 192, 130, 232),
        arrow(240, 192, 350, 232),
        box(
            42,
            242,
            176,
            116,
            "#4a4f5a",
            "G = Σ g ⊗ x",
            "out × in numbers",
            "for each sample",
        ),
        text(130, 380, "computed for Grads only"),
        text(350, 252, "(gᵀ g) ⊙ (x xᵀ)"),
        box(313, 264, 74, 74, GREEN, "3 × 3"),
        text(350, 361, "its sum is |G|²:"),
        text(350, 380, "Norms need only this"),
    ]
    return picture(394, "The gradient of a linear layer as two factors", parts)


def step() -> str:
    """Draws the forward and the backward of a recorded step."""
    parts = [
        text(120, 22, "forward", size=16, bold=True),
        text(360, 22, "backward", size=16, bold=True),
    ]
    for k, name in enumerate(["layer 1", "layer 2", "loss"]):
        top = 40 + k * 92
        last = name == "loss"
        parts.append(box(40, top, 160, 44, "#4a4f5a", name))
        if not last:
            parts.append(text(120, top + 62, "a tap keeps the input", size=13))
            parts.append(arrow(120, top + 68, 120, top + 88))
            parts.append(box(280, top, 160, 44, BLUE, "tap: rule, factor"))
            parts.append(text(360, top + 62, "reduced, then freed", size=13))
            parts.append(arrow(360, top + 88, 360, top + 68))
        else:
            parts.append(box(280, top, 160, 44, "#4a4f5a", "loss.backward()"))
            parts.append(arrow(202, top + 22, 276, top + 22))
    parts.append(box(280, 316, 160, 44, VIOLET, "quantities"))
    for start in ("M440 62H464V338H446", "M440 154H464"):
        end = ' marker-end="url(#head)"' if start.endswith("446") else ""
        parts.append(
            f'<path d="{start}" fill="none" stroke="{GREY}" stroke-width="2" '
            f'stroke-dasharray="5 4"{end}/>'
        )
    lines = [
        "PyTorch's kernels compute",
        "the gradients of the inputs;",
        "summed weight gradients",
        "are never computed",
    ]
    for k, line in enumerate(lines):
        parts.append(text(40, 312 + 18 * k, line, size=13, anchor="start"))
    return picture(376, "A recorded step, forward and backward", parts)


def layouts() -> str:
    """Draws which entries of a tensor belong to which sample."""
    a, b, c = SAMPLES
    lost = "#4a4f5a"
    parts = [
        text(16, 112, "three samples", anchor="start", size=13),
        text(16, 22, "x: (3, 4)", anchor="start", mono=True, size=13),
        cells(16, 32, [[a] * 4, [b] * 4, [c] * 4]),
        text(
            200,
            22,
            "x.flatten(): sample of i is i // 4",
            anchor="start",
            mono=True,
            size=12,
        ),
        cells(200, 32, [[a] * 4 + [b] * 4 + [c] * 4]),
        text(
            200,
            84,
            "x.T: samples in the second dimension",
            anchor="start",
            mono=True,
            size=12,
        ),
        cells(200, 94, [[a, b, c]] * 4),
        text(16, 146, "x[[2, 0, 2]]:", anchor="start", mono=True, size=13),
        text(16, 164, "by value", anchor="start", size=13),
        cells(16, 174, [[c] * 4, [a] * 4, [c] * 4]),
        text(200, 218, "x - x.mean(0): mixed", anchor="start", mono=True, size=12),
        cells(200, 228, [[lost] * 4] * 3),
        text(200, 312, "an error, once a gradient", anchor="start", size=13),
        text(200, 329, "flows through it", anchor="start", size=13),
    ]
    return picture(
        342, "The samples of a tensor after a reshape, a transpose and an index", parts
    )


def ladder() -> str:
    """Draws the ladder of ways to a weight's gradients."""
    rungs = [
        (BLUE, "rule", "closed form: linear, convolution, norm, table"),
        (BLUE, "derived", "a slice, a cast, weight_norm: by one VJP"),
        (GREEN, "broadcast, expanded", "arithmetic with a weight"),
        (BROWN, "vmap", "of that one function, checked against it"),
        (BROWN, "masked VJP", "one backward of that function per sample"),
        (RED, "error", "names the parameter, function and next step"),
    ]
    parts = []
    for k, (colour, name, line) in enumerate(rungs):
        top = 6 + k * 70
        parts.append(box(50, top, 380, 46, colour, name, line, size=13))
        if k < len(rungs) - 1:
            parts.append(arrow(240, top + 48, 240, top + 66))
    parts.append(text(34, 30, "fast", anchor="end", size=12))
    parts.append(text(34, 310, "slow", anchor="end", size=12))
    return picture(
        410, "The ladder: rule, derived, broadcast, vmap, masked VJP, error", parts
    )


PICTURES: dict[str, Callable[[], str]] = {
    "pipeline": pipeline,
    "factor": factor,
    "step": step,
    "layouts": layouts,
    "ladder": ladder,
}


def main() -> int:
    for name, draw in PICTURES.items():
        path = ASSETS / f"how-{name}.svg"
        path.write_text(draw())
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
