"""Σ_n min(1, C / |g_n|) g_n, with C near the median norm: half of the samples are clipped."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.loop import clip_bound
from benchmarks.methods.grads import (
    Gradients,
    backpack_batch_grad,
    expanded_weights,
    opacus_hooks,
    register_compiled,
    vmapped,
)
from benchmarks.methods.norms import norms_of
from benchmarks.methods.registry import Step, method
from benchmarks.models import Task


def clip_by_hand(bound: float) -> Callable[[Gradients], Gradients]:
    """Returns a function from (B, *shape) of each parameter to the sum of the clipped gradients."""

    def clip(gradients: Gradients) -> Gradients:
        weights = (bound / norms_of(gradients)).clamp(max=1)
        return {
            name: torch.einsum("n,n...->...", weights.to(g.dtype), g)
            for name, g in gradients.items()
        }

    return clip


Memory = Literal["kept", "low", "high"]


def _pergrad(task: Task, memory: Memory) -> Step:
    pergrad = importlib.import_module("pergrad")
    bound = clip_bound(task)

    def step() -> dict[str, Tensor]:
        with pergrad.record(task.model, pergrad.ClippedSum(bound, memory=memory)) as clipped:
            task.loss(task.model(task.inputs), task.targets).backward()
        return clipped.result

    return step


@method("pergrad-clipped", "pergrad", quantity="clipped", requires="pergrad")
def pergrad_clipped(task: Task) -> Step:
    return _pergrad(task, "kept")


@method("pergrad-clipped-low", 'pergrad, memory="low"', quantity="clipped", requires="pergrad")
def pergrad_clipped_low(task: Task) -> Step:
    return _pergrad(task, "low")


@method("pergrad-clipped-high", 'pergrad, memory="high"', quantity="clipped", requires="pergrad")
def pergrad_clipped_high(task: Task) -> Step:
    return _pergrad(task, "high")


def _clipped(task: Task, memory: Memory = "kept") -> Any:
    return importlib.import_module("pergrad").ClippedSum(clip_bound(task), memory=memory)


register_compiled(*("pergrad-clipped", "clipped"), _clipped)
register_compiled(
    *("pergrad-clipped-high", "clipped"),
    lambda task: _clipped(task, "high"),
    ways=("traced", "compiled"),
    with_option=', memory="high"',
)


@method("opacus-ghost", "Opacus ghost, two passes", quantity="clipped", requires="opacus")
def opacus_ghost(task: Task) -> Step:
    """Clips as `DPLossFastGradientClipping` does, without the noise that its optimizer would add."""
    samplers = importlib.import_module("opacus.grad_sample")
    optimizers = importlib.import_module("opacus.optimizers")
    losses = importlib.import_module("opacus.utils.fast_gradient_clipping_utils")
    bound = clip_bound(task)
    wrapped = samplers.GradSampleModuleFastGradientClipping(
        task.model, loss_reduction="sum", max_grad_norm=bound
    )
    optimizer = optimizers.DPOptimizerFastGradientClipping(
        torch.optim.SGD(task.model.parameters(), lr=0.0),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        expected_batch_size=task.inputs.shape[0],
        loss_reduction="sum",
    )
    criterion = losses.DPLossFastGradientClipping(
        wrapped, optimizer, nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum"
    )

    def step() -> dict[str, Tensor]:
        logits = wrapped(task.inputs)
        shape = logits.shape if logits.dim() == 3 else None  # positions belong to their sample
        criterion(logits.flatten(0, -2), task.targets.flatten(), shape=shape).backward()
        named = task.model.named_parameters()
        return {name: p.grad for name, p in named if p.grad is not None}

    return step


@method("fastdp", "fastDP", quantity="clipped", requires="fastDP")
def fastdp(task: Task) -> Step:
    """Clips by book-keeping in one pass; fastDP is on no package index, so it must be installed by hand."""
    bound = clip_bound(task)
    batch = task.inputs.shape[0]
    first = next(name for name, _ in task.model.named_parameters())
    engine = importlib.import_module("fastDP").PrivacyEngine(
        task.model,
        batch_size=batch,
        sample_size=batch,
        epochs=1,
        noise_multiplier=0.0,
        max_grad_norm=bound,
        clipping_fn="Abadi",
        clipping_mode="MixOpt",
        loss_reduction="sum",
        origin_params=[first],
    )
    engine.attach(torch.optim.SGD(task.model.parameters(), lr=0.0))

    def step() -> dict[str, Tensor]:
        task.loss(task.model(task.inputs), task.targets).backward()
        found = {}
        for name, parameter in task.model.named_parameters():
            attributes = vars(parameter)
            for attribute in ("summed_clipped_grad", "private_grad"):  # depends on the version
                if attribute in attributes:
                    found[name] = attributes.pop(attribute)  # the next step would add to it
        return found

    return step


@method("expanded-weights-clipped", "torch ExpandedWeights", quantity="clipped")
def expanded_weights_clipped(task: Task) -> Step:
    clip, gradients = clip_by_hand(clip_bound(task)), expanded_weights(task)
    return lambda: clip(gradients())


@method("vmap-clipped", "vmap(grad)", quantity="clipped")
def vmap_clipped(task: Task) -> Step:
    return vmapped(task, reduce=clip_by_hand(clip_bound(task)))


@method("vmap-clipped-compiled", "vmap(grad), torch.compile", quantity="clipped", compiled=True)
def vmap_clipped_compiled(task: Task) -> Step:
    return vmapped(task, reduce=clip_by_hand(clip_bound(task)), is_compiled=True)


@method("opacus-clipped", "Opacus hooks", quantity="clipped", requires="opacus")
def opacus_clipped(task: Task) -> Step:
    clip = clip_by_hand(clip_bound(task))
    gradients = opacus_hooks(task)
    return lambda: clip(gradients())


@method("backpack-clipped", "BackPACK BatchGrad", quantity="clipped", requires="backpack")
def backpack_clipped(task: Task) -> Step:
    clip = clip_by_hand(clip_bound(task))
    gradients = backpack_batch_grad(task)
    return lambda: clip(gradients())


@method("jax-clipped", "JAX vmap(grad), jit", quantity="clipped", requires="jax")
def jax_clipped(task: Task) -> Step:
    steps = importlib.import_module("benchmarks.jax_steps")
    return steps.vmapped(task, steps.clipped(clip_bound(task)))
