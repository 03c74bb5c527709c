"""Clips and measures the gradient of each sample in the `Trainer` of Lightning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pergrad.errors import PergradError
from pergrad.integrations.stepping import SampleStep, missing

try:
    try:
        from lightning.pytorch import Callback as _Callback
    except ImportError:
        from pytorch_lightning import Callback as _Callback  # type: ignore[assignment]
except ImportError as error:
    raise missing("lightning", error) from error

__all__ = ["Callback"]


class Callback(_Callback):
    """Records each `training_step` and its backward pass: Trainer(callbacks=[Callback(max_norm=1.0)]).

    With `max_norm`, the optimizer steps on the mean of the clipped gradients of all samples since its last
    step, over the batches of `accumulate_grad_batches`. `gradient_clip_val` of the Trainer applies to that
    mean. Without `max_norm`, training is as it is without the callback, to the bit. Lightning's division of
    the loss by `accumulate_grad_batches` is undone before samples are clipped.

    With manual optimisation, each `manual_backward` is recorded, and `optimizer.step()` steps on the samples
    of those before it; its samples are those of the first layer that is called before it. The module must
    have one optimizer. With several processes, the strategy must be "ddp"; the mean is over all of them.

    The mean and the largest norm of a sample, the fraction of the samples that were clipped and the noise
    scale are logged with each step, as `self.log` does.

    Args:
        max_norm: the bound on the norm of each sample's gradient, or bounds by patterns of names, as for
            `pergrad.ClippedSum`. None: nothing is clipped.
        noise_scale: measure the gradient noise scale, too.
        options: further options of `pergrad.record`, such as `loss_reduction`.

    >>> Callback(max_norm=1.0)
    <Callback(max_norm=1.0)>
    """

    def __init__(
        self,
        max_norm: float | Mapping[str, float] | None = None,
        *,
        noise_scale: bool = False,
        **options: Any,
    ) -> None:
        self.step = SampleStep(max_norm, noise_scale=noise_scale)
        self._options = options
        self._module: _TrainingStep | None = None
        self._wrapper: DistributedDataParallel | None = None  # of several processes
        self._is_inside = False  # of a training step
        self._is_new = False  # whether there are metrics to log

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

    # -- the hooks of Lightning

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        wrapper = trainer.strategy.model
        if trainer.world_size > 1 and not isinstance(wrapper, DistributedDataParallel):
            raise PergradError(
                f'pergrad\'s Callback for Lightning runs in one process or with strategy="ddp", got '
                f"{type(trainer.strategy).__name__} with {trainer.world_size} processes: use "
                "pergrad.integrations.accelerate, or pergrad.record in a loop of your own"
            )
        self._wrapper = wrapper if isinstance(wrapper, DistributedDataParallel) else None
        if len(trainer.optimizers) > 1:
            raise PergradError(
                f"pergrad's Callback needs one optimizer, got {len(trainer.optimizers)}: the samples of a "
                "step could not be told from those of the others"
            )
        if sum(isinstance(c, Callback) for c in trainer.callbacks) > 1:
            raise PergradError("a Trainer takes one Callback of pergrad: pass all options to it")
        self.step.abandon()
        self._module = _TrainingStep(pl_module)
        pl_module.training_step = self._recorded

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._detach(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._detach(pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        # With a bound, parameters get no gradients before the step: there is nothing to reduce.
        if self._wrapper is not None and self.step.max_norm is not None:
            self._wrapper.require_backward_grad_sync = False

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self.step.is_open:
            self.step.close()
        if self._is_inside and self._module is not None:  # manual optimisation: more may follow
            self.step.open(self._module, **self._options)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.step.settle()  # a plain `loss.backward()` calls no hook
        if self.step.is_pending:
            self.step.finish()
            self._is_new = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._let_reduce()
        self.step.drop()  # of a step without a backward pass
        if self._is_new:
            self._is_new = False
            pl_module.log_dict(self.metrics, batch_size=1)

    def _recorded(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's training step in a block that ends with its backward pass."""
        module = self._module
        assert module is not None, "the training step is replaced while there is a module only"
        self.step.drop()
        self.step.open(module, **self._options)
        if module.is_automatic:
            return module(*args, **kwargs)
        # A backward pass may be of part of the batch: the first layer that is called tells its samples.
        self._is_inside = True
        try:
            output = module.forward(*args, **kwargs)
        finally:
            self._is_inside = False
        self.step.settle()
        return output

    def _let_reduce(self) -> None:
        if self._wrapper is not None:
            self._wrapper.require_backward_grad_sync = True

    def _detach(self, pl_module: Any) -> None:
        """Gives the module its training step back, and ends a block that is open."""
        self._let_reduce()
        self._wrapper = None
        self.step.abandon()
        self._is_inside = self._is_new = False
        if self._module is not None:
            self._module = None
            del pl_module.training_step


class _TrainingStep(nn.Module):
    """Calls the training step of a LightningModule, whose parameters have the same names here."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.is_automatic: bool = module.automatic_optimization
        self._run: Callable[..., Any] = module.training_step
        for table in ("_parameters", "_buffers", "_modules"):
            self.__dict__[table] = module.__dict__[table]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)
