"""An architecture of the zoo: a model class of transformers, tiny and random, and what it takes."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is ever downloaded

import torch
import transformers
from torch import nn

from tests.zoo.batches import Inputs

__all__ = ["Architecture"]


@dataclass(frozen=True)
class Architecture:
    """A model class, a tiny configuration of it, its inputs, and the outputs that a loss is taken of."""

    model: str
    config: dict[str, Any]
    inputs: Callable[[int], Inputs]
    outputs: Sequence[str] = ()  # by default the first
    is_maskable: bool = False
    takes_labels: bool = True  # if its forward does, and has logits
    options: dict[str, Any] = field(default_factory=dict)  # what is passed beside the inputs
    overflows_in_float32: bool = False  # to which it casts the least float64, its mask
    refusal: str = ""  # what pergrad says, where it cannot
    reentrant: Literal["right", "refused", "endless"] = "right"  # what becomes of such checkpoints

    @property
    def model_class(self) -> Any:
        return getattr(transformers, self.model)

    def attention(self) -> tuple[str, ...]:
        """The implementations of attention that the library offers for it on any device."""
        return ("eager", "sdpa") if self.model_class._supports_sdpa else ("eager",)

    def experts(self) -> tuple[str, ...]:
        """Those of its experts."""
        can_choose = self.model_class._can_set_experts_implementation()
        return ("eager", "batched_mm", "grouped_mm") if can_choose else ("eager",)

    def build(self, attention: str, experts: str, dtype: torch.dtype) -> nn.Module:
        """The model in eval mode, each parameter moved off its initial value: none stays zero or one."""
        config = self.model_class.config_class(**copy.deepcopy(self.config))
        if attention != "sdpa":  # the library's own choice, but for parts that do not have it
            config._attn_implementation = attention
        config._experts_implementation = experts
        torch.manual_seed(0)
        model: nn.Module = self.model_class(config).to(dtype).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.1)
        return model
