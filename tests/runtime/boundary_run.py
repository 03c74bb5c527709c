"""Runs pergrad without one private name of torch after the other, each in a process of its own.

Prints a line of JSON for each: which of the stages gave the right numbers, and how the others failed. The
first line is about `import pergrad` without any of them.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint


def in_a_fork(work: Callable[[], Any]) -> Any:
    """What `work` returns, or the traceback of its error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            found = work()
        except BaseException:
            found = {"crash": traceback.format_exc()}
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(found))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"crash": "no answer"}


def import_without(paths: list[str]) -> list[str]:
    """Delete what can be deleted, and import pergrad; the names that were deleted."""
    deleted = []
    for path in paths:
        owner: Any = torch
        *parents, name = path.split(".")[1:]
        try:
            for parent in parents:
                owner = getattr(owner, parent)
            delattr(owner, name)
        except (AttributeError, TypeError):
            continue
        deleted.append(path)
    import pergrad  # noqa: PLC0415

    assert pergrad.Norms
    return deleted


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return 2 * t

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Model(nn.Module):
    """A rule, a derived weight, a checkpoint, an autograd.Function, a write through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.rand(5))
        self.register_buffer("shift", torch.rand(5))

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.first, x, use_reentrant=False)
        h = self.norm(F.linear(h, Double.apply(self.first.weight @ self.first.weight.T)))
        h = h * Double.apply(self.scale) + self.shift
        h.view(-1).mul_(0.5)
        return self.last(h).square().sum(1)


def expected(model: Model, x: Tensor) -> list[Tensor]:
    each = [torch.autograd.grad(model(x[n : n + 1]).sum(), [*model.parameters()]) for n in range(3)]
    return [torch.stack(of) for of in zip(*each, strict=True)]


def stages(pergrad: Any) -> dict[str, Callable[[], None]]:
    from pergrad.engine.compiling.passes.casts import casts  # noqa: PLC0415
    from pergrad.runtime import internals  # noqa: PLC0415

    model, x = Model().double(), torch.randn(3, 4, dtype=torch.float64)
    wanted = expected(model, x)
    names = [name for name, _ in model.named_parameters()]

    def check(found: Any) -> None:
        torch.testing.assert_close([found[name] for name in names], wanted)

    def recorded() -> None:
        quantity = pergrad.Grads()
        with pergrad.record(model, quantity):
            model(x).sum().backward()
        check(quantity.result)

    def plain() -> None:
        layer = nn.Linear(4, 2).double()
        quantity = pergrad.Norms()
        with torch.autocast("cpu", dtype=torch.bfloat16), pergrad.record(layer, quantity):
            layer(x).sum().backward()
        torch.testing.assert_close(quantity.result, (2 * (x.square().sum(1) + 1)).sqrt())

    def gated() -> None:
        pergrad.call_for_per_sample_grads(model, loss_reduction="sum")(x).sum().backward()
        found = {name: p.grad_sample for name, p in model.named_parameters()}
        for p in model.parameters():
            del p.grad_sample
        check(found)

    def expanded() -> None:
        w = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
        F.linear(x, pergrad.ExpandedWeight(w, 3, "sum")).sum().backward()
        torch.testing.assert_close(w.grad_sample, x.unsqueeze(1).expand(-1, 2, -1))

    def by_position(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[torch.arange(3)].sum(1)

    def step(backend: str) -> None:
        small = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).double()
        quantity = pergrad.Norms()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = pergrad.compiled(small, by_position, quantity, backend=backend)
            run(x)
            first = quantity.result.clone()
            for _ in range(2):
                run(x)
                torch.testing.assert_close(quantity.result, first)

    def rewritten() -> None:
        hidden = vars(internals).get("compile_fx")
        internals.compile_fx = lambda graph, inputs, config_patches: graph.forward
        try:
            step("inductor")
        finally:
            vars(internals).pop("compile_fx")
            assert hidden is None

    def cast() -> None:
        (found,) = casts([x], torch.float32)
        torch.testing.assert_close(found, x.float())

    return {
        "recorded": recorded,
        "plain": plain,
        "gated": gated,
        "expanded": expanded,
        "eager": lambda: step("eager"),
        "rewritten": rewritten,
        "cast": cast,
    }


def run_without(alias: str) -> dict[str, Any]:
    """The outcome of each stage without one entry."""
    import pergrad  # noqa: PLC0415
    from pergrad.runtime import boundary, internals  # noqa: PLC0415

    hidden, original, asked = internals.ENTRIES[alias], boundary.Entry.found, []

    def found(entry: boundary.Entry) -> Any:
        if entry is hidden:
            asked.append(entry.path)
            raise AttributeError(entry.path)
        return original(entry)

    boundary.Entry.found = found  # type: ignore[method-assign]
    outcome: dict[str, str | None] = {}
    for name, stage in stages(pergrad).items():
        try:
            stage()
            outcome[name] = None
        except pergrad.PergradError as error:
            outcome[name] = f"PergradError: {error}"
        except Exception:
            outcome[name] = traceback.format_exc()
    return {"alias": alias, "outcome": outcome, "asked": bool(asked)}


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # Loads what torch needs for a trace, once for all forks.
    make_fx(lambda x: F.linear(x, x), tracing_mode="fake")(torch.ones(2, 2))
    print(json.dumps(in_a_fork(lambda: import_without(sys.argv[1:]))), flush=True)

    import pergrad  # noqa: PLC0415
    from pergrad.runtime import internals  # noqa: PLC0415

    assert pergrad.Norms
    print(
        json.dumps([alias for alias in internals.ENTRIES if alias in vars(internals)]), flush=True
    )
    for alias in internals.ENTRIES:
        print(json.dumps(in_a_fork(lambda alias=alias: run_without(alias))), flush=True)


if __name__ == "__main__":
    main()
