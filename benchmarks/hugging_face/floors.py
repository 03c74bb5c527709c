"""Counts the fewest operations and bytes of norms, clipped sums and gradients, relative to training.

``python -m benchmarks.hugging_face.floors`` prints a table of the models of real size; nothing is computed,
as their tensors are fake. A layer with inputs of K numbers and outputs of N at T positions of each of B
samples takes 2BTKN operations for the sum of its gradients. Norms need no such sum; they need B T² (K + N)
operations for one half of each symmetric matrix of inner products, or 2BTKN for the gradients of the samples,
whichever is less. A clipped sum needs both, or gradients that are kept: BKN numbers that are written once and
read twice. The floor of a step is that of its operations at the rate of matrix products, plus that of the
kept gradients at the rate of memory; what else moves through memory is left out, for training too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.hugging_face.subjects import SUBJECTS, losses

__all__ = ["Floor", "floor_of", "table"]

# An H200, measured: a bfloat16 matrix product of 8192 x 8192 x 8192, and a copy on the device.
OPERATIONS, BYTES = 790e12, 4.3e12
_WIDTH = 2  # bytes of a number
_SCRIPTED = {"deberta-v2"}  # TorchScript takes no fake tensors


@dataclass(frozen=True)
class Layer:
    """A product of inputs and weights: T positions of each sample, K inputs and N outputs of each."""

    samples: int
    positions: int
    inputs: int
    outputs: int
    groups: int = 1

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs * self.groups

    @property
    def summing(self) -> int:
        """Operations for the sum of the gradients, and as many for those of all samples."""
        return 2 * self.samples * self.positions * self.weights

    @property
    def norms(self) -> int:
        sides = self.groups * (self.inputs + self.outputs)
        return min(self.samples * self.positions**2 * sides, self.summing)

    @property
    def keeping(self) -> float:
        """Seconds to write the gradients of all samples."""
        return self.samples * self.weights * _WIDTH / BYTES


@dataclass(frozen=True)
class Floor:
    """The least time of a step as a multiple of that of training."""

    norms: float
    clipped: float
    grads: float


def layers_of(model: nn.Module, samples: int) -> tuple[list[Layer], list[Any]]:
    """Returns a list that fills with the layers of a forward pass, and the handles of its hooks."""
    found: list[Layer] = []

    def note(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        weight = module.weight
        if not weight.requires_grad:
            return
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            inputs, outputs = weight[0].numel(), weight.shape[0] // module.groups
            positions = output[0, 0].numel()
            found.append(Layer(samples, positions, inputs, outputs, module.groups))
            return
        inputs, outputs = args[0].shape[-1], output.shape[-1]
        found.append(Layer(samples, output.numel() // outputs // samples, inputs, outputs))

    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, transformers.pytorch_utils.Conv1D)
    return found, [m.register_forward_hook(note) for m in model.modules() if isinstance(m, kinds)]


def floor_of(model: nn.Module, batch: dict[str, Tensor]) -> Floor:
    """Counts the operations of a training step of fake tensors, and what the quantities change."""
    samples = len(batch["labels"])
    layers, hooks = layers_of(model, samples)
    with FlopCounterMode(display=False) as counter:
        losses(model, batch).sum().backward()
    for hook in hooks:
        hook.remove()
    training = counter.get_total_flops() / OPERATIONS
    summing = sum(layer.summing for layer in layers) / OPERATIONS
    norms = sum(layer.norms for layer in layers) / OPERATIONS
    clipping = sum(min(layer.norms / OPERATIONS, 3 * layer.keeping) for layer in layers)
    keeping = sum(layer.keeping for layer in layers)
    return Floor(
        (training - summing + norms) / training,
        (training + clipping) / training,
        (training + keeping) / training,
    )


def rows(names: Sequence[str]) -> Iterator[tuple[str, Floor]]:
    """Yields the title and the floor of each model of real size."""
    for name in names:
        if name in _SCRIPTED:
            continue
        subject = SUBJECTS[name]
        with torch.device("meta"):
            model = subject.build("gpu")
            with FakeTensorMode(allow_non_fake_inputs=True):
                batch = subject.batch("gpu", model)
                floor = floor_of(model, batch)
        yield subject.title, floor


def table(names: Sequence[str]) -> str:
    """Renders the floors."""
    lines = ["| floor | norms | clipped sum | full gradients |", "|---|---|---|---|"]
    for title, floor in rows(names):
        lines.append(f"| {title} | {floor.norms:.2f} | {floor.clipped:.2f} | {floor.grads:.2f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    print(table(parser.parse_args(arguments).models))
    return 0


if __name__ == "__main__":
    sys.exit(main())
