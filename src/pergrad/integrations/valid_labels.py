"""Counts each sample's valid labels, and finds what a Trainer divides the sum of their losses by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pergrad.errors import PergradError
from pergrad.integrations.next_tokens import predicts_next_token

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["LossDivisor", "divisor_of_loss", "valid_labels"]

_IGNORED = -100  # the label of a position that has no loss
_ROWS = 4  # samples of the first batch whose losses are compared


class LossDivisor(NamedTuple):
    """Divides the sum of a batch's losses: the labels of the batch, or those of the whole step."""

    of_items: float | None  # the factor on the step's labels; None: the labels of the batch count

    def of(self, counts: Tensor, items: Tensor | int | None) -> Tensor | float:
        if self.of_items is None or items is None:
            return counts.sum()
        return self.of_items * (items.to(counts.device) if isinstance(items, Tensor) else items)


def valid_labels(trainer: Trainer, inputs: Any) -> Tensor:
    """Returns the number of valid labels of each sample, (B,), in float64; 1 where a sample has one loss."""
    if not isinstance(inputs, Mapping):
        raise PergradError(
            f"per-sample gradients need batches that are mappings, got {type(inputs).__name__}"
        )
    labels = [inputs[name] for name in trainer.label_names if name in inputs]
    tensors = [v for v in (*labels, *inputs.values()) if isinstance(v, Tensor) and v.dim()]
    if not tensors:
        raise PergradError(f"the batch has no tensors to count samples in: {sorted(inputs)}")
    first = tensors[0]
    if len(labels) != 1 or not isinstance(labels[0], Tensor) or labels[0].is_floating_point():
        return torch.ones(len(first), dtype=torch.float64, device=first.device)
    valid = first != _IGNORED
    if first.dim() > 1 and predicts_next_token(trainer.accelerator.unwrap_model(trainer.model)):
        valid = valid[..., 1:]
    return valid.reshape(len(valid), -1).sum(1).double()


def divisor_of_loss(
    trainer: Trainer, inputs: Mapping[str, Any], counts: Tensor, items: Tensor | int | None
) -> LossDivisor:
    """Compares the loss of a few samples with the loss of each alone, and tells what divides their sum."""
    size = len(counts)
    rows = [n for n in range(size) if counts[n]][:_ROWS]
    if not rows:
        return LossDivisor(None)  # no sample has a loss
    own = counts[rows]
    told = 2 * own.sum() + 1  # not the number of labels: tells whether the loss divides by it

    def loss_of(some: list[int], number: Tensor | None) -> Tensor:
        batch = {
            key: v[some] if isinstance(v, Tensor) and v.dim() and len(v) == size else v
            for key, v in inputs.items()
        }
        with trainer.compute_loss_context_manager():
            loss: Any = trainer.compute_loss(model, batch, num_items_in_batch=number)
        found: Tensor = loss.detach().double()
        return found

    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=True)
    modes = {module: module.training for module in model.modules()}
    devices = [own.device] if own.device.type == "cuda" else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            model.eval()
            alone = torch.stack([loss_of([n], None) for n in rows])
            together = loss_of(rows, None if items is None else told)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if together.dim():
        raise _untold(f"it has shape {tuple(together.shape)}")
    divisor = float((own * alone).sum() / together)
    dtype = next(model.parameters()).dtype
    is_exact = trainer.args.bf16 is False and trainer.args.fp16 is False
    tolerance = 1e-3 if is_exact and dtype in (torch.float32, torch.float64) else 0.05
    processes = trainer.accelerator.num_processes
    candidates: list[tuple[float, float | None]] = [(float(own.sum()), None)]
    if items is not None:
        candidates += [(float(told) / k, 1 / k) for k in (1, processes)]
    for expected, factor in candidates:
        if abs(divisor - expected) <= tolerance * expected:
            return LossDivisor(factor)
    raise _untold(
        f"over {len(rows)} samples with {own.long().tolist()} valid labels and losses "
        f"{[round(x, 4) for x in alone.tolist()]} it is {float(together):.4f}"
    )


def _untold(reason: str) -> PergradError:
    return PergradError(
        "the loss of the Trainer is not the mean of the losses of all valid labels, so no sample has a loss "
        f"of its own: {reason}. Losses that compare samples, and those of experts' routers, are of this kind"
    )
