"""Tiny default configurations, one function per kind of model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tests.zoo.architecture import Architecture
from tests.zoo.batches import (
    HEADS,
    HIDDEN,
    VOCABULARY,
    boxes,
    captioned,
    images,
    pairs,
    tokens,
    videos,
    waves,
)

__all__ = [
    "LATENT",
    "MAMBA",
    "PAIR",
    "TEXT",
    "VISION",
    "decoder",
    "experts",
    "image",
    "page",
    "pair",
    "pyramid",
    "relative_pair",
    "text",
    "towers",
    "unlabelled",
    "video",
    "wave",
]

_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LAYERS = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 32,
}
TEXT = {**_LAYERS, **_SPECIAL, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
_DECODER = {**TEXT, "num_key_value_heads": 2, "head_dim": 4}
_EXPERTS = {
    **_DECODER,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {  # multi-head latent attention, as DeepSeek has it
    "num_key_value_heads": HEADS,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "qk_head_dim": 8,
    "v_head_dim": 4,
    "first_k_dense_replace": 1,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 4,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}
PAIR = {
    **_SPECIAL,
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}
_RELATIVE_PAIR = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "d_kv": 4,
    "d_ff": 32,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": HEADS,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
_LABELS = {"num_labels": 3, "num_channels": 3}
VISION = {**_LAYERS, **_LABELS, "image_size": 8, "patch_size": 4}
_AUDIO = {
    **TEXT,
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "num_labels": 3,
}


def text(model: str, **config: Any) -> Architecture:
    return Architecture(model, {**TEXT, **config}, tokens, is_maskable=True)


def decoder(model: str, **config: Any) -> Architecture:
    """With fewer keys than queries."""
    return Architecture(model, {**_DECODER, **config}, tokens, is_maskable=True)


def experts(model: str, **config: Any) -> Architecture:
    return Architecture(model, {**_EXPERTS, **config}, tokens, is_maskable=True)


def page(model: str, **config: Any) -> Architecture:
    config = {**TEXT, "max_2d_position_embeddings": 16, **config}
    return Architecture(model, config, boxes, is_maskable=True)


def pair(model: str, **config: Any) -> Architecture:
    return Architecture(model, {**PAIR, **config}, pairs, is_maskable=True)


def relative_pair(model: str, **config: Any) -> Architecture:
    """The first layer gives its relative positions, a weight, to all others."""
    config = {**_RELATIVE_PAIR, **config}
    return Architecture(model, config, pairs, is_maskable=True, reentrant="refused")


def image(model: str, **config: Any) -> Architecture:
    return Architecture(model, {**VISION, **config}, images)


def pyramid(model: str, side: int = 32, **config: Any) -> Architecture:
    """Stages of shrinking images, each of its own width."""
    config = {**_LABELS, "image_size": side, **config}
    return Architecture(model, config, partial(images, side=side))


def unlabelled(architecture: Architecture) -> Architecture:
    """Whose labels are no class for each logit."""
    return replace(architecture, takes_labels=False)


def video(model: str, **config: Any) -> Architecture:
    return Architecture(model, {**VISION, "num_frames": 4, **config}, videos)


def towers(model: str, **config: Any) -> Architecture:
    """One tower for text and one for images; the logits compare all samples, the embeddings do not."""
    parts = {
        "text_config": {**TEXT, "max_position_embeddings": 16, "projection_dim": 8},
        "vision_config": {**VISION, "projection_dim": 8},
        "projection_dim": 8,
    }
    return Architecture(
        model, {**parts, **config}, captioned, ("text_embeds", "image_embeds"), is_maskable=True
    )


def wave(model: str, **config: Any) -> Architecture:
    return Architecture(model, {**_AUDIO, **config}, waves, takes_labels=False)
