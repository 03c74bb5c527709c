"""Builds the Hugging Face models of the benchmark, of real size or small, with random weights."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

__all__ = ["SUBJECTS", "Batch", "Subject", "losses"]

Batch = dict[str, Tensor]


class Adapted(nn.Module):
    """A frozen layer plus a product of two trainable matrices (LoRA)."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.frozen(x) + self.up(self.down(x))
        return found


@dataclass(frozen=True)
class Subject:
    """A model class of transformers, its real configuration, and what is smaller on a CPU."""

    title: str
    model: str
    small: dict[str, Any]
    kind: str  # "causal", "masked", "pairs" or "images"
    real: dict[str, Any] = field(
        default_factory=dict
    )  # beside the defaults, which are the real size
    shape: tuple[int, int] = (
        16,
        512,
    )  # samples and positions, or samples and the side of the images
    adapted: tuple[str, ...] = ()  # names of layers that LoRA adapts; all others are frozen

    def title_at(self, size: str) -> str:
        """Returns the name of the real model, or the class alone for the small one."""
        lora = ", LoRA" if self.adapted else ""
        return self.title if size == "gpu" else f"small {self.model}{lora}"

    def build(self, size: str) -> nn.Module:
        """Returns the model with random weights; frozen ones of real size are in bfloat16."""
        made = getattr(transformers, self.model)
        config = made.config_class(**(self.real if size == "gpu" else self.small))
        config.use_cache = False
        torch.manual_seed(0)
        model: nn.Module = made(config).eval()
        if not self.adapted:
            return model
        model.requires_grad_(False)
        if size == "gpu":
            model.bfloat16()
        for parent in [*model.modules()]:
            for name, child in [*parent.named_children()]:
                if name in self.adapted and isinstance(child, nn.Linear):
                    setattr(parent, name, Adapted(child, rank=16))
        return model

    def batch(self, size: str, model: nn.Module) -> Batch:
        """Returns the inputs and labels of one batch."""
        config: Any = model.config
        samples, length = self.shape if size == "gpu" else (8, 56 if self.kind == "images" else 32)
        if self.kind == "images":
            labels = torch.randint(0, config.num_labels, (samples,))
            return {"pixel_values": torch.randn(samples, 3, length, length), "labels": labels}
        words = torch.randint(5, config.vocab_size, (samples, length))
        if self.kind == "pairs":
            return {"input_ids": words, "decoder_input_ids": words, "labels": words}
        return {"input_ids": words, "labels": words}


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the cross entropy of each sample, averaged over its positions."""
    given = {name: t for name, t in batch.items() if name != "labels"}
    logits = model(**given).logits.float()
    if logits.dim() == 2:
        return F.cross_entropy(logits, batch["labels"], reduction="none")
    # On a GPU, the softmax of transposed logits takes longer than the rest of an eager step.
    each = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return each.view(len(logits), -1).mean(1)


_TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
_SMALL_GPT: dict[str, Any] = {
    "vocab_size": 512,
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_IMAGES: dict[str, Any] = {"num_labels": 1000, "image_size": 224}
SUBJECTS: dict[str, Subject] = {
    "llama-1b": Subject(
        "Llama 1B",
        "LlamaForCausalLM",
        {**_TEXT, "num_key_value_heads": 2},
        "causal",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
        (8, 1024),
    ),
    "llama-7b-lora": Subject(
        "Llama 7B, LoRA",
        "LlamaForCausalLM",
        {**_TEXT, "num_key_value_heads": 2},
        "causal",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
        },
        (8, 1024),
        adapted=("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
    "gpt2": Subject("GPT-2", "GPT2LMHeadModel", _SMALL_GPT, "causal"),
    "qwen2-0.5b": Subject(
        "Qwen2 0.5B",
        "Qwen2ForCausalLM",
        {**_TEXT, "num_key_value_heads": 2},
        "causal",
        {
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
        (8, 1024),
    ),
    "bert": Subject("BERT-base", "BertForMaskedLM", _TEXT, "masked", shape=(64, 256)),
    "deberta-v2": Subject(
        "DeBERTa-v2-base",
        "DebertaV2ForMaskedLM",
        {
            **_TEXT,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_buckets": 16,
        },
        "masked",
        {
            "vocab_size": 128100,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_buckets": 256,
            "share_att_key": True,
            "type_vocab_size": 0,
        },
        (32, 256),
    ),
    "convnext-t": Subject(
        "ConvNeXt-T",
        "ConvNextForImageClassification",
        {
            "num_labels": 10,
            "hidden_sizes": [16, 32, 64, 64],
            "depths": [1, 1, 2, 1],
            "image_size": 56,
        },
        "images",
        {**_IMAGES},
        (64, 224),
    ),
    "swin-t": Subject(
        "Swin-T",
        "SwinForImageClassification",
        {
            "num_labels": 10,
            "image_size": 56,
            "embed_dim": 24,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 7,
        },
        "images",
        {**_IMAGES},
        (64, 224),
    ),
    "vit-b": Subject(
        "ViT-B/16",
        "ViTForImageClassification",
        {**_TEXT, "num_labels": 10, "image_size": 56, "patch_size": 8},
        "images",
        {**_IMAGES},
        (64, 224),
    ),
    "t5-base": Subject(
        "T5-base",
        "T5ForConditionalGeneration",
        {
            "vocab_size": 512,
            "d_model": 128,
            "d_kv": 32,
            "d_ff": 256,
            "num_layers": 2,
            "num_heads": 4,
        },
        "pairs",
        {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
        (16, 512),
    ),
    "opt-350m": Subject(
        "OPT-350M",
        "OPTForCausalLM",
        {
            "vocab_size": 512,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 256,
        },
        "causal",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "ffn_dim": 4096,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
        (16, 512),
    ),
    "bart-base": Subject(
        "BART-base",
        "BartForConditionalGeneration",
        {
            "vocab_size": 512,
            "d_model": 128,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 256,
            "decoder_ffn_dim": 256,
        },
        "pairs",
        {
            "d_model": 768,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072,
            "encoder_attention_heads": 12,
            "decoder_attention_heads": 12,
        },
        (16, 512),
    ),
    "resnet-50": Subject(
        "ResNet-50",
        "ResNetForImageClassification",
        {"num_labels": 10, "embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1]},
        "images",
        {"num_labels": 1000},
        (64, 224),
    ),
}
