"""Measures the Python overhead of recording, on models so tiny that arithmetic costs almost nothing.

Run as ``python -m benchmarks.eager_cost``; ``--store`` keeps the rows. Plain and recorded steps alternate, so
that a slow phase of the machine affects both. The fastest of each counts, in CPU time of this thread, which
other processes do not lengthen. The ratio is of these two.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import pergrad
from benchmarks.fastest import fastest, fastest_rows, store
from benchmarks.models import transformer
from benchmarks.rows import Row, provenance

_WORDS = 64

Made = tuple[nn.Module, Callable[[], Tensor]]  # a model, and the loss of one batch


def _language_model(model: nn.Module, samples: int = 4, length: int = 16) -> Made:
    words = torch.randint(0, _WORDS, (samples, length))
    return model, lambda: model(input_ids=words, use_cache=False).logits.square().sum()


def llama(width: int, samples: int, length: int) -> Made:
    config = LlamaConfig(
        vocab_size=_WORDS,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_WORDS,
    )
    return _language_model(LlamaForCausalLM(config), samples, length)


def gpt2() -> Made:
    config = GPT2Config(
        vocab_size=_WORDS,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=_WORDS,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _language_model(GPT2LMHeadModel(config))


def deep_transformer() -> Made:
    """Makes as many calls as the transformer of the GPU benchmark, each with almost no arithmetic."""
    task = transformer(2, 4, vocabulary=16, width=16, depth=12, heads=2)
    return task.model, lambda: task.loss(task.model(task.inputs), task.targets)


def mlp() -> Made:
    layers = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)]
    model, x = nn.Sequential(*layers), torch.randn(4, 16)
    return model, lambda: model(x).square().sum()


MODELS: dict[str, tuple[str, Callable[[], Made]]] = {
    "llama-64": ("Llama, 2 layers of 64, B=8 T=32", lambda: llama(64, 8, 32)),
    "llama-32": ("Llama, 2 layers of 32, B=4 T=16", lambda: llama(32, 4, 16)),
    "gpt2-tiny": ("GPT-2, 2 layers of 32, B=4 T=16", gpt2),
    "transformer-12": ("Transformer, 12 layers of 16, B=2 T=4", deep_transformer),
    "mlp-tiny": ("MLP, 3 layers of 32, B=4", mlp),
}


QUANTITIES: dict[str, Callable[[], pergrad.Quantity]] = {
    "grads": pergrad.Grads,
    "norms": pergrad.Norms,
}


def steps(
    model: nn.Module, loss: Callable[[], Tensor], quantity: Callable[[], pergrad.Quantity]
) -> dict[str, Callable[[], None]]:
    """Returns a plain step and a recorded step."""

    def plain() -> None:
        loss().backward()
        model.zero_grad(set_to_none=True)

    def recorded() -> None:
        with pergrad.record(model, quantity()):
            loss().backward()

    return {"plain": plain, "pergrad": recorded}


def rows(rounds: int, seed: int) -> list[Row]:
    """Returns rows of plain training and pergrad for each quantity of each model."""
    found: list[Row] = []
    made = provenance(torch.device("cpu"), of_commit=None, rounds=rounds, steps=1, seed=seed)
    for name, (title, make) in MODELS.items():
        for quantity, of_batch in QUANTITIES.items():
            torch.manual_seed(seed)
            timed = steps(*make(), of_batch)
            found += fastest_rows(
                fastest(timed, rounds, warm_up=rounds // 10, clock=time.thread_time),
                {method: method for method in timed},
                size="tiny",
                model=name,
                model_title=title,
                quantity=quantity,
                note="the fastest step; `ratio` is of the fastest",
                provenance=made,
            )
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", action="store_true", help="keep the rows")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    found = rows(options.rounds, options.seed)
    for row in found:
        assert row.seconds is not None
        what = f"{row.model_title:38} {row.quantity:6} {row.method:8}"
        print(f"{what} {row.seconds * 1e3:6.2f} ms {row.ratio:5.2f}x")
    if options.store:
        store(found, "eager_cost")


if __name__ == "__main__":
    main()
