"""Clips and measures the gradient of each sample in a loop that uses Hugging Face Accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from torch import nn

from pergrad.errors import PergradError
from pergrad.integrations.stepping import SampleStep, missing

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as error:
    raise missing("accelerate", error) from error

__all__ = ["PerSample"]

_SUPPORTED = {"NO", "MULTI_GPU", "MULTI_CPU", "FSDP"}


class PerSample(SampleStep):
    """Records the forward and backward pass of each batch of an `Accelerator`'s loop: `with per_sample:`.

    With `max_norm`, the optimizer steps on the mean of the clipped gradients of all samples since its last
    step: over the batches of `accelerator.accumulate` and over all processes. Without it, `.grad` is that of
    plain training. The factors of `accelerator.backward`, 1 / gradient_accumulation_steps and the gradient
    scaler's, are undone before samples are clipped.

    Args:
        accelerator: the `Accelerator` of the loop.
        model: the model that `accelerator.prepare` returned.
        max_norm: the bound on the norm of each sample's gradient, or bounds by patterns of names; None clips
            nothing.
        noise_scale: measure the gradient noise scale, too.
        options: further options of `pergrad.record`, such as `loss_reduction`.

    `.metrics` has the mean and the largest norm of the last step, for `accelerator.log`; `.norms` has the
    norm of each of its samples.

    >>> import torch
    >>> from accelerate import Accelerator
    >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    >>> per_sample = PerSample(accelerator, model, max_norm=1.0)
    >>> for x in torch.tensor([[[3.0, 4.0]], [[0.5, 0.0]]]):
    ...     with accelerator.accumulate(model):
    ...         with per_sample:
    ...             accelerator.backward(model(x).mean())
    ...         optimizer.step()
    >>> per_sample.norms, model.weight.grad
    (tensor([5.0000, 0.5000]), tensor([[0.5500, 0.4000]]))
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        max_norm: float | Mapping[str, float] | None = None,
        *,
        noise_scale: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(max_norm, noise_scale=noise_scale)
        kind = DistributedType(accelerator.distributed_type).name
        if kind not in _SUPPORTED:
            raise PergradError(
                f"an Accelerator of type {kind} runs the backward pass by itself: per-sample gradients need "
                f"one of {', '.join(sorted(_SUPPORTED))}"
            )
        self._accelerator = accelerator
        self._model = model
        self._options = options

    def __enter__(self) -> PerSample:
        self.open(self._model, **self._options)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abandon()
            return
        self.close()
        if self._accelerator.sync_gradients:
            self.finish()
