"""Sums the clipped gradients of a batch, in pieces, without any choice that depends on the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from pergrad.distributed.sharding import sharding_modules
from pergrad.engine.checking.certification import certified_run
from pergrad.engine.compiling.step import CompiledStep, compiled
from pergrad.engine.looping.snapshots import Snapshot, undisturbed
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.running import run_recorded
from pergrad.errors import PergradError, PrivacyError
from pergrad.private.drawing.ranks import Ranks
from pergrad.private.drawing.streams import seeded
from pergrad.private.planning.plain import is_integer
from pergrad.private.stepping.checks import Written
from pergrad.private.stepping.pieces import Shared, check_rows, chosen_of, pieces_of, rows_of
from pergrad.private.stepping.sizes import check_sizes
from pergrad.quantities import ClippedSum
from pergrad.runtime import wide

__all__ = ["Backend", "NotPrivate", "Summation"]

Backend: TypeAlias = Literal["eager", "inductor"]


@dataclass(frozen=True)
class NotPrivate:
    """Numbers of the last batch, without noise: to look at, never to publish."""

    batch_size: int
    losses: Tensor  # (n,)
    norms: Tensor  # (n,), before clipping

    @property
    def nonfinite(self) -> int:
        """The number of samples whose gradient was not finite; they added nothing."""
        return int((~self.norms.isfinite()).sum())


class Summation:
    """Computes Σ_n clip(g_n) of one model and one loss function."""

    PREFIX = "model."  # of the names of parameters, where samples have views

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        clipped: Callable[[], ClippedSum],
        *,
        piece_size: int | None,
        backend: Backend | None,
        cuda_graphs: bool,
        certify: bool,
        views: bool,
        public_buffers: Iterable[str],
    ) -> None:
        self._model, self._loss_fn, self._clipped = model, loss_fn, clipped
        self._piece_size = _checked(piece_size, backend)
        self._views = views
        self.shared = Shared()  # the parts of batches that are not cut
        self._public_buffers = tuple(public_buffers)
        self.is_certified = False
        self._certify = certify
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        # With views, one sample is several rows of the model: its loss is seen as a whole.
        self._module: nn.Module = _Whole(model, self._losses) if views else model
        self._prefix = self.PREFIX if views else ""
        if cuda_graphs and backend is None:
            raise PrivacyError(
                "cuda_graphs=True launches a compiled step: pass backend='inductor' or backend='eager' too"
            )
        self._backend, self._cuda_graphs = backend, cuda_graphs
        self._is_sharded = bool(sharding_modules(model))
        self._traced: tuple[CompiledStep, ClippedSum] | None = None

    def __call__(
        self, batch: tuple[Any, ...], size: int, seed: bytes
    ) -> tuple[dict[str, Tensor], NotPrivate]:
        """Returns the sums by name, in float32 or float64, and the numbers of the samples."""
        parameters = {name: p for name, p in self._model.named_parameters() if name in self.names}
        devices = tuple({p.device for p in parameters.values()})
        sums: dict[str, Tensor] = {}
        norms, losses = [], []
        if size:
            check_rows(batch, size)
            self.shared.see(batch, size, is_cut=self._piece_size is not None)
        is_repeated = self._certify and not self.is_certified
        written = Written(
            self._model,
            self._public_buffers,
            by_value=is_repeated or self._backend is not None,
            parameters=is_repeated
            or self._backend is None,  # a traced step writes as its first one
        )
        with seeded(seed, devices):
            for rows, piece in self._pieces(batch, size, devices[0]):
                lost, found = self._of_piece(piece, rows)
                _check_count(lost, self._piece_size or rows if self._backend else rows)
                result = found.result
                for name in self.names:
                    more = result[self._prefix + name]
                    if name in sums:
                        # Exact: rounding after each piece would move the sum by more than a sample may.
                        sums[name] = sums[name].to(_exact(more.dtype)).add_(more)
                    else:
                        sums[name] = more
                losses.append(lost[:rows])
                norms.append(found.norms[:rows])
        written.check()  # once: comparing values waits for the device
        none = torch.zeros(0, device=devices[0])
        numbers = NotPrivate(size, torch.cat([none, *losses]), torch.cat([none, *norms]))
        return {
            name: sums[name].to(wide(p.dtype))
            if sums
            else torch.zeros_like(p, dtype=wide(p.dtype), requires_grad=False)
            for name, p in parameters.items()
        }, numbers

    def _pieces(
        self, batch: tuple[Any, ...], size: int, device: torch.device
    ) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Yields (rows, piece); where parameters are sharded, equally many on all ranks."""
        missing = 0
        if self._is_sharded:  # the model runs only if all ranks run it
            pieces = -(-size // (self._piece_size or max(size, 1)))
            missing = Ranks().most(pieces, device) - pieces
        if size:
            is_padded = self._backend is not None
            yield from pieces_of(
                batch, size, self._piece_size, padded=is_padded, shared=self.shared
            )
        for _ in range(missing):
            yield 0, rows_of(batch, size, 0, 0, shared=self.shared)

    def _of_piece(self, piece: tuple[Any, ...], rows: int) -> tuple[Tensor, ClippedSum]:
        if self._backend is None:
            if self._certify and not self.is_certified:
                losses, clipped, self.is_certified = self._certified(piece, rows)
                return losses, clipped
            clipped = self._clipped()
            losses = run_recorded(self._module, self._whole_losses, piece, [clipped], Options())
            return losses, clipped
        if self._certify and not self.is_certified and not self._is_proved(piece, rows):
            return self._untraced(piece, rows)
        if self._traced is None:
            clipped = self._clipped()
            step = compiled(
                self._module,
                self._masked_losses,
                clipped,
                backend=self._backend,
                cuda_graphs=self._cuda_graphs,
                certify=self._certify,
            )
            self._traced = step, clipped
        step, clipped = self._traced
        is_real = self._real(rows)
        # The first call is certified, and so is the first one of the graph.
        before = Snapshot(self._module) if not step.graphs else None
        try:
            losses = step(is_real, *piece)
            if before is not None and not step.graphs:
                # A first call is uncompiled and rounds in another way; a resumed run has it in another step.
                before.restore()
                losses = step(is_real, *piece)
        except PergradError:
            if before is None or not self._certify:
                raise
            before.restore()
            self._traced = None
            losses, clipped = self._untraced(piece, rows)
            is_finite = _finite(losses, clipped)[:rows]
            if is_finite.all():
                raise
            if self._is_traced_by(piece, is_finite):
                before.restore()
                return self._of_piece(piece, rows)
            return losses, clipped  # nothing can be proved of this piece: the next one is the first
        self.is_certified = self._certify
        return losses, clipped

    def _is_traced_by(self, piece: tuple[Any, ...], is_chosen: Tensor) -> bool:
        """Compiles and certifies the step with some samples of a padded piece."""
        count, size = int(is_chosen.sum()), self._piece_size or len(is_chosen)
        if not count:
            return False
        places = torch.zeros(size, dtype=torch.bool, device=is_chosen.device)
        places[: len(is_chosen)] = is_chosen
        samples = chosen_of(piece, places, self.shared)
        padded = rows_of(samples, count, 0, count, size - count, self.shared)
        with undisturbed(self._module):
            self._of_piece(padded, count)
        return self._traced is not None and bool(self._traced[0].graphs)

    def _real(self, rows: int) -> Tensor:
        """Tells which rows of a padded piece are samples."""
        device = next(self._model.parameters()).device
        return torch.arange(self._piece_size or rows, device=device) < rows

    def _untraced(self, piece: tuple[Any, ...], rows: int) -> tuple[Tensor, ClippedSum]:
        """Runs a padded piece uncompiled."""
        clipped, masked = self._clipped(), (self._real(rows), *piece)
        losses = run_recorded(self._module, self._masked_losses, masked, [clipped], Options())
        return losses, clipped

    def _is_proved(self, piece: tuple[Any, ...], rows: int) -> bool:
        """Proves the gradients of a padded piece without its padding, which would hide samples that meet."""
        samples = rows_of(piece, self._piece_size or rows, 0, rows, shared=self.shared)
        with undisturbed(self._module):
            return self._certified(samples, rows)[2]

    def _certified(self, piece: tuple[Any, ...], rows: int) -> tuple[Tensor, ClippedSum, bool]:
        """Runs a piece and proves its gradients; those that are not finite cannot be, the others are.

        Of one sample alone, nothing can be told of mixing, and the result is not certified.
        """
        before = Snapshot(self._module)
        clipped, losses_of = self._clipped(), self._whole_losses
        proved = piece
        try:
            losses, report = certified_run(self._module, losses_of, piece, [clipped], Options())
            report.check()
        except PergradError:
            before.restore()
            clipped = self._clipped()
            losses = run_recorded(self._module, losses_of, piece, [clipped], Options())
            is_finite = _finite(losses, clipped)
            if is_finite.all():
                raise
            rows = int(is_finite.sum())
            if not rows:
                return losses, clipped, False
            proved = chosen_of(piece, is_finite, self.shared)
            with undisturbed(self._module):
                again = [self._clipped()]
                certified_run(self._module, losses_of, proved, again, Options())[1].check()
        check_sizes(self._module, losses_of, proved, rows, self.shared)
        return losses, clipped, rows > 1

    def _whole_losses(self, module: nn.Module, *batch: Any) -> Tensor:
        return module(*batch) if self._views else self._losses(module, *batch)

    def _masked_losses(self, module: nn.Module, is_real: Tensor, *batch: Any) -> Tensor:
        losses = self._whole_losses(module, *batch)
        _check_count(losses, len(is_real))
        return losses.where(is_real, 0)

    def _losses(self, model: nn.Module, *batch: Any) -> Tensor:
        """Returns one loss for each sample."""
        losses = self._loss_fn(model, *batch)
        expected = 2 if self._views else 1
        if not isinstance(losses, Tensor) or losses.dim() != expected:
            got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            shape = (
                "(n, k), one for each view of each sample"
                if self._views
                else "(n,), one for each sample"
            )
            raise PrivacyError(
                f"loss_fn must return losses of shape {shape}, got {got}: a mean over the batch depends on "
                "its private size; use reduction='none'"
            )
        return losses.mean(1) if self._views else losses


class _Whole(nn.Module):
    """A model and its loss as one module, so that a sample may be many rows of the model's input."""

    def __init__(self, model: nn.Module, losses: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self._losses = losses
        self.training = model.training

    def forward(self, *batch: Any) -> Tensor:
        return self._losses(self.model, *batch)


def _finite(losses: Tensor, clipped: ClippedSum) -> Tensor:
    """Tells which samples have a finite loss and a finite gradient, (n,)."""
    return losses.isfinite() & clipped.norms.isfinite()


def _check_count(losses: Tensor, rows: int) -> None:
    """Refuses several losses for one record: it would be clipped as many times."""
    if len(losses) != rows:
        raise PrivacyError(
            f"loss_fn returned {len(losses)} losses for {rows} records of the plan: a record has one loss, "
            "or its gradient would count more than once; views=True averages several"
        )


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _checked(piece_size: int | None, backend: Backend | None) -> int | None:
    if piece_size is not None:
        if not is_integer(piece_size) or piece_size < 1:
            raise PrivacyError(f"piece_size must be a positive integer, got {piece_size!r}")
        piece_size = int(piece_size)
    if backend is None:
        return piece_size
    if backend not in get_args(Backend):
        raise PrivacyError(f"backend must be one of {get_args(Backend)} or None, got {backend!r}")
    if piece_size is None:
        raise PrivacyError(
            "a compiled step needs one shape: pass piece_size, to which batches are cut and padded, or make "
            "the plan with sampling='truncated'"
        )
    return piece_size
