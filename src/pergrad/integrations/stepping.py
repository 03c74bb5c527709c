"""Defines `SampleStep`: the per-sample gradients of one step of an optimizer, over its micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from pergrad.engine.entry import record
from pergrad.errors import PergradError
from pergrad.quantities import Batch, ClippedSum, NoiseScale, Norms, Quantity
from pergrad.reductions import SampleGradients

__all__ = ["SampleStep", "missing"]

_DECAY = 0.95  # of the averages behind the noise scale


class SampleStep:
    """Records the backward passes before a step of an optimizer, and writes the gradient to step on.

    With `max_norm`, `.grad` becomes the mean of the clipped gradients, Σ_n min(1, max_norm / |g_n|) g_n / N,
    over the N samples of all micro-batches and ranks. Without it, `.grad` is that of plain training.

    Args:
        max_norm: the bound on the norm of each sample's gradient, or bounds by patterns of names, as for
            `pergrad.ClippedSum`. None: nothing is clipped.
        noise_scale: measure the gradient noise scale, too.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> step = SampleStep(max_norm=1.0)
    >>> for x in torch.tensor([[[3.0, 4.0]], [[0.5, 0.0]]]):
    ...     with step.recording(model):
    ...         model(x).sum().backward()
    >>> step.finish()
    >>> model.weight.grad, step.metrics["clipped_fraction"]
    (tensor([[0.5500, 0.4000]]), 0.5)
    """

    def __init__(
        self,
        max_norm: float | Mapping[str, float] | None = None,
        *,
        noise_scale: bool = False,
    ) -> None:
        self.max_norm = max_norm
        self.norms: Tensor | None = None  # of the samples of the last finished step
        self._metrics: dict[str, float] | None = None
        self._norms = Norms(accumulate=True)
        self._clipped = None if max_norm is None else ClippedSum(max_norm, accumulate=True)
        self._noise = NoiseScale(accumulate=True) if noise_scale else None
        self._moments: tuple[float, float] | None = None  # averages of trace and squared mean
        self._open: AbstractContextManager[Any] | None = None
        self._seen = _Seen()
        self._module: nn.Module | None = None

    def __repr__(self) -> str:
        noise = "" if self._noise is None else ", noise_scale=True"
        return f"<{type(self).__name__}(max_norm={self.max_norm}{noise})>"

    @property
    def is_pending(self) -> bool:
        """Whether micro-batches have been recorded since the last `finish`."""
        return self._norms.has_ended

    @property
    def metrics(self) -> dict[str, float]:
        """Returns the mean and the largest norm, and what else was asked for, of the last finished step."""
        if self.norms is None:
            return {}
        if self._metrics is None:
            self._metrics = self._measured(self.norms)
        return dict(self._metrics)

    def _measured(self, norms: Tensor) -> dict[str, float]:
        found = {}
        if len(norms):
            found["sample_grad_norm_mean"] = float(norms.mean())
            found["sample_grad_norm_max"] = float(norms.max())
        if len(norms) and isinstance(self.max_norm, int | float):
            is_clipped = ~(norms <= self.max_norm)  # one that is not finite, too
            found["clipped_fraction"] = float(is_clipped.double().mean())
        if self._moments is not None:
            trace, squared_mean = self._moments
            found["noise_scale"] = trace / squared_mean if squared_mean else float("nan")
        return found

    # -- the backward passes

    @contextmanager
    def recording(self, module: nn.Module, **options: Any) -> Iterator[None]:
        """Records one micro-batch: its forward and its backward pass are in the block.

        `options` are those of `pergrad.record`.
        """
        self.open(module, **options)
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        self.close()

    def open(self, module: nn.Module, **options: Any) -> None:
        """Begins a micro-batch; `close` ends it after its backward pass."""
        if self._open is not None:
            raise PergradError(
                "a micro-batch is being recorded already: end it before the next one begins"
            )
        wanted: list[Quantity | None] = [self._norms, self._clipped, self._noise]
        self._seen = _Seen()
        quantities = [self._seen, *(q for q in wanted if q is not None)]
        block = record(module, *quantities, keep_grad=self._clipped is None, **options)
        block.__enter__()
        self._open, self._module = block, module

    def close(self) -> None:
        """Ends the micro-batch that is being recorded."""
        block, self._open = self._open, None
        if block is None:
            raise PergradError("no micro-batch is being recorded: call `open` before its forward")
        try:
            block.__exit__(None, None, None)
        except BaseException:
            self.abandon()
            raise

    @property
    def is_open(self) -> bool:
        """Whether a micro-batch is being recorded."""
        return self._open is not None

    def settle(self) -> None:
        """Ends the micro-batch that is being recorded, if any: it counts if its backward pass has run."""
        if self._open is not None and self._seen.has_gradients:
            self.close()
        else:
            self.drop()

    def drop(self) -> None:
        """Ends the micro-batch that is being recorded, and forgets it; earlier ones and `.grad` stay."""
        if self._open is None or self._module is None:
            return
        grads = [(p, p.grad, _copy(p.grad)) for p in self._module.parameters()]
        self._leave()
        for p, grad, values in grads:
            p.grad = grad
            if grad is not None and values is not None:
                grad.copy_(values)

    def _leave(self) -> None:
        """Ends a block by an error, after which `.grad` is as it was before the block."""
        block, self._open = self._open, None
        if block is not None:
            with suppress(_Dropped):
                block.__exit__(_Dropped, _Dropped(), None)

    def abandon(self) -> None:
        """Forgets all micro-batches since the last `finish`; after an error."""
        self._leave()
        for quantity in (self._norms, self._clipped, self._noise):
            if quantity is not None:
                quantity.reset()
        self._module = None

    # -- the step

    def finish(self) -> None:
        """Writes `.grad` if samples are clipped, and takes the metrics; call it before the step."""
        module = self._module
        if module is None or not self.is_pending:
            raise PergradError("there is nothing to step on: record a backward pass first")
        try:
            is_spread = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
            if is_spread:
                self._norms.all_gather()
            self.norms, self._metrics = self._norms.result, None
            if self._clipped is not None:
                self._clipped.assign(reduce=is_spread)
                for p in module.parameters():
                    if p.requires_grad and p.grad is not None and len(self.norms):
                        p.grad.div_(len(self.norms))
            if self._noise is not None and len(self.norms) > 1:
                self._average(self._noise.all_reduce() if is_spread else self._noise)
        finally:
            self.abandon()

    def _average(self, noise: NoiseScale) -> None:
        trace, mean = noise.trace, noise.squared_mean
        before = self._moments or (0.0, 0.0)  # the start cancels in the ratio
        self._moments = (
            _DECAY * before[0] + (1 - _DECAY) * trace,
            _DECAY * before[1] + (1 - _DECAY) * mean,
        )


class _Seen(Quantity):
    """Knows whether gradients have arrived."""

    has_gradients = False
    is_linear = True

    def begin(self, batch: Batch) -> None:
        pass

    def consume(self, name: str, gradients: SampleGradients) -> None:
        self.has_gradients = True

    def end(self) -> None:
        pass


class _Dropped(BaseException):
    """Leaves a block whose samples are not wanted."""


def _copy(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().clone()


def missing(package: str, error: ImportError) -> ImportError:
    """Returns the error for an integration whose package is not installed."""
    return ImportError(
        f"pergrad.integrations needs {package} here, which cannot be imported ({error}): "
        'install it with pip install "pergrad[integrations]"'
    )
