"""Tells whether a Hugging Face model predicts the next token of its labels."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

__all__ = ["predicts_next_token"]

# Language models that compare each label with the output of its own position.
_OWN_POSITION = {"XLMWithLMHeadModel", "XLNetLMHeadModel"}


def predicts_next_token(model: nn.Module) -> bool:
    """Whether the loss of a position is of the label behind it: the first label of a sample has no loss."""
    base: Any = model
    if hasattr(base, "get_base_model"):  # PEFT
        base = base.get_base_model()
    kind = getattr(base, "loss_type", None)
    if kind is None:
        # A name that tells no loss, such as GPT2LMHeadModel: transformers takes that of ForCausalLM.
        auto = importlib.import_module("transformers.models.auto.modeling_auto")
        causal = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()} - _OWN_POSITION
        return any(cls.__name__ in causal for cls in type(base).__mro__)
    if kind == "ForConditionalGeneration":  # pictures and text; encoders and decoders do not shift
        return not getattr(base.config, "is_encoder_decoder", False)
    return bool(kind == "ForCausalLM")
