"""Mixtures of experts."""

from __future__ import annotations

from tests.zoo.architecture import Architecture
from tests.zoo.batches import HEADS, HIDDEN, VOCABULARY, tokens
from tests.zoo.tiny import LATENT, MAMBA, experts

__all__ = ["EXPERTS"]

EXPERTS: dict[str, Architecture] = {
    "Mixtral": experts("MixtralForCausalLM"),
    "Qwen2-MoE": experts("Qwen2MoeForCausalLM"),
    "Qwen3-MoE": experts("Qwen3MoeForCausalLM"),
    "Qwen3-Next": experts(
        "Qwen3NextForCausalLM",
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
        layer_types=["linear_attention", "full_attention"],
    ),
    "DeepSeek-V2": experts("DeepseekV2ForCausalLM", **LATENT),
    "DeepSeek-V3": experts("DeepseekV3ForCausalLM", **LATENT),
    "Dots1": experts("Dots1ForCausalLM", n_shared_experts=1, first_k_dense_replace=1),
    "OLMoE": experts("OlmoeForCausalLM"),
    "FlexOLMo": experts("FlexOlmoForCausalLM"),
    "GraniteMoE": experts("GraniteMoeForCausalLM"),
    "GraniteMoE, shared": experts("GraniteMoeSharedForCausalLM", shared_intermediate_size=8),
    "GraniteMoE, hybrid": experts(
        "GraniteMoeHybridForCausalLM",
        layer_types=["mamba", "attention"],
        shared_intermediate_size=8,
        **MAMBA,
    ),
    "PhiMoE": experts("PhimoeForCausalLM"),
    "JetMoE": experts("JetMoeForCausalLM", kv_channels=4),
    "Jamba": experts("JambaForCausalLM", attn_layer_period=2, attn_layer_offset=1),
    "GPT-OSS": experts("GptOssForCausalLM"),
    "GLM4-MoE": experts("Glm4MoeForCausalLM", first_k_dense_replace=1),
    "Ernie 4.5 MoE": experts("Ernie4_5_MoeForCausalLM", moe_num_experts=4, moe_k=2),
    "HunYuan MoE": experts("HunYuanMoEV1ForCausalLM", moe_topk=2),
    "LFM2-MoE": experts(
        "Lfm2MoeForCausalLM", layer_types=["conv", "full_attention"], num_dense_layers=1
    ),
    "Llama4": experts("Llama4ForCausalLM", intermediate_size_mlp=32),
    "MiniMax": experts(
        "MiniMaxForCausalLM", layer_types=["linear_attention", "full_attention"], block_size=4
    ),
    "MiniMax-M2": experts("MiniMaxM2ForCausalLM"),
    "Cohere2-MoE": experts("Cohere2MoeForCausalLM"),
    "Aria": experts("AriaTextForCausalLM", moe_num_experts=4, moe_topk=2),
    "AFMoE": experts("AfmoeForCausalLM", num_dense_layers=1),
    "DBRX": Architecture(
        "DbrxForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "d_model": HIDDEN,
            "n_layers": 2,
            "n_heads": HEADS,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {
                "ffn_hidden_size": 16,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "hidden_size": 16,
            },
        },
        tokens,
        is_maskable=True,
    ),
    "DeepSeek-V3.2": experts(
        "DeepseekV32ForCausalLM", index_n_heads=2, index_head_dim=4, index_topk=3, **LATENT
    ),
    "GLM4-MoE lite": experts("Glm4MoeLiteForCausalLM", **LATENT),
    "EXAONE-MoE": experts("ExaoneMoeForCausalLM", first_k_dense_replace=1),
    "SolarOpen": experts("SolarOpenForCausalLM"),
    "Qwen3.5-MoE": experts(
        "Qwen3_5MoeForCausalLM",
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
        layer_types=["linear_attention", "full_attention"],
    ),
    "Nemotron-H": experts(
        "NemotronHForCausalLM",
        layers_block_type=["mamba", "attention", "moe"],
        num_hidden_layers=3,
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=4,
        n_groups=1,
        chunk_size=4,
        moe_shared_expert_intermediate_size=8,
    ),
    "Laguna": experts("LagunaForCausalLM"),
    "MiMo-V2": experts("MiMoV2FlashForCausalLM"),
    "LongCat": experts(
        "LongcatFlashForCausalLM",
        num_layers=1,
        ffn_hidden_size=32,
        expert_ffn_hidden_size=8,
        moe_topk=2,
        zero_expert_num=1,
        **LATENT,
    ),
}
