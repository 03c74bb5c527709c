"""Trains with differential privacy in the `Trainer` of Hugging Face transformers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pergrad.errors import PrivacyError
from pergrad.integrations.next_tokens import predicts_next_token
from pergrad.integrations.stepping import missing
from pergrad.private import Plan, PlanLoader, Released, Step
from pergrad.private.stepping.saving import read, write

try:
    import transformers
    from accelerate.utils import DistributedType
except ImportError as error:
    raise missing("transformers", error) from error

__all__ = ["PrivateTrainer", "losses_of"]

_STATE = "private.pt"  # in a checkpoint's folder
_SUPPORTED = {"NO", "MULTI_GPU", "MULTI_CPU"}
_TRIED = 2  # samples of the first batch whose losses are compared with the model's own
_IGNORED = -100  # the label of a position that has no loss


class PrivateTrainer(transformers.Trainer):
    """transformers' `Trainer`, whose steps are those of a private `Plan`.

    The plan draws the batches, so `per_device_train_batch_size` and the number of epochs do not count: the
    run has the plan's steps, or `max_steps` of them. Checkpoints hold the state of the private run, and
    `train(resume_from_checkpoint=...)` goes on bit for bit; they are as secret as the data. The training loss
    is not private and is not logged; `epsilon` is logged in its place, and `trainer.step.last` has the rest.

    Args:
        args: as for `transformers.Trainer`, by position or by name.
        plan: the plan of the run.
        loss_fn: called as loss_fn(model, inputs), returns the (n,) losses of the samples; by default
            `losses_of`, which is compared with the model's own loss at the first batch.
        ledger: as for `pergrad.private.Step`; by default `ledger.jsonl` in the output folder.
        options: further options of `Step`, such as piece_size, generator and cryptographic.
        kwargs: as for `transformers.Trainer`.
    """

    def __init__(
        self,
        *args: Any,
        plan: Plan,
        loss_fn: Callable[..., Tensor] | None = None,
        ledger: str | os.PathLike[str] | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.plan, self._losses, self._options = plan, loss_fn, dict(options or {})
        self._ledger = (
            Path(self.args.output_dir or ".") / "ledger.jsonl" if ledger is None else ledger
        )
        self.step: Step | None = None  # of the run
        self.released: Released | None = None
        self._is_compared = loss_fn is not None  # whether `losses_of` was compared with the model
        self._refuse()
        if self.args.max_steps <= 0:
            self.args.max_steps = plan.steps
        self.args.ignore_data_skip = True  # the plan's loader goes on by itself
        self.args.max_grad_norm = 0.0  # samples are clipped, their noisy sum is not

    def _refuse(self) -> None:
        args = self.args
        kind = DistributedType(self.accelerator.distributed_type).name
        wrong = {
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: the plan's batch is the "
            "whole one; set it to 1, and options={'piece_size': ...} for memory": (
                args.gradient_accumulation_steps != 1
            ),
            f"max_steps={args.max_steps}: the plan has {self.plan.steps} steps": (
                args.max_steps > self.plan.steps
            ),
            "auto_find_batch_size: a choice by the data is not private": args.auto_find_batch_size,
            "fp16: its scaler skips steps by the data; use bf16": args.fp16,
            "include_num_input_tokens_seen: the number of tokens tells how large the batches were": (
                getattr(args, "include_num_input_tokens_seen", "no") not in (False, None, "no")
            ),
            "label_smoothing_factor: pass loss_fn, with smoothing in it": (
                args.label_smoothing_factor != 0 and self._losses is None
            ),
            f"processes of type {kind}: use one of {', '.join(sorted(_SUPPORTED))}": (
                kind not in _SUPPORTED
            ),
        }
        for what, is_wrong in wrong.items():
            if is_wrong:
                raise PrivacyError(f"a PrivateTrainer cannot train with {what}")

    # -- what the Trainer calls

    def get_train_dataloader(self) -> Any:
        if self.train_dataset is None:
            raise PrivacyError("a PrivateTrainer needs a train_dataset")
        self.step = None  # a new run
        return PlanLoader(
            self.plan.sampler(
                self.train_dataset,
                self._options.get("generator"),
                cryptographic=self._options.get("cryptographic", False),
            ),
            self.train_dataset,
            {
                "collate_fn": self._get_collator_with_removed_columns(
                    self.data_collator, description="training"
                ),
                "num_workers": self.args.dataloader_num_workers,
                "pin_memory": self.args.dataloader_pin_memory and torch.cuda.is_available(),
            },
        )

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        if self.step is None:
            self.step = self._new_step()
        bare = self.accelerator.unwrap_model(self.model)
        with self.compute_loss_context_manager(), _plain_forward(bare), self.accelerator.autocast():
            if not self._is_compared and len(inputs.get("labels", ())):
                self._is_compared = True
                _compare(bare, inputs)
            self.released = self.step(inputs)
        # Not the loss, which is not private. `Step` has called the optimizer, and has left no gradients.
        return torch.zeros((), device=self.args.device)

    def _new_step(self) -> Step:
        model = self.accelerator.unwrap_model(self.model)
        optimizer: Any = getattr(
            self.optimizer, "optimizer", self.optimizer
        )  # not Accelerate's wrapper
        losses = self._losses or losses_of
        return Step(model, optimizer, losses, self.plan, ledger=self._ledger, **self._options)

    def floating_point_ops(self, inputs: Any) -> int:
        """Returns 0: `total_flos`, which is logged, would tell how large the batches were."""
        return 0

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        logs = {k: v for k, v in logs.items() if k not in ("loss", "train_loss", "grad_norm")}
        if self.released is not None and self.plan.delta is not None:
            logs["epsilon"] = self.released.epsilon
        super().log(logs, *args, **kwargs)

    # -- checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.step is not None and self.args.should_save:
            name = f"{transformers.trainer_utils.PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            folder = Path(self._get_output_dir(trial=trial)) / name
            folder.mkdir(parents=True, exist_ok=True)
            write(folder / _STATE, {"step": self.step.state_dict()})
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = Path(checkpoint) / _STATE
        if not path.exists():
            raise PrivacyError(
                f"{checkpoint} has no {_STATE}, which holds the private run: resume from a checkpoint of a "
                "PrivateTrainer"
            )
        self.step = self._new_step()
        self.step.load_state_dict(read(path, {"step"}, self.args.device)["step"])


@contextmanager
def _plain_forward(model: nn.Module) -> Iterator[None]:
    """Takes Accelerate's autocast out of the forward: a proof in float32 must be able to switch it off."""
    original: Any = vars(model).get("_original_forward")
    if original is None:
        yield
        return
    wrapped, model.forward = model.forward, original
    try:
        yield
    finally:
        model.forward = wrapped


@torch.no_grad()
def _compare(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Refuses a model whose loss of one sample is not what `losses_of` computes."""
    modes = {module: module.training for module in model.modules()}
    size = len(inputs["labels"])
    model.eval()
    try:
        for n in range(min(size, _TRIED)):
            one = {
                k: v[n : n + 1] if isinstance(v, Tensor) and v.dim() and len(v) == size else v
                for k, v in inputs.items()
            }
            mine, theirs = losses_of(model, one)[0], model(**one).loss
            has_none = bool(theirs.isnan())  # a mean over no labels
            if not has_none and not torch.allclose(
                mine.double(), theirs.double(), rtol=0.02, atol=1e-4
            ):
                raise PrivacyError(
                    f"the loss of {type(model).__name__} for one sample is {float(theirs):.6g}, not "
                    f"{float(mine):.6g} as losses_of computes it: pass loss_fn=, which returns the losses of "
                    "the samples, (n,)"
                )
    finally:
        for module, mode in modes.items():
            module.training = mode


def losses_of(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Returns the (n,) losses of a Hugging Face model with `labels`: each sample's mean over its labels."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor):
        raise PrivacyError("the batch has no labels: pass loss_fn=, which returns the losses, (n,)")
    base: Any = model
    if hasattr(base, "get_base_model"):  # PEFT
        base = base.get_base_model()
    config = base.config
    given = dict(inputs)
    if not config.is_encoder_decoder:  # else the decoder's inputs are made from them
        del given["labels"]
    logits: Tensor = model(**given).logits
    if labels.is_floating_point():
        if logits.shape != labels.shape:
            logits = logits.reshape(labels.shape)
        is_regression = config.problem_type == "regression" or logits[0].numel() == 1
        each = (
            (logits - labels).square()
            if is_regression
            else F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        )
        return each.reshape(len(each), -1).mean(1)
    if labels.dim() == 1:
        return F.cross_entropy(logits, labels, reduction="none")
    if predicts_next_token(base):
        logits, labels = logits[:, :-1], labels[:, 1:]
    # The tokens stay in rows of their samples: (n, t, v) to (n, v, t).
    wide = logits if logits.dtype == torch.float64 else logits.float()
    each = F.cross_entropy(wide.transpose(1, 2), labels, reduction="none", ignore_index=_IGNORED)
    return each.sum(1) / (labels != _IGNORED).sum(1).clamp(min=1)
