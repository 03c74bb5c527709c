"""Computes the L2 norm of each sample's gradient over all parameters: {"norms": (B,)}."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor, nn

from benchmarks.methods.grads import (
    Gradients,
    by_backpack,
    expanded_weights,
    register_compiled,
    vmapped,
)
from benchmarks.methods.registry import Step, method
from benchmarks.models import Task


def norms_of(gradients: Gradients) -> Tensor:
    """Reduces (B, *shape) of each parameter to norms (B,)."""
    each = [torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients.values()]
    return torch.linalg.vector_norm(torch.stack(each), dim=0)


def _only_norms(gradients: Gradients) -> Gradients:
    return {"norms": norms_of(gradients)}


@method("pergrad-norms", "pergrad.record(Norms())", quantity="norms", requires="pergrad")
def pergrad_norms(task: Task) -> Step:
    pergrad = importlib.import_module("pergrad")

    def step() -> dict[str, Tensor]:
        with pergrad.record(task.model, pergrad.Norms()) as norms:
            task.loss(task.model(task.inputs), task.targets).backward()
        return {"norms": norms.result}

    return step


@method("pergrad-norms-call", "pergrad.norms", quantity="norms", requires="pergrad")
def pergrad_norms_call(task: Task) -> Step:
    pergrad = importlib.import_module("pergrad")

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return task.loss(model(x), y)

    def step() -> dict[str, Tensor]:
        return {"norms": pergrad.norms(task.model, loss, task.inputs, task.targets)}

    return step


register_compiled(
    *("pergrad-norms", "norms"),
    lambda _: importlib.import_module("pergrad").Norms(),
    lambda norms: {"norms": norms},
)


@method("opacus-ghost-norms", "Opacus ghost", quantity="norms", requires="opacus")
def opacus_ghost_norms(task: Task) -> Step:
    extra = importlib.import_module("opacus.grad_sample")
    wrapped = extra.GradSampleModuleFastGradientClipping(task.model, loss_reduction="sum")

    def step() -> dict[str, Tensor]:
        task.loss(wrapped(task.inputs), task.targets).backward()
        return {"norms": wrapped.get_norm_sample()}

    return step


@method("expanded-weights-norms", "torch ExpandedWeights", quantity="norms")
def expanded_weights_norms(task: Task) -> Step:
    gradients = expanded_weights(task)
    return lambda: _only_norms(gradients())


@method("vmap-norms", "vmap(grad)", quantity="norms")
def vmap_norms(task: Task) -> Step:
    return vmapped(task, reduce=_only_norms)


@method("vmap-norms-compiled", "vmap(grad), torch.compile", quantity="norms", compiled=True)
def vmap_norms_compiled(task: Task) -> Step:
    return vmapped(task, reduce=_only_norms, is_compiled=True)


@method("backpack-norms", "BackPACK BatchL2Grad", quantity="norms", requires="backpack")
def backpack_norms(task: Task) -> Step:
    run = by_backpack(task, "BatchL2Grad")

    def step() -> dict[str, Tensor]:
        run()
        squares = [p.batch_l2 for p in task.model.parameters()]  # type: ignore[attr-defined]
        return {"norms": torch.stack(squares).sum(0).sqrt()}

    return step


@method("jax-norms", "JAX vmap(grad), jit", quantity="norms", requires="jax")
def jax_norms(task: Task) -> Step:
    steps = importlib.import_module("benchmarks.jax_steps")
    return steps.vmapped(task, steps.only_norms)
