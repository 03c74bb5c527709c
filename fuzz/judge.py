"""Judges a program: runs it plainly and by pergrad, and compares gradients, norms, sums and state."""

from __future__ import annotations

import copy
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import pergrad
from fuzz import functions
from fuzz.programs import Program

__all__ = ["FAILURES", "Outcome", "judge"]

FAILURES = ("wrong", "crash", "state", "poisoned", "certified", "alarm")
_TOLERANCE = 1e-7  # float64; of the largest entry
_BOUND = 0.5
_SECONDS = 120


@dataclass(frozen=True)
class Outcome:
    """What became of a program: "exact", "refused", "invalid", or one of `FAILURES`; and why."""

    kind: str
    why: str = ""
    certificate: str = ""  # "passed", "refused" or empty

    @property
    def failed(self) -> bool:
        return self.kind in FAILURES


class _FoundError(Exception):
    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.outcome = Outcome(kind, why)


@dataclass
class _Truth:
    losses: Tensor  # (B,)
    grads: dict[str, Tensor]  # (B, *shape)

    def ordered(self, order: Tensor) -> _Truth:
        """Returns the truth with rows in another order."""
        return _Truth(self.losses[order], {name: g[order] for name, g in self.grads.items()})

    @property
    def finite(self) -> Tensor:
        """Which samples have a gradient that is finite, (B,)."""
        return torch.stack([g.isfinite().flatten(1).all(1) for g in self.grads.values()]).all(0)

    @property
    def norms(self) -> Tensor:
        squares = [g.abs().square().flatten(1).sum(1) for g in self.grads.values()]
        return torch.stack(squares).sum(0).sqrt()


def judge(program: Program) -> Outcome:
    """Judges one program; what earlier ones have left in caches is part of the trial."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.bfloat16 if program.mode == "bf16" else torch.float64)
    torch.set_num_threads(1)
    space = dict(vars(functions))
    try:
        with warnings.catch_warnings(), _time_limit():
            warnings.simplefilter("ignore")
            exec(compile(program.source(), "program", "exec"), space)
            trial = _Trial(program, space)
            return {"eager": trial.eager, "bf16": trial.halves, "compiled": trial.compiled}[
                program.mode
            ]()
    except _FoundError as found:
        return found.outcome
    finally:
        space.get("after", lambda model: None)(None)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)


class _Trial:
    def __init__(self, program: Program, space: dict[str, Any]) -> None:
        self.program = program
        self.space = space
        self.seed = program.seed
        self.loss_fn = space["loss_fn"]

    # -- modes

    def eager(self) -> Outcome:
        plain, model = self._models()
        certificate = ""
        for turn, quantities in enumerate((self.program.first, self.program.second)):
            if turn:
                for each in (plain, model):
                    torch.default_generator.manual_seed(self.seed + 17)
                    self.space["between"](each)
            spoil = self.program.nan_first and not turn
            batch = self._batch(turn, spoil)
            before = _copied_state(model)
            truth = self._truth(plain, batch, turn)
            if not spoil and not truth.finite.all():
                raise _FoundError("invalid", "the gradients are not finite")
            refusal = self._attempt(model, batch, quantities, truth, turn, before)
            if refusal and spoil:  # the next batch is to be right with another pair of models
                plain, model = self._models()
            elif refusal:
                return self._refused(refusal, batch, quantities, turn)
            else:
                _compare_state(plain, model)
            if turn and not spoil:
                certificate = self._certificate(batch)
        return Outcome("exact", certificate=certificate)

    def halves(self) -> Outcome:
        """Sums of clipped gradients in bfloat16 keep their bound."""
        model, clipped = self._model(), pergrad.ClippedSum(_BOUND)
        batch = tuple(t[:1].expand_as(t).contiguous() for t in self._batch(0))
        self._truth(self._model(), batch, 0)
        try:
            with pergrad.record(model, clipped):
                torch.default_generator.manual_seed(self.seed)
                self.loss_fn(model, *batch).sum().backward()
        except pergrad.PergradError as error:
            return Outcome("refused", _first_line(error))
        except Exception as error:
            raise _FoundError("crash", _described(error)) from error
        total = sum(float(t.double().square().sum()) for t in clipped.result.values()) ** 0.5
        most = _BOUND * len(clipped.norms)
        if total > most * (1 + 1e-5):
            raise _FoundError(
                "wrong", f"clipped sum in bfloat16 over its bound by {total / most - 1:.1e}"
            )
        return Outcome("exact")

    def compiled(self) -> Outcome:
        """A compiled step gives the same as plain autograd, call by call."""
        plain, model = self._models()
        grads, norms = pergrad.Grads(), pergrad.Norms()
        step = pergrad.compiled(model, self.loss_fn, grads, norms, backend="eager")
        for turn in range(4):
            batch = self._batch(turn)
            truth = self._truth(plain, batch, turn)
            try:
                torch.default_generator.manual_seed(self.seed + turn)
                step(*batch)
                found, lengths = grads.result, norms.result
            except pergrad.PergradError as error:
                return Outcome("refused", _first_line(error))
            except Exception as error:
                raise _FoundError("crash", f"call {turn}: {_described(error)}") from error
            _compare_grads(found, truth)
            _compare("norms", lengths, truth.norms)
            _compare_state(plain, model)
        return Outcome("exact")

    # -- parts

    def _model(self) -> nn.Module:
        torch.default_generator.manual_seed(self.seed)
        try:
            return self.space["Model"]()
        except Exception as error:
            raise _FoundError("invalid", _described(error)) from error

    def _models(self) -> tuple[nn.Module, nn.Module]:
        return self._model(), self._model()

    def _batch(self, turn: int, spoil: bool = False) -> tuple[Tensor, ...]:
        torch.default_generator.manual_seed(self.seed + 1 + turn)
        batch = self.space["make_batch"]()
        if spoil:
            batch[0][0] = torch.nan
        return batch

    def _truth(self, model: nn.Module, batch: tuple[Tensor, ...], turn: int) -> _Truth:
        """∂ℓ_n/∂w for each n, one backward pass each, by plain autograd."""
        torch.default_generator.manual_seed(self.seed + turn)
        try:
            losses = self.loss_fn(model, *batch)
            self._random_state = torch.get_rng_state()
            named = {name: p for name, p in model.named_parameters() if p.requires_grad}
            if losses.shape != (self.program.sizes.B,):
                raise _FoundError("invalid", "there is not one loss for each sample")
            if not named or not losses.requires_grad:
                raise _FoundError("invalid", "the losses depend on no parameter")
            rows = [
                torch.autograd.grad(
                    loss, list(named.values()), retain_graph=True, allow_unused=True
                )
                for loss in losses
            ]
        except _FoundError:
            raise
        except Exception as error:
            raise _FoundError("invalid", _described(error)) from error
        grads = {
            name: torch.stack([torch.zeros_like(p) if r[k] is None else r[k] for r in rows])
            for k, (name, p) in enumerate(named.items())
        }
        return _Truth(losses.detach(), grads)

    def _attempt(
        self,
        model: nn.Module,
        batch: tuple[Tensor, ...],
        quantities: str,
        truth: _Truth,
        turn: int,
        before: dict[str, tuple[Any, Any]],
    ) -> pergrad.PergradError | None:
        """Runs pergrad and compares; returns its refusal, if any."""
        torch.default_generator.manual_seed(self.seed + turn)
        grads, norms, clipped = pergrad.Grads(), pergrad.Norms(), pergrad.ClippedSum(_BOUND)
        found: dict[str, Tensor] | None = None
        try:
            if quantities == "grads":
                found = pergrad.grads(model, self.loss_fn, *batch)
            else:
                wanted: dict[str, tuple[pergrad.Quantity, ...]] = {
                    "sums": (norms, clipped),
                    "block": (grads, norms),
                    "mean": (grads, clipped),
                }
                mean = quantities == "mean"
                with pergrad.record(
                    model, *wanted[quantities], loss_reduction="mean" if mean else "sum"
                ):
                    losses = self.loss_fn(model, *batch)
                    (losses.mean() if mean else losses.sum()).backward()
                found = None if quantities == "sums" else grads.result
        except pergrad.PergradError as error:
            _compare_after_refusal(before, model)
            return error
        except Exception as error:
            raise _FoundError("crash", _described(error)) from error
        random_state = torch.get_rng_state()
        lengths = norms.result if quantities in ("sums", "block") else None
        sums = clipped.result if quantities in ("sums", "mean") else None
        try:
            _compare_all(found, lengths, sums, truth)
        except _FoundError as wrong:
            order = self._order(batch) if self.program.mixes else None
            if order is None:
                raise
            _compare_all(found, lengths, sums, truth.ordered(order))
            if quantities == "grads":  # row n is to be the gradient of losses[n]
                raise _FoundError(
                    "wrong", "the rows are in another order than the losses"
                ) from wrong
        if not torch.equal(random_state, self._random_state):
            raise _FoundError("state", "the generator of random numbers has moved")
        return None

    def _refused(
        self, error: pergrad.PergradError, batch: tuple[Tensor, ...], quantities: str, turn: int
    ) -> Outcome:
        """A batch that is refused after another one with a NaN must be refused by itself too."""
        why = _first_line(error)
        if self.program.nan_first and turn and hasattr(pergrad, "runtime"):
            pergrad.runtime.caches.clear_caches()
            plain, model = self._models()
            truth = self._truth(plain, batch, turn)
            if self._attempt(model, batch, quantities, truth, turn, _copied_state(model)) is None:
                raise _FoundError("poisoned", f"refused after a batch with a NaN: {why}")
        return Outcome("refused", why)

    def _certificate(self, batch: tuple[Tensor, ...]) -> str:
        """Asks for the certificate of the answer, which is right, where there are certificates."""
        certify = getattr(pergrad, "certify", None)
        if certify is None:
            return ""
        torch.default_generator.manual_seed(self.seed)
        try:
            report = certify(self._model(), self.loss_fn, *batch)
        except pergrad.PergradError:
            return "refused"
        except Exception as error:
            raise _FoundError("crash", f"certify: {_described(error)}") from error
        if report.ok and self.program.mixes and self._samples_meet(batch):
            raise _FoundError(
                "certified", "the certificate passes samples that meet in the forward"
            )
        if not report.ok and not self.program.may_refuse:
            raise _FoundError("alarm", f"the certificate rejects a right answer: {report}")
        return "passed" if report.ok else "rejected"

    def _moved(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Whether another sample n changes the loss m: a matrix (n, m)."""
        losses = self._losses(batch)
        rows = []
        for n in range(len(losses)):
            other = tuple(t.clone() for t in batch)
            for t, drawn in zip(other, self._batch(9), strict=True):
                t[n] = drawn[n]
            rows.append((self._losses(other) - losses).abs() > 1e-9)
        return torch.stack(rows)

    def _samples_meet(self, batch: tuple[Tensor, ...]) -> bool:
        """Whether the loss of some sample depends on another one."""
        moved = self._moved(batch)
        return bool((moved & ~torch.eye(len(moved), dtype=torch.bool)).any())

    def _order(self, batch: tuple[Tensor, ...]) -> Tensor | None:
        """Returns the number of each sample's loss, if samples are only put in another order.

        A sum of losses does not say which of them is whose: there row n is the gradient of sample n.
        """
        moved = self._moved(batch)
        is_permutation = bool((moved.sum(0) == 1).all() and (moved.sum(1) == 1).all())
        return moved.long().argmax(1) if is_permutation else None

    def _losses(self, batch: tuple[Tensor, ...]) -> Tensor:
        model = self._model()
        torch.default_generator.manual_seed(self.seed)
        return self.loss_fn(model, *batch).detach()


def _compare_all(
    grads: dict[str, Tensor] | None,
    norms: Tensor | None,
    sums: dict[str, Tensor] | None,
    truth: _Truth,
) -> None:
    finite = truth.finite
    if grads is not None:
        _compare_grads(grads, truth, finite)
    if norms is not None:
        _compare("norms", norms, truth.norms, finite)
    if sums is not None and finite.all():
        weights = (_BOUND / truth.norms.clamp_min(1e-300)).clamp_max(1)
        for name, g in truth.grads.items():
            if name not in sums:
                raise _FoundError("wrong", f"no clipped sum of {name}")
            want = torch.einsum("n,n...->...", weights.to(g.dtype), g)
            scale = float((weights * g.abs().flatten(1).amax(1)).sum())
            _compare(f"clipped sum of {name}", sums[name], want, scale=scale)


def _compare_grads(found: dict[str, Tensor], truth: _Truth, rows: Tensor | None = None) -> None:
    if set(found) != set(truth.grads):
        raise _FoundError(
            "wrong", f"gradients of {sorted(set(found) ^ set(truth.grads))} only once"
        )
    for name, want in truth.grads.items():
        _compare(f"gradients of {name}", found[name], want, rows)


def _compare(
    what: str, found: Tensor, want: Tensor, rows: Tensor | None = None, scale: float | None = None
) -> None:
    if found.shape != want.shape:
        raise _FoundError("wrong", f"{what}: shape {tuple(found.shape)}, not {tuple(want.shape)}")
    if not want.numel():
        return
    if rows is not None:
        found, want = found[rows], want[rows]
        if not want.numel():
            return
    scale = max(float(want.abs().max()) if scale is None else scale, 1e-3)
    error = float((found.detach() - want).abs().max()) / scale
    if not error <= (_TOLERANCE if want.dtype is not torch.float32 else 1e-4):
        raise _FoundError("wrong", f"{what}: off by {error:.1e} of the largest entry")


def _state(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Lists tensors and numbers that a model holds: parameters, buffers, gradients, attributes."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers"):
                for key, tensor in value.items():
                    yield f"{path}.{key}", tensor
                    yield f"{path}.{key}.grad", None if tensor is None else tensor.grad
            elif not name.startswith("_") and isinstance(value, int | float | Tensor | list):
                yield f"{path}.{name}", value


def _copied_state(model: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Returns what a model holds, and copies of it."""
    return {
        name: (value, value.detach().clone() if isinstance(value, Tensor) else copy.copy(value))
        for name, value in _state(model)
        if not is_lazy(value)
    }


def _compare_state(plain: nn.Module, model: nn.Module) -> None:
    want, found = dict(_state(plain)), dict(_state(model))
    if want.keys() != found.keys():
        raise _FoundError("state", f"attributes {sorted(want.keys() ^ found.keys())}")
    for name, value in want.items():
        if not _is_same(value, found[name]):
            raise _FoundError("state", f"{name} is not as plain autograd leaves it")


def _compare_after_refusal(before: dict[str, tuple[Any, Any]], model: nn.Module) -> None:
    """Parameters and the statistics of batch norms are as before, if the call was refused."""
    after = dict(_state(model))
    for name, (old, value) in before.items():
        kept = isinstance(old, nn.Parameter) and after.get(name) is old
        kept = kept or name.endswith((".grad", "num_batches_tracked"))
        if kept and not _is_same(value, after.get(name)):
            raise _FoundError("state", f"{name} has changed although the call was refused")


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if type(a) is not type(b) and not isinstance(b, nn.Parameter) and type(b) is not Tensor:
            return False
        return (
            a.shape == b.shape
            and a.dtype == b.dtype
            and bool(torch.allclose(a.detach(), b.detach(), rtol=1e-9, atol=1e-12, equal_nan=True))
        )
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return type(a) is type(b) and bool(a == b)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _described(error: BaseException) -> str:
    return _first_line(error)[:300]


@contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _FoundError("crash", f"it has not ended after {_SECONDS} seconds")

    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
