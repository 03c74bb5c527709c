"""Checks of Hugging Face models that `fully_shard` shards; see ranks.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

import pergrad
from pergrad.testing import loop_grads
from tests.distributed.models import all_near, clipped_of, near, norms_of, own

TOLERANCE = 1e-11


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).double()


def adapted() -> Any:
    base = llama()
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(base, config).double()


def losses(model: nn.Module, tokens: Tensor) -> Tensor:
    scores = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    return -scores.gather(-1, tokens[:, 1:, None]).squeeze(-1).sum(1)


def sums_are_those_of_one_process(
    make: Callable[[], Any], blocks: Callable[[Any], Iterable[nn.Module]], checkpoints: bool = False
) -> None:
    tokens = torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(3))
    grads, model = loop_grads(make(), losses, tokens), make()
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    for block in (*blocks(model), model):
        fully_shard(block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for memory in ("kept", "low"):
        clipped = pergrad.ClippedSum(1.0, memory=memory)  # type: ignore[arg-type]
        norms, total = pergrad.Norms(), pergrad.Sum()
        with pergrad.record(model, clipped, norms, total):
            losses(model, own(tokens)).sum().backward()
        near(norms.result, own(norms_of(grads)), TOLERANCE)
        for found, wanted in (
            (clipped.result, clipped_of(grads, 1.0)),
            (total.result, {name: g.sum(0) for name, g in grads.items()}),
        ):
            whole: Any = found
            all_near({name: t.full_tensor() for name, t in whole.items()}, wanted, TOLERANCE)


def check_a_llama_with_tied_embeddings() -> None:
    sums_are_those_of_one_process(llama, lambda model: model.model.layers)


def check_a_llama_with_checkpoints() -> None:
    sums_are_those_of_one_process(llama, lambda model: model.model.layers, checkpoints=True)


def check_adapters_of_a_llama() -> None:
    sums_are_those_of_one_process(adapted, lambda model: model.base_model.model.model.layers)


def check_a_tensor_parallel_llama() -> None:
    tokens = torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(3))
    grads, model = loop_grads(llama(), losses, tokens), llama()
    styles: dict[str, Any] = {}
    for k in (0, 1):
        for name in ("gate_proj", "up_proj"):
            styles[f"model.layers.{k}.mlp.{name}"] = ColwiseParallel()
        styles[f"model.layers.{k}.mlp.down_proj"] = RowwiseParallel()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, styles)
    norms, clipped = pergrad.Norms(), pergrad.ClippedSum(1.0)
    with pergrad.record(model, norms, clipped):
        losses(model, tokens).sum().backward()
    near(norms.result, norms_of(grads), TOLERANCE)
    found = {
        name: t.full_tensor() if hasattr(t, "full_tensor") else t
        for name, t in clipped.result.items()
    }
    all_near(found, clipped_of(grads, 1.0), TOLERANCE)
