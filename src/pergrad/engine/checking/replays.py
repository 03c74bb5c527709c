"""Repeats a recorded step by plain autograd, from the same random state, with other arguments or dtypes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from pergrad.distributed.gathering import without_policies
from pergrad.engine.checking.watched_calls import WatchedCalls, tensors_of_output
from pergrad.engine.looping.loop import looped
from pergrad.engine.looping.owned_slices import OwnedSlices
from pergrad.engine.looping.plain_run import CannotLoopError
from pergrad.engine.looping.pulling_back import Reduced, pulled_back
from pergrad.engine.looping.slices import AnySlices, ownership_of_batch, slices_of
from pergrad.engine.looping.slicing import Slices
from pergrad.engine.looping.snapshots import Snapshot
from pergrad.engine.recording.arguments import map_leaves
from pergrad.engine.recording.inputs import inputs_of
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.owning import Named, Place, named_leaves, ownership_in
from pergrad.engine.recording.recording import recorded
from pergrad.errors import PergradError
from pergrad.quantities import Quantity
from pergrad.runtime import without_autocast
from pergrad.runtime.tolerances import largest_of_each, tolerance_of_model

__all__ = ["LossReplay", "ModuleReplay", "Output", "Replay", "WholeNumbersAs"]


@dataclass(frozen=True)
class Output:
    """A tensor that a step ends in, the dimension of its samples, and the gradient that reached it."""

    tensor: Tensor
    dim: int
    gradient: Tensor
    owner: Tensor | None = None  # the sample of each row, where samples have several

    def weighted(self, weights: Tensor) -> Tensor:  # (n,)
        """Multiplies the gradient of each sample by its weight."""
        if self.owner is not None:
            weights = weights[self.owner.to(weights.device)]
        shape = [1] * self.gradient.dim()
        shape[self.dim] = len(weights)
        return self.gradient * weights.to(self.gradient).view(shape)


class Replay(ABC):
    """A step that can be run again; `forwards` and `backwards` count the plain runs."""

    def __init__(self, module: nn.Module, size: int) -> None:
        self.module = module
        self.size = size
        self.forwards = 0
        self.backwards = 0
        self.dtype: torch.dtype | None = None  # of the present rerun; None: that of the step
        self.jitter: Callable[[Tensor], Tensor] | None = None  # of the present rerun's arguments

    @property
    @abstractmethod
    def arguments(self) -> Any:
        """Returns all arguments of the step as one structure."""

    @abstractmethod
    def slices(self) -> AnySlices:
        """Returns the samples of the arguments, to exchange some."""

    @abstractmethod
    def run(self, arguments: Any) -> list[Output]:
        """Runs the step's forward pass, with autocast as it was, or off in a given dtype."""

    def is_repeated_by(self, outputs: Sequence[Output]) -> bool:
        """Whether outputs are those of the recorded step, as far as these are known."""
        return True

    def outputs(self, arguments: Any = None) -> list[Output]:
        """Runs the step's forward pass again, with other arguments if any are given."""
        self.forwards += 1
        given = self.arguments if arguments is None else arguments
        with torch.enable_grad():
            return self.run(self._in_dtype(given))

    def _in_dtype(self, arguments: Any) -> Any:
        if self.dtype is not None:
            arguments = map_leaves(self._cast, arguments)
        return arguments if self.jitter is None else map_leaves(self._jittered, arguments)

    def fill(self, quantities: Sequence[Quantity], options: Options) -> None:
        """Records the step again, which fills the quantities."""
        with recorded(self.module, quantities, options):
            outputs = self.outputs()
            torch.autograd.backward([o.tensor for o in outputs], [o.gradient for o in outputs])

    def ordinary(
        self,
        outputs: Sequence[Output],
        weights: Tensor,
        parameters: Mapping[str, Tensor],
        *,
        retain_graph: bool = False,
        reduced: Mapping[str, Reduced] | None = None,
    ) -> dict[str, Tensor]:
        """Σ_n weights[n] g_n, as plain autograd gives it; or a function of it, where `reduced` has one."""
        self.backwards += 1
        gradients = [output.weighted(weights) for output in outputs]
        device = next((p.device for p in parameters.values()), None) or _device_of(self.module)
        with without_autocast(device):
            return pulled_back(
                [output.tensor for output in outputs],
                gradients,
                parameters,
                self.module.parameters(),
                retain_graph=retain_graph,
                reduced=reduced,
            )

    @contextmanager
    def precisely(self, dtype: torch.dtype) -> Iterator[None]:
        """Within, model, arguments and the gradients at its outputs are in `dtype`, and autocast is off.

        So are floats that the model makes of whole numbers. Torch replaces the parameters' nodes in the
        graph: outputs from outside must not be used any more.
        """
        own = [*self.module.parameters(), *self.module.buffers()]
        casts = [(t, t.data) for t in own if t.is_floating_point() and t.dtype != dtype]
        self.dtype = dtype
        try:
            for t, data in casts:
                t.data = data.to(dtype)
            with ExitStack() as off:
                off.enter_context(without_policies(self.module))
                for device in {"cpu", _device_of(self.module).type}:
                    off.enter_context(torch.autocast(device, enabled=False))
                off.enter_context(WholeNumbersAs(dtype))
                yield
        finally:
            self.dtype = None
            for t, data in casts:
                t.data = data

    @contextmanager
    def jittered(self, jitter: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Within, parameters and the tensors among the arguments are changed by `jitter`."""
        changed = [(p, p.data) for p in self.module.parameters()]
        self.jitter = jitter
        try:
            for p, data in changed:
                p.data = jitter(data)
            yield
        finally:
            self.jitter = None
            for p, data in changed:
                p.data = data

    def _cast(self, value: Any) -> Any:
        assert self.dtype is not None
        if isinstance(value, PackedSequence) and value.data.is_floating_point():
            return value.to(dtype=self.dtype)
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(self.dtype)
        return value

    def _jittered(self, value: Any) -> Any:
        assert self.jitter is not None
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return self.jitter(value).requires_grad_(value.requires_grad)


class LossReplay(Replay):
    """Repeats a loss function that gives the losses of the samples."""

    is_looped = False  # whether the step was computed sample by sample

    def __init__(
        self,
        module: nn.Module,
        loss_fn: Callable[..., Tensor],
        batch: tuple[Any, ...],
        options: Options,
        snapshot: Snapshot,
        size: int,
        *,
        losses: Tensor | None = None,  # those that were recorded
    ) -> None:
        super().__init__(module, size)
        self._losses = losses
        self._loss_fn = loss_fn
        is_flat = all(isinstance(value, Tensor) for value in batch)  # mostly; others are opened
        self._batch: tuple[Any, ...] = (
            tuple(map(_detached, batch)) if is_flat else map_leaves(_detached, batch)
        )
        self._options = options
        self._snapshot = snapshot
        self._ownership = ownership_of_batch(loss_fn, self._batch, options)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self._batch

    def slices(self) -> AnySlices:
        return slices_of(self._loss_fn, self._batch, self.size, self._options)

    def fill(self, quantities: Sequence[Quantity], options: Options) -> None:
        if not self.is_looped:
            return super().fill(quantities, options)
        batch = self._in_dtype(self._batch)
        try:
            looped(self.module, self._loss_fn, batch, quantities, options, self._snapshot)
        except CannotLoopError as error:
            raise PergradError(f"the step cannot be repeated sample by sample: {error}") from error

    def is_repeated_by(self, outputs: Sequence[Output]) -> bool:
        if self._losses is None:
            return True
        found = outputs[0].tensor.detach()
        if torch.equal(found, self._losses):  # as mostly, and soon seen
            return True
        size, apart = largest_of_each([self._losses, found - self._losses])
        close = tolerance_of_model(found.dtype, torch.float32) * max(size, 1e-30)
        return apart <= close or not bool(found.isfinite().all())

    def run(self, arguments: tuple[Any, ...]) -> list[Output]:
        self._snapshot.restore()
        losses = self._loss_fn(self.module, *arguments)
        if self._ownership is not None and isinstance(losses, Tensor):
            losses = self._ownership.summed(losses)
        check_losses(losses, self.size)
        scale = 1 / self.size if self._options.loss_reduction == "mean" else 1.0
        return [Output(losses, 0, torch.full_like(losses, scale))]


class ModuleReplay(Replay):
    """Repeats the calls of a module in a step, from their inputs and the gradients at their outputs."""

    def __init__(self, watched: WatchedCalls, options: Options, size: int) -> None:
        super().__init__(watched.module, size)
        self._options = options
        self._calls = watched.calls
        self._arguments = [map_leaves(_detached, (c.args, c.kwargs)) for c in self._calls]
        self._ownership = ownership_in(options.ownership, self._named())
        for call in self._calls:
            call.check_inputs("certify=True")
            for g in call.grads.values():
                if g.dim() == 0:
                    raise PergradError(
                        "certify=True cannot tell the samples apart: the module returns a scalar. Let it "
                        "return one loss for each sample, or use pergrad.certify with a loss function "
                        "that does"
                    )
                if self._place_of(g) is None:
                    raise PergradError(
                        f"certify=True cannot find the {size} samples in an output of shape "
                        f"{tuple(g.shape)}: use pergrad.certify with a loss function that returns the "
                        "losses of the samples"
                    )

    @property
    def arguments(self) -> list[Any]:
        return self._arguments

    def slices(self) -> AnySlices:
        if self._ownership is not None:
            return OwnedSlices(self._arguments, self._named(), self._ownership)
        found: dict[int, int] = {}
        for args, kwargs in self._arguments:
            for t, dim in inputs_of(self.module, self._options.batch_dim, args, kwargs):
                if isinstance(t, PackedSequence) or (t.dim() > dim and t.shape[dim] == self.size):
                    found[id(t)] = dim
        return Slices(self._arguments, self.size, found)

    def _named(self) -> list[Named]:
        forward = self.module.forward
        return [n for args, kwargs in self._arguments for n in named_leaves(forward, args, kwargs)]

    def run(self, arguments: list[Any]) -> list[Output]:
        found = []
        for call, (args, kwargs) in zip(self._calls, arguments, strict=True):
            call.snapshot.restore()
            with ExitStack() as as_recorded:
                if self.dtype is None:
                    as_recorded.enter_context(call.autocast())
                tensors = tensors_of_output(self.module(*args, **kwargs))
            for position, g in call.grads.items():
                place = self._place_of(g)
                assert place is not None
                dim, owner = place
                found.append(Output(tensors[position], dim, g.to(tensors[position].dtype), owner))
        return found

    def _place_of(self, t: Tensor) -> Place | None:
        if self._ownership is not None:
            return self._ownership.layout_of_rows(t)
        dim = self._options.batch_dim
        return (dim, None) if t.dim() > dim and t.shape[dim] == self.size else None


def check_losses(losses: Any, size: int) -> None:
    """Raises unless there is one loss for each sample."""
    if isinstance(losses, Tensor) and losses.dim() == 1 and len(losses) == size:
        return
    if isinstance(losses, Tensor) and losses.dim() == 0:
        raise PergradError(
            "certify cannot tell the samples apart: the loss function returns a scalar. Let it return the "
            f"losses of the {size} samples, (B,), for example with reduction='none'"
        )
    got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    raise PergradError(
        f"certify needs the losses of the {size} samples, ({size},), from the loss function; got {got}"
    )


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return value


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


class WholeNumbersAs(TorchFunctionMode):
    """Casts float32 results of functions of whole numbers alone, such as `pixels.float()`, to another dtype.

    Casts of floats are left to the model, which may want float32.

    >>> pixels = torch.tensor([0, 255], dtype=torch.uint8)
    >>> with WholeNumbersAs(torch.float64):
    ...     print(pixels.float().dtype, (pixels / 255).dtype, torch.ones(1).dtype)
    torch.float64 torch.float64 torch.float32
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if not isinstance(found, Tensor) or found.dtype != torch.float32 or found.requires_grad:
            return found
        given = [part for part in (*args, *(kwargs or {}).values()) if isinstance(part, Tensor)]
        are_whole = given and not any(t.is_floating_point() or t.is_complex() for t in given)
        return found.to(self._dtype) if are_whole else found
