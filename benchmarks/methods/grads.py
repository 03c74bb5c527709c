"""Computes full gradients: (B, *shape) for every parameter."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads as expanded_weights_call

from benchmarks.methods.registry import Quantity, Step, method, whole_graph
from benchmarks.models import Task

Gradients = dict[str, Tensor]


def _grad_samples(model: nn.Module) -> Gradients:
    named = model.named_parameters()
    return {name: p.grad_sample for name, p in named}  # type: ignore[attr-defined]


@method("pergrad", "pergrad", quantity="grads", requires="pergrad")
def pergrad_call(task: Task) -> Step:
    pergrad = importlib.import_module("pergrad")

    def step() -> dict[str, Tensor]:
        call = pergrad.call_for_per_sample_grads(task.model)
        task.loss(call(task.inputs), task.targets).backward()
        return _grad_samples(task.model)

    return step


@method("pergrad-record", "pergrad.record", quantity="grads", requires="pergrad")
def pergrad_record(task: Task) -> Step:
    pergrad = importlib.import_module("pergrad")

    def step() -> dict[str, Tensor]:
        grads = pergrad.Grads()
        with pergrad.record(task.model, grads):
            task.loss(task.model(task.inputs), task.targets).backward()
        return grads.result

    return step


def _unchanged(gradients: Gradients) -> Gradients:
    return gradients


_COMPILED: dict[str, tuple[str, dict[str, Any]]] = {
    "traced": ('pergrad.compiled(backend="eager")', {"backend": "eager"}),
    "compiled": ("pergrad.compiled", {}),
    "graphs": ("pergrad.compiled, CUDA graphs", {"cuda_graphs": True}),
    "traced-graphs": (
        'pergrad.compiled(backend="eager"), CUDA graphs',
        {"backend": "eager", "cuda_graphs": True},
    ),
}


def register_compiled(
    prefix: str,
    quantity: Quantity,
    made: Callable[[Task], Any],
    results: Callable[[Any], Gradients] = _unchanged,
    ways: Iterable[str] = _COMPILED,
    with_option: str = "",
) -> None:
    """Registers methods by `pergrad.compiled` for the quantity from `made`; titles name the options."""
    for way in ways:
        title, options = _COMPILED[way]

        def prepare(task: Task, options: dict[str, Any] = options) -> Step:
            run = _compiled_by_pergrad(task, made(task), options)
            return lambda: results(run())

        method(
            *(f"{prefix}-{way}", title + with_option),
            quantity=quantity,
            requires="pergrad",
            compiled="backend" not in options,
            graphs="cuda_graphs" in options,
        )(prepare)


def _compiled_by_pergrad(task: Task, quantity: Any, options: dict[str, Any]) -> Callable[[], Any]:
    """Returns a compiled step of `pergrad.compiled` that returns the quantity's result.

    A step that cannot be compiled would run uncompiled with a warning; here this is an error.
    """
    pergrad = importlib.import_module("pergrad")
    loss = lambda model, x, y: task.loss(model(x), y)  # noqa: E731
    step = pergrad.compiled(task.model, loss, quantity, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="pergrad.compiled")
        # The first call with a signature is not compiled, the second not captured.
        for _ in range(3):
            step(task.inputs, task.targets)
    if step.graphs != 1:
        raise RuntimeError(f"three calls of pergrad.compiled made {step.graphs} graphs, expected 1")

    def run() -> Any:
        step(task.inputs, task.targets)
        return quantity.result

    return run


register_compiled(
    *("pergrad", "grads"),
    lambda _: importlib.import_module("pergrad").Grads(),
    ways=("traced", "compiled", "traced-graphs"),
)


@method("expanded-weights", "torch ExpandedWeights", quantity="grads")
def expanded_weights(task: Task) -> Step:
    def step() -> dict[str, Tensor]:
        call = expanded_weights_call(task.model, loss_reduction="sum")
        task.loss(call(task.inputs), task.targets).backward()
        return _grad_samples(task.model)

    return step


def vmapped(
    task: Task, *, reduce: Callable[[Gradients], Gradients] = _unchanged, is_compiled: bool = False
) -> Step:
    """Returns vmap(grad) and a reduction of the gradients as one function that can be compiled."""

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits = functional_call(task.model, weights, (x.unsqueeze(0),))
        return task.loss(logits, y.unsqueeze(0))

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0))

    def reduced(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Gradients:
        return reduce(per_sample(weights, x, y))

    call = whole_graph(reduced) if is_compiled else reduced
    # Fused attention on the CPU has no batching rule and would run as a loop; this is as fast.
    on_cpu = task.inputs.device.type == "cpu"

    def step() -> dict[str, Tensor]:
        weights = {name: p.detach() for name, p in task.model.named_parameters()}
        with sdpa_kernel(SDPBackend.MATH) if on_cpu else nullcontext():
            return call(weights, task.inputs, task.targets)

    return step


@method("vmap", "vmap(grad)", quantity="grads")
def vmap_grad(task: Task) -> Step:
    return vmapped(task)


@method("vmap-compiled", "vmap(grad), torch.compile", quantity="grads", compiled=True)
def vmap_grad_compiled(task: Task) -> Step:
    return vmapped(task, is_compiled=True)


@method("opacus", "Opacus hooks", quantity="grads", requires="opacus")
def opacus_hooks(task: Task) -> Step:
    extra = importlib.import_module("opacus.grad_sample")

    wrapped = extra.GradSampleModule(task.model, loss_reduction="sum")

    def step() -> dict[str, Tensor]:
        task.loss(wrapped(task.inputs), task.targets).backward()
        return _grad_samples(task.model)

    return step


def by_backpack(task: Task, extension: str) -> Callable[[], None]:
    """Returns a backward pass in which BackPACK stores the extension's results on the parameters."""
    backpack = importlib.import_module("backpack")
    chosen = getattr(importlib.import_module("backpack.extensions"), extension)()
    model = backpack.extend(task.model)
    criterion = backpack.extend(nn.CrossEntropyLoss(reduction="sum"))

    def run() -> None:
        logits = model(task.inputs)
        loss = criterion(logits.flatten(0, -2), task.targets.flatten())
        with warnings.catch_warnings(), backpack.backpack(chosen):
            # BackPACK only warns when it skips a layer, and also for modules that merely contain layers.
            warnings.filterwarnings("ignore", message=r".*have an extension for Module <class")
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            warnings.filterwarnings("error", message=r".*extension for Module <class 'torch\.")
            loss.backward()

    return run


@method("backpack", "BackPACK BatchGrad", quantity="grads", requires="backpack")
def backpack_batch_grad(task: Task) -> Step:
    run = by_backpack(task, "BatchGrad")

    def step() -> dict[str, Tensor]:
        run()
        named = task.model.named_parameters()
        return {name: p.grad_batch for name, p in named}  # type: ignore[attr-defined]

    return step


@method("jax", "JAX vmap(grad), jit", quantity="grads", requires="jax")
def jax_grads(task: Task) -> Step:
    steps = importlib.import_module("benchmarks.jax_steps")
    return steps.vmapped(task, steps.whole)
