"""Images and text together."""

from __future__ import annotations

from tests.zoo.architecture import Architecture
from tests.zoo.batches import HIDDEN, captioned, described, illustrated, images, queried, tokens
from tests.zoo.tiny import TEXT, VISION, image, text, towers

__all__ = ["MULTIMODAL"]

MULTIMODAL: dict[str, Architecture] = {
    "CLIP": towers("CLIPModel"),
    "Chinese-CLIP": towers("ChineseCLIPModel"),
    "AltCLIP": towers("AltCLIPModel"),
    "SigLIP": towers("SiglipModel"),
    "BLIP": towers("BlipModel"),
    "CLIPSeg": towers("CLIPSegModel"),
    "ViLT": Architecture(
        "ViltModel",
        {**VISION, **TEXT, "max_position_embeddings": 16},
        captioned,
        ("pooler_output",),
    ),
    "FLAVA text": text("FlavaTextModel"),
    "GIT": Architecture(
        "GitForCausalLM",
        {**TEXT, "vision_config": VISION},
        captioned,
        takes_labels=False,  # the logits are also those of the image
    ),
    "VisualBERT": text("VisualBertModel", visual_embedding_dim=8),
    "CLIP text": Architecture(
        "CLIPTextModelWithProjection", {**TEXT, "projection_dim": 8}, tokens, is_maskable=True
    ),
    "CLIP vision": Architecture(
        "CLIPVisionModelWithProjection", {**VISION, "projection_dim": 8}, images
    ),
    "SigLIP text": text("SiglipTextModel", projection_size=8),
    "SigLIP vision": image("SiglipVisionModel"),
    "LLaVA": Architecture(
        "LlavaForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "clip_vision_model"},
            "image_token_index": 39,
            "image_token_id": 39,
            "vision_feature_layer": -1,
        },
        illustrated,
        is_maskable=True,
    ),
    "PaliGemma": Architecture(
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "gemma", "num_key_value_heads": 2, "head_dim": 4},
            "vision_config": {
                **VISION,
                "model_type": "siglip_vision_model",
                "vision_use_head": False,
            },
            "image_token_index": 39,
            "image_token_id": 39,
            "projection_dim": HIDDEN,
        },
        illustrated,
        is_maskable=True,
    ),
    "BLIP captions": Architecture(
        "BlipForConditionalGeneration",
        {"text_config": {**TEXT, "encoder_hidden_size": HIDDEN}, "vision_config": VISION},
        captioned,
    ),
    "BLIP-2": Architecture(
        "Blip2ForConditionalGeneration",
        {
            "vision_config": VISION,
            "qformer_config": {**TEXT, "encoder_hidden_size": HIDDEN},
            "text_config": {
                **TEXT,
                "model_type": "opt",
                "ffn_dim": 32,
                "word_embed_proj_dim": HIDDEN,
            },
            "num_query_tokens": 3,
            "image_token_index": 39,
        },
        queried,
        is_maskable=True,
    ),
    "Vision encoder-decoder": Architecture(
        "VisionEncoderDecoderModel",
        {
            "encoder": {**VISION, "model_type": "vit"},
            "decoder": {
                **TEXT,
                "model_type": "gpt2",
                "is_decoder": True,
                "add_cross_attention": True,
            },
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
        },
        described,
    ),
}
