"""Draws random programs, and writes the source of each: a model, a loss function and a batch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import count, product
from random import Random
from string import Template
from typing import Any

from fuzz import ingredients
from fuzz.registry import INGREDIENTS, KINDS, Ingredient, Kind, Sizes

__all__ = ["CALLS", "LOSSES", "Program", "Step", "draw", "draw_each"]

# Classes of issue 19 stand beside what may show them; see `Ingredient.classes`.
LOSSES: dict[str, tuple[str, float, tuple[int, ...]]] = {
    "squares": ("h.flatten(1).square().sum(1)", 4, ()),
    "sines": ("h.flatten(1).sin().mean(1)", 1, ()),
    "labels": ("F.cross_entropy(h.flatten(1), y, reduction='none')", 2, ()),
    "targets": ("(h.flatten(1) - y[:, None]).square().mean(1)", 1, ()),
    "mse": ("F.mse_loss(h, torch.ones_like(h), reduction='none').flatten(1).sum(1)", 1, ()),
    "loop": ("torch.stack([row.square().sum() for row in h])", 1, ()),
    "compiled": ("compiled_squares(h)", 0.02, (12,)),
}
CALLS: dict[str, tuple[str, float, tuple[int, ...]]] = {
    "plain": ("h = model(x$args)", 30, ()),
    "tuple": ("h = model(x$args) + 0", 0.5, ()),
    "frames": ("h = model(x.flatten(0, 1)).unflatten(0, ($B, $T))", 0.2, (13,)),
    "time_first": ("h = model(x.transpose(0, 1)).transpose(0, 1)", 0.2, (13,)),
}
_PARTS = {
    "x": "torch.randn($shape)",
    "ids": "torch.randint(5, ($B, $T))",
    "mask": "torch.arange($T) < torch.randint(1, $T + 1, ($B, 1))",
    "y": "torch.randint($D, ($B,))",
}
# How often a part that was written to break the engine is drawn, compared with ordinary ones.
_ODD = 0.3
_QUANTITIES = (("grads", "sums"), ("sums", "grads"), ("block", "mean"))
_EACH_SIZES = tuple(map(Sizes, (4, 3, 4, 2), (4, 2, 3, 3), (4, 4, 3, 3)))
_CHOICE = re.compile(r"<<(.*?)>>")


@dataclass(frozen=True)
class Step:
    """One ingredient, with the seed of its choices."""

    name: str
    seed: int
    residual: bool = False

    @property
    def ingredient(self) -> Ingredient:
        return INGREDIENTS[self.name]

    def lines(self, section: str, k: int, sizes: Sizes) -> list[str]:
        """Returns the lines of one section ("init", "forward", …) as step number k."""
        random, chosen = Random(self.seed), dict[str, str]()
        own = self.ingredient
        for match in _CHOICE.finditer(f"{own.init}\n{own.forward}"):
            options = match[1].split("|")
            chosen.setdefault(match[1], options[random.randrange(len(options))])
        text = _CHOICE.sub(lambda match: chosen[match[1]], getattr(own, section))
        text = Template(text).safe_substitute(asdict(sizes), k=k)
        lines = text.splitlines()
        if section == "forward" and self.residual:
            lines = [f"skip{k} = h", *lines, f"h = h + skip{k}"]
        return lines


@dataclass(frozen=True)
class Program:
    """A model, its loss function and the way to run it: data only."""

    sizes: Sizes
    start: Kind
    steps: tuple[Step, ...]
    loss: str = "squares"
    call: str = "plain"
    first: str = "grads"  # quantities of the first batch and of the second one
    second: str = "sums"
    nan_first: bool = False
    seed: int = 0

    @property
    def mixes(self) -> bool:
        return any(step.ingredient.mixes for step in self.steps)

    @property
    def may_refuse(self) -> bool:
        """Whether a refusal counts as an answer, even if no samples are mixed."""
        is_odd = self.call in ("frames", "time_first") or self.nan_first
        return is_odd or any(step.ingredient.may_refuse for step in self.steps)

    @property
    def mode(self) -> str:
        return next((step.ingredient.mode for step in self.steps if step.ingredient.mode), "eager")

    @property
    def classes(self) -> set[int]:
        """Returns the classes of issue 19 that its parts may show."""
        found = {c for step in self.steps for c in step.ingredient.classes}
        found.update(LOSSES[self.loss][2], CALLS[self.call][2], (8,) if self.nan_first else ())
        return found

    @property
    def is_well_formed(self) -> bool:
        """Whether each step takes the kind of shape that the one before gives."""
        kind = self.start
        for step in self.steps:
            if step.ingredient.takes not in ("any", kind):
                return False
            kind = kind if step.ingredient.gives == "any" else step.ingredient.gives
        return True

    def without(self, number: int) -> Program:
        """Returns the program with one step less."""
        return replace(self, steps=self.steps[:number] + self.steps[number + 1 :])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Program:
        steps = tuple(Step(**step) for step in data["steps"])
        return cls(**{**data, "sizes": Sizes(**data["sizes"]), "steps": steps})

    # -- source

    def source(self) -> str:
        """Returns `Model`, `loss_fn`, `make_batch`, `between` and `after` as source."""
        sizes = self._inner_sizes()
        init = [line for k, s in enumerate(self.steps) for line in s.lines("init", k, sizes)]
        body = [line for k, s in enumerate(self.steps) for line in s.lines("forward", k, sizes)]
        used = [name for name in ("ids", "mask") if re.search(rf"\b{name}\b", "\n".join(body))]
        loss, call = LOSSES[self.loss][0], CALLS[self.call][0]
        labels = ["y"] if re.search(r"\by\b", loss) else []
        args = "".join(f", {name}" for name in used)
        outside = "".join(f", {name}" for name in (*used, *labels))
        shape = KINDS["seq" if self.call in ("frames", "time_first") else self.start]
        numbers = {**asdict(self.sizes), "args": args}
        numbers["shape"] = Template(shape).substitute(numbers)
        parts = [Template(_PARTS[name]).substitute(numbers) for name in ("x", *used, *labels)]
        lines = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in init]
        lines += ["", f"    def forward(self, h{args}):", *(f"        {line}" for line in body)]
        lines += ["        return h", "", "", f"def loss_fn(model, x{outside}):"]
        lines += [f"    {Template(call).substitute(numbers)}", f"    return {loss}", "", ""]
        lines += ["def make_batch():", f"    return {', '.join(parts)},"]
        for name in ("between", "after"):
            own = [line for k, s in enumerate(self.steps) for line in s.lines(name, k, sizes)]
            lines += ["", "", f"def {name}(model):", *(f"    {line}" for line in own or ["pass"])]
        return "\n".join(lines) + "\n"

    def _inner_sizes(self) -> Sizes:
        """Returns the sizes that the model sees, which takes frames or steps for samples."""
        s = self.sizes
        if self.call == "frames":
            return Sizes(s.B * s.T, s.T, s.D)
        return Sizes(s.T, s.B, s.D) if self.call == "time_first" else s


def draw(seed: int, *, mixing: bool) -> Iterator[Program]:
    """Draws programs without end; the same ones for the same seed."""
    assert ingredients.__all__
    for number in count():
        yield _drawn(Random(f"{seed} {number} {mixing}"), number, mixing)


def _drawn(random: Random, number: int, mixing: bool) -> Program:
    B = random.choice((2, 3, 3, 4, 4))
    sizes = Sizes(B, random.choice((2, 3, B, B)), random.choice((3, 4, B if B > 2 else 3)))
    call = _weighted(random, {name: rate for name, (_, rate, _) in CALLS.items()})
    start: Kind = random.choice(("vec", "vec", "seq", "seq", "img"))
    if call == "frames":
        start = "vec"
    elif call == "time_first":
        start = "seq"
    kind, steps = start, list[Step]()
    length = random.randint(1, 7)
    place = random.randrange(length) if mixing else -1
    for k in range(length):
        if k == place:
            pool = {n: i.rate for n, i in _fitting(kind, sizes, call) if i.mixes}
        elif random.random() < 0.35:
            pool = {n: i.rate for n, i in _fitting(kind, sizes, call) if i.is_layer}
        else:
            fitting = _fitting(kind, sizes, call)
            pool = {
                n: i.rate * (_ODD if i.classes else 1)
                for n, i in fitting
                if not i.mixes and not i.is_layer
            }
            if mixing:  # one thing at a time
                pool = {n: r for n, r in pool.items() if not INGREDIENTS[n].mode}
        name = _weighted(random, pool)
        own = INGREDIENTS[name]
        residual = own.residual and random.random() < 0.3
        steps.append(Step(name, random.randrange(1 << 30), residual))
        kind = kind if own.gives == "any" else own.gives
    if random.random() < 0.9:  # something to take a gradient of, before and after
        steps.insert(0, Step("linear", random.randrange(1 << 30)))
    loss = _weighted(random, {name: rate for name, (_, rate, _) in LOSSES.items()})
    first, second = random.choice(_QUANTITIES)
    if call in ("frames", "time_first"):  # only the losses tell what the samples are
        first = second = "grads"
    nan_first = random.random() < 0.01
    return Program(sizes, start, tuple(steps), loss, call, first, second, nan_first, number)


def draw_each(name: str) -> list[Program]:
    """Draws small programs with one ingredient: between layers, in several sizes, with all its choices."""
    own = INGREDIENTS[name]
    starts: list[Kind] = ["vec", "seq", "img"] if own.takes == "any" else [own.takes]
    found = []
    for seed, (sizes, start) in enumerate(product(_EACH_SIZES, starts)):
        if own.only_if and not eval(own.only_if, {}, asdict(sizes)):
            continue
        before, after = Step("linear", seed), Step("linear", seed + 1, residual=seed % 2 == 0)
        step = Step(name, seed, own.residual and seed % 3 == 0)
        first, second = _QUANTITIES[seed % 3]
        loss = ("squares", "labels", "targets")[seed % 3]
        found.append(
            Program(sizes, start, (before, step, after), loss, "plain", first, second, False, seed)
        )
    return found


@lru_cache(maxsize=4096)
def _fitting(kind: Kind, sizes: Sizes, call: str) -> list[tuple[str, Ingredient]]:
    found = [
        (name, own)
        for name, own in INGREDIENTS.items()
        if own.takes in ("any", kind) and (not own.only_if or eval(own.only_if, {}, asdict(sizes)))
    ]
    if call in ("frames", "time_first"):  # the other inputs keep their own samples
        found = [(n, i) for n, i in found if not re.search(r"\b(ids|mask)\b", i.forward)]
    return found


def _weighted(random: Random, rates: dict[str, float]) -> str:
    return random.choices(list(rates), list(rates.values()))[0]
