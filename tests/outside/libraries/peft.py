"""peft: adapters of a tiny Llama, ViT or BERT of transformers; the adapters alone are trained."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.outside.case import Library, Subject, of, words

peft = Library("peft")
transformers = Library("transformers")


def _llama() -> nn.Module:
    config = transformers("LlamaConfig")(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return transformers("LlamaForCausalLM")(config)


def _logits(model: nn.Module, ids: Any) -> Any:
    return model(input_ids=ids).logits


def _adapted(kind: str, batch: int, options: dict[str, Any]) -> Subject:
    config = peft(kind)(task_type="CAUSAL_LM", **options)
    return of(peft("get_peft_model")(_llama(), config), words(batch), call=_logits)


def _add(kind: str, label: str = "", **options: Any) -> None:
    peft.add(label or kind.removesuffix("Config"), lambda batch: _adapted(kind, batch, options))


_TARGETS = {"target_modules": ["q_proj", "v_proj"]}
_ALL = {
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
}
_add("LoraConfig", r=2, **_TARGETS)
_add("LoraConfig", "Lora, all linear layers", r=2, **_ALL)
_add("LoraConfig", "Lora, DoRA", r=2, use_dora=True, **_TARGETS)
_add(
    "LoraConfig", "Lora, rank-stabilised, with biases", r=2, use_rslora=True, bias="all", **_TARGETS
)
_add("LoraConfig", "Lora, of the embedding", r=2, target_modules=["embed_tokens", "q_proj"])
_add("LoraConfig", "Lora, with the head trained", r=2, modules_to_save=["lm_head"], **_TARGETS)
_add("LoraConfig", "Lora, PiSSA", r=2, init_lora_weights="pissa", **_TARGETS)
_add("LoraConfig", "Lora, ranks by pattern", r=2, rank_pattern={"v_proj": 4}, **_TARGETS)
_add("AdaLoraConfig", init_r=4, target_r=2, total_step=10, **_TARGETS)
_add("LoHaConfig", r=2, **_TARGETS)
_add("LoKrConfig", r=2, **_TARGETS)
_add(
    "IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
)
_add("OFTConfig", oft_block_size=4, r=0, **_TARGETS)
_add("BOFTConfig", boft_block_size=4, boft_n_butterfly_factor=1, **_TARGETS)
_add("HRAConfig", r=2, **_TARGETS)
_add("VeraConfig", r=4, **_TARGETS)
_add("FourierFTConfig", n_frequency=8, **_TARGETS)
_add("VBLoRAConfig", r=2, num_vectors=8, vector_length=4, topk=2, **_TARGETS)
_add("LNTuningConfig", target_modules=["input_layernorm", "norm"])
_add("MissConfig", r=2, **_TARGETS)
_add("RandLoraConfig", r=2, **_TARGETS)
_add("C3AConfig", block_size=4, **_TARGETS)
_add("RoadConfig", variant="road_1", group_size=8, **_TARGETS)
_add("ShiraConfig", r=2, **_TARGETS)
_add("WaveFTConfig", n_frequency=8, **_TARGETS)
_add("DeloraConfig", r=2, **_TARGETS)
_add("GraloraConfig", r=4, gralora_k=2, **_TARGETS)
_add("TrainableTokensConfig", token_indices=[1, 2, 3], target_modules=["embed_tokens"])
_add("PromptTuningConfig", num_virtual_tokens=2)
_add("PromptEncoderConfig", num_virtual_tokens=2, encoder_hidden_size=16)
_add("PrefixTuningConfig", num_virtual_tokens=2)
_add(
    "PrefixTuningConfig",
    "PrefixTuning, projected",
    num_virtual_tokens=2,
    prefix_projection=True,
    encoder_hidden_size=16,
)
_add("AdaptionPromptConfig", adapter_len=2, adapter_layers=1)


def _large(batch: int, **options: Any) -> Subject:
    config = transformers("LlamaConfig")(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = transformers("LlamaForCausalLM")(config)
    adapter = peft("LoraConfig")(task_type="CAUSAL_LM", r=8, **_ALL, **options)
    return of(peft("get_peft_model")(model, adapter), words(batch, 64, 512), call=_logits)


peft.add_timed("Lora, 64 tokens", _large)
peft.add_timed("Lora, DoRA, 64 tokens", lambda b: _large(b, use_dora=True))
