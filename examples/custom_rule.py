"""Write a rule for the per-sample gradients of a custom function.

The layer computes radial basis functions: y_k = exp(-gamma_k |x - c_k|²), with learned centres c_k and widths
gamma_k. It works without a rule: pergrad sees the torch functions that it calls, and falls back to slower
ways for functions without a rule. `explain` shows the way and its cost. A rule gives the gradients in closed
form. `check_rule` compares the rule with one backward pass per sample, `explain` shows the change, and a
timing shows whether it is worth it.

Run it with `python examples/custom_rule.py`; it takes a few seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

import pergrad
from pergrad.testing import check_rule


def plain_rbf(x: Tensor, centers: Tensor, gamma: Tensor) -> Tensor:  # (..., i), (k, i), (k,)
    return torch.exp(-gamma * torch.cdist(x, centers).square())  # (..., k)


def rbf(x: Tensor, centers: Tensor, gamma: Tensor) -> Tensor:
    """Computes `plain_rbf` as one function that pergrad sees, so that it can have a rule."""
    arguments = (x, centers, gamma)
    if has_torch_function(arguments):
        found: Tensor = handle_torch_function(rbf, arguments, *arguments)
        return found
    return plain_rbf(*arguments)


@pergrad.implements_per_sample_grads(rbf)
def rbf_rule(
    grad_output: Tensor,  # (n, 1, ..., k): for each sample, the shape of the output for it alone
    x: Tensor,  # (n, 1, ..., i)
    centers: Tensor,
    gamma: Tensor,
) -> dict[str, Any]:
    grad_output, x = grad_output.flatten(1, -2), x.flatten(1, -2)  # (n, t, k), (n, t, i)
    squares = torch.cdist(x, centers).square()
    slope = grad_output * torch.exp(-gamma * squares)  # derivative with respect to the exponent

    def of_centers() -> Tensor:  # Σ_t 2 gamma slope (x - c)
        pull = 2 * gamma * slope
        return torch.einsum("ntk,nti->nki", pull, x) - pull.sum(1).unsqueeze(-1) * centers

    # A function is called only if that argument is recorded: a frozen one costs nothing.
    return {"centers": of_centers, "gamma": lambda: -(slope * squares).sum(1)}


class RadialBasis(nn.Module):
    def __init__(
        self, function: Callable[..., Tensor], inputs: int, outputs: int, seed: int
    ) -> None:
        super().__init__()
        self.function = function
        generator = torch.Generator().manual_seed(seed)
        self.centers = nn.Parameter(torch.randn(outputs, inputs, generator=generator))
        self.gamma = nn.Parameter(torch.full((outputs,), 0.5 / inputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.centers, self.gamma)


def losses(model: nn.Module, x: Tensor) -> Tensor:  # (n,)
    outputs: Tensor = model(x)
    return outputs.square().sum(1)


def seconds(model: nn.Module, x: Tensor, repeats: int) -> float:
    """Returns the time of the fastest of several runs, after a warm-up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        pergrad.grads(model, losses, x)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--inputs", type=int, default=32)
    parser.add_argument("--outputs", type=int, default=64, help="number of centres")
    parser.add_argument("--repeats", type=int, default=30, help="timed runs")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    x = torch.randn(
        chosen.samples, chosen.inputs, generator=torch.Generator().manual_seed(chosen.seed)
    )
    sizes = (chosen.inputs, chosen.outputs, chosen.seed)
    before, after = RadialBasis(plain_rbf, *sizes), RadialBasis(rbf, *sizes)

    check_rule(rbf, x[:5], after.centers, after.gamma)
    check_rule(
        rbf, x[:6].unflatten(0, (2, 3)), after.centers, after.gamma
    )  # two samples of three rows
    print("check_rule: the rule agrees with one backward pass per sample")
    for title, model in (("without a rule", before), ("with the rule", after)):
        print(f"\n{title}: {1000 * seconds(model, x, chosen.repeats):.1f} ms")
        print(pergrad.explain(model, losses, x))
    return 0


if __name__ == "__main__":
    sys.exit(main())
