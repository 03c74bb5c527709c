"""Encoder-decoders."""

from __future__ import annotations

from dataclasses import replace

from tests.zoo.architecture import Architecture
from tests.zoo.batches import HEADS, HIDDEN, VOCABULARY, pairs
from tests.zoo.tiny import TEXT, pair, relative_pair, unlabelled

__all__ = ["PAIRS"]

PAIRS: dict[str, Architecture] = {
    "T5": relative_pair("T5ForConditionalGeneration"),
    "T5 v1.1": relative_pair(
        "T5ForConditionalGeneration",
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    ),
    "mT5": relative_pair("MT5ForConditionalGeneration"),
    "UMT5": relative_pair("UMT5ForConditionalGeneration"),
    "LongT5": relative_pair("LongT5ForConditionalGeneration", local_radius=2, global_block_size=2),
    "LongT5, global": relative_pair(
        "LongT5ForConditionalGeneration",
        local_radius=2,
        global_block_size=2,
        encoder_attention_type="transient-global",
    ),
    "Switch": relative_pair("SwitchTransformersForConditionalGeneration", num_experts=4),
    "BART": pair("BartForConditionalGeneration"),
    "mBART": pair("MBartForConditionalGeneration"),
    "MVP": pair("MvpForConditionalGeneration", use_prompt=True, prompt_length=3, prompt_mid_dim=8),
    "PLBart": pair("PLBartForConditionalGeneration"),
    "Pegasus": pair("PegasusForConditionalGeneration"),
    "Pegasus-X": pair("PegasusXForConditionalGeneration", block_size=4, num_global_tokens=2),
    "Marian": pair("MarianMTModel"),
    "M2M-100": pair("M2M100ForConditionalGeneration"),
    "NLLB-MoE": pair("NllbMoeForConditionalGeneration", num_experts=4, expert_capacity=64),
    "Blenderbot": pair("BlenderbotForConditionalGeneration"),
    "Blenderbot small": pair("BlenderbotSmallForConditionalGeneration"),
    "BigBird-Pegasus": pair("BigBirdPegasusForConditionalGeneration"),
    "LED": replace(
        pair(
            "LEDForConditionalGeneration",
            attention_window=4,
            max_encoder_position_embeddings=64,
            max_decoder_position_embeddings=64,
        ),
        overflows_in_float32=True,
    ),
    "FSMT": unlabelled(
        pair(
            "FSMTForConditionalGeneration",
            src_vocab_size=VOCABULARY,
            tgt_vocab_size=VOCABULARY,
            langs=["en", "de"],
        )
    ),
    "ProphetNet": Architecture(
        "ProphetNetForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": HEADS,
            "num_decoder_attention_heads": HEADS,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "max_position_embeddings": 64,
            "num_buckets": 4,
            "relative_max_distance": 6,
            "pad_token_id": 0,
        },
        pairs,
        is_maskable=True,
    ),
    "BERT to BERT": Architecture(
        "EncoderDecoderModel",
        {
            "encoder": {**TEXT, "model_type": "bert"},
            "decoder": {
                **TEXT,
                "model_type": "bert",
                "is_decoder": True,
                "add_cross_attention": True,
            },
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
        },
        pairs,
        is_maskable=True,
    ),
    "T5Gemma": Architecture(
        "T5GemmaForConditionalGeneration",
        {
            "encoder": {
                **TEXT,
                "num_key_value_heads": 2,
                "head_dim": 4,
                "query_pre_attn_scalar": 4,
            },
            "decoder": {
                **TEXT,
                "num_key_value_heads": 2,
                "head_dim": 4,
                "query_pre_attn_scalar": 4,
                "cross_attention_hidden_size": HIDDEN,
            },
            "vocab_size": VOCABULARY,
        },
        pairs,
        is_maskable=True,
    ),
    "Seamless text": pair(
        "SeamlessM4TForTextToText",
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        intermediate_size=32,
        speech_encoder_layers=1,
        speech_encoder_attention_heads=2,
        speech_encoder_intermediate_size=8,
        t2u_vocab_size=8,
    ),
}
