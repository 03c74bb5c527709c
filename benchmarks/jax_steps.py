"""Runs JAX's jitted vmap(grad) as a step of the benchmark. Import this only if JAX is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from benchmarks.jax_models import Array, Net, forward_of
from benchmarks.methods.registry import SelfCounted
from benchmarks.models import Task

Gradients = dict[str, Array]


def _norms(gradients: Gradients) -> Array:
    squares = [(g.reshape(len(g), -1) ** 2).sum(1) for g in gradients.values()]
    return jnp.sqrt(sum(squares[1:], squares[0]))


def whole(gradients: Gradients) -> Gradients:
    """Returns the gradients unchanged."""
    return gradients


def only_norms(gradients: Gradients) -> Gradients:
    """Reduces (B, *shape) of each parameter to norms (B,)."""
    return {"norms": _norms(gradients)}


def clipped(bound: float) -> Callable[[Gradients], Gradients]:
    """Returns a function that computes Σ_n min(1, bound / |g_n|) g_n."""

    def clip(gradients: Gradients) -> Gradients:
        weights = jnp.minimum(1, bound / _norms(gradients))
        return {name: jnp.tensordot(weights, g, 1) for name, g in gradients.items()}

    return clip


def _compute_type(task: Task) -> Any:
    """Returns the dtype of products: that of torch's autocast if it is on."""
    device = task.inputs.device.type
    weight = next(task.model.parameters())
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    return jnp.dtype(str(dtype).removeprefix("torch."))


def array(tensor: Tensor) -> Array:
    """Copies a tensor to JAX's device."""
    return jnp.asarray(tensor.detach().cpu().numpy())


def vmapped(task: Task, reduce: Callable[[Gradients], Gradients]) -> SelfCounted:
    """Compiles vmap(grad) and `reduce` into one function; its memory is XLA's own count."""
    jax.config.update("jax_enable_x64", True)  # otherwise float64 is silently float32
    forward, compute = forward_of(task.model), _compute_type(task)

    def loss(weights: Gradients, x: Array, y: Array) -> Array:
        logits = forward(Net(weights, compute), x)
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        scores = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(scores, y[..., None], axis=-1).sum()

    def step(weights: Gradients, x: Array, y: Array) -> Gradients:
        return reduce(jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(weights, x, y))

    weights = {name: array(p) for name, p in task.model.named_parameters()}
    x, y = array(task.inputs), array(task.targets)
    is_exact = torch.get_float32_matmul_precision() == "highest"
    with jax.default_matmul_precision("highest" if is_exact else "tensorfloat32"):
        compiled = jax.jit(step).lower(weights, x, y).compile()
    counted = compiled.memory_analysis()

    def run() -> dict[str, Tensor]:
        results = jax.block_until_ready(compiled(weights, x, y))
        return {name: torch.from_dlpack(result) for name, result in results.items()}

    peak = (
        counted.argument_size_in_bytes + counted.output_size_in_bytes + counted.temp_size_in_bytes
    )
    return SelfCounted(run, peak)
