"""Repeats a recorded step by plain autograd, from the same random state, with other arguments or dtypes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pergrad.engine.checking.snapshots import Snapshot
from pergrad.engine.checking.watched_calls import WatchedCalls, tensors_of_output
from pergrad.engine.recording.arguments import leaves, map_leaves
from pergrad.engine.recording.inputs import inputs_of
from pergrad.engine.recording.options import Options
from pergrad.errors import PergradError
from pergrad.runtime import without_autocast
from pergrad.runtime.tolerances import largest, tolerance_of_model

__all__ = ["LossReplay", "ModuleReplay", "Output", "Replay", "pulled_back"]


@dataclass(frozen=True)
class Output:
    """A tensor that a step ends in, the dimension of its samples, and the gradient that reached it."""

    tensor: Tensor
    dim: int
    gradient: Tensor

    def weighted(self, weights: Tensor) -> Tensor:  # (n,)
        """Multiplies the gradient of each sample by its weight."""
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

    @property
    @abstractmethod
    def arguments(self) -> Any:
        """Returns all arguments of the step as one structure."""

    @abstractmethod
    def sample_dims(self) -> dict[int, int]:
        """Maps the id of each argument that carries samples to the dimension of the samples."""

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
            return self.run(given if self.dtype is None else map_leaves(self._cast, given))

    def ordinary(
        self,
        outputs: Sequence[Output],
        weights: Tensor,
        parameters: Mapping[str, Tensor],
        *,
        retain_graph: bool = False,
    ) -> dict[str, Tensor]:
        """Σ_n weights[n] g_n, as plain autograd gives it."""
        self.backwards += 1
        gradients = [output.weighted(weights) for output in outputs]
        with without_autocast(_device_of(self.module)):
            return pulled_back(
                [output.tensor for output in outputs],
                gradients,
                parameters,
                self.module.parameters(),
                retain_graph=retain_graph,
            )

    @contextmanager
    def precisely(self, dtype: torch.dtype) -> Iterator[None]:
        """Within, model, arguments and the gradients at its outputs are in `dtype`, and autocast is off.

        Torch replaces the parameters' nodes in the graph: outputs from outside must not be used any more.
        """
        own = [*self.module.parameters(), *self.module.buffers()]
        casts = [(t, t.data) for t in own if t.is_floating_point() and t.dtype != dtype]
        self.dtype = dtype
        try:
            for t, data in casts:
                t.data = data.to(dtype)
            with ExitStack() as off:
                for device in {"cpu", _device_of(self.module).type}:
                    off.enter_context(torch.autocast(device, enabled=False))
                yield
        finally:
            self.dtype = None
            for t, data in casts:
                t.data = data

    def _cast(self, value: Any) -> Any:
        assert self.dtype is not None
        if isinstance(value, PackedSequence) and value.data.is_floating_point():
            return value.to(dtype=self.dtype)
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(self.dtype)
        return value


class LossReplay(Replay):
    """Repeats a loss function that gives the losses of the samples."""

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
        self._batch: tuple[Any, ...] = map_leaves(_detached, batch)
        self._options = options
        self._snapshot = snapshot

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self._batch

    def sample_dims(self) -> dict[int, int]:
        return _dims_by_size(leaves(self._batch), self._options.batch_dim, self.size)

    def is_repeated_by(self, outputs: Sequence[Output]) -> bool:
        if self._losses is None:
            return True
        found = outputs[0].tensor.detach()
        close = tolerance_of_model(found.dtype, torch.float32) * max(largest(self._losses), 1e-30)
        return largest(found - self._losses) <= close or not bool(found.isfinite().all())

    def run(self, arguments: tuple[Any, ...]) -> list[Output]:
        self._snapshot.restore()
        losses = self._loss_fn(self.module, *arguments)
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
        for call in self._calls:
            call.check_inputs("certify=True")
            for g in call.grads.values():
                if g.dim() == 0:
                    raise PergradError(
                        "certify=True cannot tell the samples apart: the module returns a scalar. Let it "
                        "return one loss for each sample, or use pergrad.certify with a loss function "
                        "that does"
                    )
                if self._dim_of(g) is None:
                    raise PergradError(
                        f"certify=True cannot find the {size} samples in an output of shape "
                        f"{tuple(g.shape)}: use pergrad.certify with a loss function that returns the "
                        "losses of the samples"
                    )

    @property
    def arguments(self) -> list[Any]:
        return self._arguments

    def sample_dims(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for args, kwargs in self._arguments:
            for t, dim in inputs_of(self.module, self._options.batch_dim, args, kwargs):
                if isinstance(t, PackedSequence) or (t.dim() > dim and t.shape[dim] == self.size):
                    found[id(t)] = dim
        return found

    def run(self, arguments: list[Any]) -> list[Output]:
        found = []
        for call, (args, kwargs) in zip(self._calls, arguments, strict=True):
            call.snapshot.restore()
            with ExitStack() as as_recorded:
                if self.dtype is None:
                    as_recorded.enter_context(call.autocast())
                tensors = tensors_of_output(self.module(*args, **kwargs))
            for position, g in call.grads.items():
                dim = self._dim_of(g)
                assert dim is not None
                found.append(Output(tensors[position], dim, g.to(tensors[position].dtype)))
        return found

    def _dim_of(self, t: Tensor) -> int | None:
        dim = self._options.batch_dim
        return dim if t.dim() > dim and t.shape[dim] == self.size else None


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


def pulled_back(
    tensors: Sequence[Tensor],
    gradients: Sequence[Tensor],
    parameters: Mapping[str, Tensor],
    others: Iterable[Tensor],
    *,
    retain_graph: bool = False,
) -> dict[str, Tensor]:
    """Computes the gradients of parameters, dense, zeros where nothing reaches one.

    `others` are tensors that the graph may use out of sight; their `.grad` is left as it was too.
    """
    wanted = list(parameters.values())
    runs_python, leaves_of_graph = _surveyed(tensors)
    found: tuple[Tensor | None, ...]
    if runs_python:
        touched = [*wanted, *leaves_of_graph, *others]
        found = _accumulated(tensors, gradients, wanted, touched, retain_graph)
    else:
        found = torch.autograd.grad(
            list(tensors), wanted, list(gradients), retain_graph=retain_graph, allow_unused=True
        )
    return {
        name: torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
        for (name, p), g in zip(parameters.items(), found, strict=True)
    }


def _surveyed(tensors: Sequence[Tensor]) -> tuple[bool, list[Tensor]]:
    """Says whether a graph has autograd.Functions, and lists its leaves.

    An autograd.Function may run a backward pass of its own, as a reentrant checkpoint does. That writes to
    `.grad` of parameters which the outer graph does not know.
    """
    pending = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen, found = set(pending), []
    runs_python = False
    while pending:
        node: Any = pending.pop()
        runs_python |= isinstance(node, torch.autograd.function.BackwardCFunction)
        if hasattr(node, "variable"):
            found.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return runs_python, found


def _accumulated(
    tensors: Sequence[Tensor],
    gradients: Sequence[Tensor],
    wanted: Sequence[Tensor],
    touched: Sequence[Tensor],
    retain_graph: bool,
) -> tuple[Tensor | None, ...]:
    """Computes gradients by `backward`, and leaves `.grad` as it was."""
    touched = list({id(p): p for p in touched}.values())
    before = [p.grad for p in touched]
    try:
        for p in touched:
            p.grad = None
        torch.autograd.backward(list(tensors), list(gradients), retain_graph=retain_graph)
        return tuple(p.grad for p in wanted)
    finally:
        for p, g in zip(touched, before, strict=True):
            p.grad = g


def _dims_by_size(values: Iterator[Any], dim: int, size: int) -> dict[int, int]:
    """Maps the id of each tensor that has `size` samples to their dimension; a vector has only one."""
    found: dict[int, int] = {}
    for value in values:
        if isinstance(value, PackedSequence):
            found[id(value)] = 0
        elif isinstance(value, Tensor):
            for candidate in dict.fromkeys([dim, 0] if value.dim() == 1 else [dim]):
                if value.dim() > candidate and value.shape[candidate] == size:
                    found[id(value)] = candidate
                    break
    return found


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return value


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
