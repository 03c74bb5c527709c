"""Compute per-sample gradient norms of a language model's LoRA adapters.

A tiny Hugging Face Llama with random weights gets adapters from PEFT; its own weights are frozen, as in LoRA
fine-tuning. pergrad needs no change to the model and records only the adapters, which require gradients.
`pergrad.Norms` computes the norm of each text's gradient without holding a gradient; `pergrad.verify`
compares with a few texts run alone. The texts are random tokens of different lengths: padding is masked in
the loss and in the attention, so it does not affect the gradients.

Run it with `python examples/lora.py`; it needs transformers and peft, downloads nothing, and takes a few
seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights are random, so nothing is downloaded

import peft
import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import pergrad

VOCABULARY = 100
PADDING = 0


def adapted_llama(rank: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=PADDING,
    )
    lora = peft.LoraConfig(
        r=rank,
        target_modules=["q_proj", "v_proj", "down_proj"],
        # By default B is zero, and then the gradient of A is zero too.
        init_lora_weights=False,
    )
    model: nn.Module = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    return model


def random_texts(samples: int, longest: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns (tokens, mask), both (n, longest): random lengths from 2 on, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (samples,), generator=generator)
    tokens = torch.randint(1, VOCABULARY, (samples, longest), generator=generator)
    mask = torch.arange(longest) < lengths.unsqueeze(1)
    return tokens.where(mask, PADDING), mask.long()


def losses(model: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:  # (n,)
    """Returns the mean loss of each text over its predicted tokens."""
    logits = model(input_ids=tokens, attention_mask=mask).logits[:, :-1]
    targets, is_text = tokens[:, 1:], mask[:, 1:]
    by_token = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (by_token * is_text).sum(1) / is_text.sum(1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--longest", type=int, default=24, help="tokens in the longest text")
    parser.add_argument("--rank", type=int, default=4, help="rank of the adapters")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    chosen = parser.parse_args(arguments)
    model = adapted_llama(chosen.rank, chosen.seed)
    tokens, mask = random_texts(chosen.samples, chosen.longest, chosen.seed)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{trainable} of {sum(p.numel() for p in model.parameters())} weights are trained\n")

    with pergrad.record(model, pergrad.Norms()) as norms:
        by_text = losses(model, tokens, mask)
        by_text.sum().backward()
    table = Table(title="Gradients of the adapters, one row per text")
    for heading in ("text", "tokens", "loss", "gradient norm"):
        table.add_column(heading, justify="right")
    for row in norms.result.argsort(descending=True).tolist():
        loss, norm = float(by_text[row].detach()), float(norms.result[row])
        table.add_row(str(row), str(int(mask[row].sum())), f"{loss:.3f}", f"{norm:.3f}")
    Console().print(table)
    return 0 if pergrad.verify(model, losses, tokens, mask).ok else 1


if __name__ == "__main__":
    sys.exit(main())
