"""Recognises gradient scalers and trainers that multiply a loss on its way to the backward pass."""

from __future__ import annotations

import sys
from typing import Literal, TypeAlias

__all__ = ["scaling_trainer"]

Trainer: TypeAlias = Literal["scaler", "trainer"]

# Functions that multiply a whole loss, by module and name: a scaler, whose own step divides by it again, and
# trainers, which divide by the steps of accumulation.
_KNOWN: dict[tuple[str, str], Trainer] = {
    ("torch.amp.grad_scaler", "scale"): "scaler",
    ("torch.amp.grad_scaler", "apply_scale"): "scaler",
    ("accelerate.accelerator", "backward"): "trainer",
    ("transformers.trainer", "training_step"): "trainer",
    ("lightning.pytorch.loops.optimization.automatic", "from_training_step_output"): "trainer",
    ("pytorch_lightning.loops.optimization.automatic", "from_training_step_output"): "trainer",
}
_BETWEEN = (
    "pergrad.",
    "torch._tensor",
    "torch.overrides",
)  # modules between a product and its writer


def scaling_trainer() -> Trainer | None:
    """Returns what multiplies a loss just now, if the function that wrote the product is a known one."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = str(frame.f_globals.get("__name__"))
        if not module.startswith(_BETWEEN):
            return _KNOWN.get((module, frame.f_code.co_name))
        frame = frame.f_back
    return None
