"""Clips and measures the gradient of each sample in the `Trainer` of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pergrad.errors import PergradError
from pergrad.integrations.stepping import SampleStep, missing
from pergrad.integrations.valid_labels import LossDivisor, divisor_of_loss, valid_labels

try:
    import transformers
    from transformers import TrainerCallback, TrainingArguments
except ImportError as error:
    raise missing("transformers", error) from error

__all__ = ["Callback", "Trainer", "TrainerMixin"]


class Callback(TrainerCallback):
    """Tells `pergrad.integrations.hf.Trainer` what to do with the gradient of each sample.

    The loss of a sample is what the model returns for it alone: the mean over its own valid labels, however
    many those are. With `max_norm`, the optimizer steps on the mean of the clipped gradients of all samples
    since its last step: over the micro-batches of `gradient_accumulation_steps` and over all processes. The
    Trainer's own `max_grad_norm` applies to that mean, whose norm is at most `max_norm`. Without `max_norm`,
    training is as it is without the callback, to the bit.

    The mean and the largest norm of a sample, the fraction of the samples that were clipped and the noise
    scale are logged beside the loss.

    Args:
        max_norm: the bound on the norm of each sample's gradient, or bounds by patterns of names, as for
            `pergrad.ClippedSum`. None: nothing is clipped.
        noise_scale: measure the gradient noise scale, too.

    >>> Callback(max_norm=1.0)
    <Callback(max_norm=1.0)>
    """

    def __init__(
        self,
        max_norm: float | Mapping[str, float] | None = None,
        *,
        noise_scale: bool = False,
    ) -> None:
        self.step = SampleStep(max_norm, noise_scale=noise_scale)
        self.has_trainer = False  # whether a Trainer with the mixin uses it
        self.divisor: LossDivisor | None = None  # found at the first step

    def __repr__(self) -> str:
        return repr(self.step).replace(type(self.step).__name__, type(self).__name__)

    @property
    def norms(self) -> Tensor | None:
        """The norm of the gradient of each sample of the last step of the optimizer."""
        return self.step.norms

    @property
    def metrics(self) -> dict[str, float]:
        """What is logged, for the last step of the optimizer."""
        return self.step.metrics

    def on_train_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """Refuses a Trainer that would not record anything."""
        if not self.has_trainer:
            raise PergradError(
                "pergrad's Callback was given to a Trainer that does not record per-sample gradients: use "
                "pergrad.integrations.hf.Trainer, or put TrainerMixin in front of your own class"
            )
        self.step.abandon()
        self.divisor = None


if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class TrainerMixin(_Base):
    """Lets a `Trainer` record each training step for a `Callback`: class MyTrainer(TrainerMixin, Trainer)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tell_callbacks()

    def add_callback(self, callback: Any) -> None:
        super().add_callback(callback)
        self._tell_callbacks()

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        callback = self._sample_callback()
        if callback is None:
            return super().training_step(model, inputs, num_items_in_batch)
        inputs = self._prepare_inputs(inputs)
        counts = valid_labels(self, inputs)  # (B,)
        if callback.divisor is None:
            callback.divisor = divisor_of_loss(self, inputs, counts, num_items_in_batch)
        weights = callback.divisor.of(counts, num_items_in_batch) / counts.clamp(min=1)
        # The loss is Σ_n Σ_t ℓ_nt / divisor: a sum over the samples, of which the weights make own means.
        with callback.step.recording(
            model, batch_size=len(counts), loss_reduction="sum", sample_weights=weights
        ):
            loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            callback.step.finish()
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        callback = self._sample_callback()
        if callback is not None and "loss" in logs:
            logs = {**logs, **callback.metrics}
        super().log(logs, *args, **kwargs)

    def _sample_callback(self) -> Callback | None:
        found = [c for c in self.callback_handler.callbacks if isinstance(c, Callback)]
        if len(found) > 1:
            raise PergradError(f"a Trainer takes one Callback of pergrad, got {len(found)}")
        return found[0] if found else None

    def _tell_callbacks(self) -> None:
        callback = self._sample_callback()
        if callback is not None:
            callback.has_trainer = True


class Trainer(TrainerMixin, transformers.Trainer):
    """transformers' `Trainer`, which can clip and measure the gradient of each sample.

    Pass a `Callback` among its `callbacks`. Everything else is as in transformers.
    """
