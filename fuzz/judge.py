"""Judges a program: runs it plainly and by pergrad, and compares gradients, norms, sums and state."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import pergrad
from fuzz import functions
from fuzz.comparing import (
    BOUND,
    FoundError,
    Outcome,
    Truth,
    compare,
    compare_after_refusal,
    compare_all,
    compare_grads,
    compare_state,
    copied_state,
)
from fuzz.programs import Program

__all__ = ["judge"]

_SECONDS = 120


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
    except FoundError as found:
        return found.outcome
    finally:
        space.get("after", lambda model: None)(None)
        if 12 in program.classes:
            torch.compiler.reset()
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)


class _Trial:
    def __init__(self, program: Program, space: dict[str, Any]) -> None:
        self.program = program
        self.space = space
        self.seed = program.seed
        self.turn = 0
        self.loss_fn = space["loss_fn"]

    # -- modes

    def eager(self) -> Outcome:
        plain, model = self._models()
        certificate = ""
        # Whose gradient is whose is told by the losses, if samples meet or are put in another order.
        chosen = ("grads", "grads") if self.program.mixes else None
        for turn, quantities in enumerate(chosen or (self.program.first, self.program.second)):
            self.turn = turn
            for each in (plain, model) if turn else ():
                self._pass_on(each)
            spoil = self.program.nan_first and not turn
            batch = self._batch(turn, spoil)
            before = copied_state(model)
            truth = self._truth(plain, batch, turn)
            if not spoil and not truth.finite.all():
                raise FoundError("invalid", "the gradients are not finite")
            try:
                refusal = self._attempt(model, batch, quantities, truth, turn, before)
            except FoundError as found:
                if found.outcome.kind == "wrong" and self._is_decided_by_rounding(batch):
                    raise FoundError("invalid", "rounding decides the gradients") from found
                if found.outcome.kind == "wrong" and self._is_certified(batch):
                    raise FoundError("certified", f"wrong, but certified: {found}") from found
                raise
            if refusal and spoil:  # the next batch is to be right with another pair of models
                plain, model = self._models()
            elif refusal:
                return self._refused(refusal, batch, quantities, turn)
            else:
                compare_state(plain, model)
            if turn and not spoil and truth.norms.max() > 1e-10:  # else all is rounding
                certificate = self._certificate(batch)
        return Outcome("exact", certificate=certificate)

    def halves(self) -> Outcome:
        """Sums of clipped gradients in bfloat16 keep their bound."""
        model, clipped = self._model(), pergrad.ClippedSum(BOUND)
        batch = tuple(t[:1].expand_as(t).contiguous() for t in self._batch(0))
        self._truth(self._model(), batch, 0)
        try:
            with pergrad.record(model, clipped):
                torch.default_generator.manual_seed(self.seed)
                self.loss_fn(model, *batch).sum().backward()
        except pergrad.PergradError as error:
            return Outcome("refused", _first_line(error))
        except Exception as error:
            raise FoundError("crash", _described(error)) from error
        total = sum(float(t.double().square().sum()) for t in clipped.result.values()) ** 0.5
        most = BOUND * len(clipped.norms)
        if total > most * (1 + 1e-5):
            raise FoundError(
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
                raise FoundError("crash", f"call {turn}: {_described(error)}") from error
            compare_grads(found, truth)
            compare("norms", lengths, truth.norms)
            compare_state(plain, model)
        return Outcome("exact")

    # -- parts

    def _model(self) -> nn.Module:
        torch.default_generator.manual_seed(self.seed)
        try:
            return self.space["Model"]()
        except Exception as error:
            raise FoundError("invalid", _described(error)) from error

    def _pass_on(self, model: nn.Module) -> None:
        """Changes what the program changes between its batches."""
        torch.default_generator.manual_seed(self.seed + 17)
        self.space["between"](model)

    def _models(self) -> tuple[nn.Module, nn.Module]:
        return self._model(), self._model()

    def _batch(self, turn: int, spoil: bool = False) -> tuple[Tensor, ...]:
        torch.default_generator.manual_seed(self.seed + 1 + turn)
        batch = self.space["make_batch"]()
        if spoil:
            batch[0][0] = torch.nan
        return batch

    def _truth(self, model: nn.Module, batch: tuple[Tensor, ...], turn: int) -> Truth:
        """∂ℓ_n/∂w for each n, one backward pass each, by plain autograd."""
        torch.default_generator.manual_seed(self.seed + turn)
        try:
            losses = self.loss_fn(model, *batch)
            self._random_state = torch.get_rng_state()
            named = {name: p for name, p in model.named_parameters() if p.requires_grad}
            if losses.shape != (self.program.sizes.B,):
                raise FoundError("invalid", "there is not one loss for each sample")
            if not named or not losses.requires_grad:
                raise FoundError("invalid", "the losses depend on no parameter")
            rows = [
                torch.autograd.grad(
                    loss, list(named.values()), retain_graph=True, allow_unused=True
                )
                for loss in losses
            ]
        except FoundError:
            raise
        except Exception as error:
            raise FoundError("invalid", _described(error)) from error
        grads = {
            name: torch.stack([torch.zeros_like(p) if r[k] is None else r[k] for r in rows])
            for k, (name, p) in enumerate(named.items())
        }
        return Truth(losses.detach(), grads)

    def _attempt(
        self,
        model: nn.Module,
        batch: tuple[Tensor, ...],
        quantities: str,
        truth: Truth,
        turn: int,
        before: dict[str, tuple[Any, Any]],
    ) -> pergrad.PergradError | None:
        """Runs pergrad and compares; returns its refusal, if any."""
        torch.default_generator.manual_seed(self.seed + turn)
        grads, norms, clipped = pergrad.Grads(), pergrad.Norms(), pergrad.ClippedSum(BOUND)
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
            compare_after_refusal(before, model)
            return error
        except Exception as error:
            raise FoundError("crash", _described(error)) from error
        random_state = torch.get_rng_state()
        lengths = norms.result if quantities in ("sums", "block") else None
        sums = clipped.result if quantities in ("sums", "mean") else None
        try:
            compare_all(found, lengths, sums, truth)
        except FoundError as wrong:
            sample = self._sample_of_each_loss(batch) if self.program.mixes else None
            if sample is None:
                raise
            compare_all(found, lengths, sums, truth.by_sample(sample))
            if not self._has_an_order(batch, sample):
                raise FoundError("invalid", "rounding decides the order of the losses") from wrong
            if quantities == "grads":  # row n is to be the gradient of losses[n]
                raise FoundError(
                    "wrong", "the rows are in another order than the losses"
                ) from wrong
        if not torch.equal(random_state, self._random_state):
            raise FoundError("state", "the generator of random numbers has moved")
        return None

    def _refused(
        self, error: pergrad.PergradError, batch: tuple[Tensor, ...], quantities: str, turn: int
    ) -> Outcome:
        """A batch that is refused after another one with a NaN must be refused by itself too."""
        why = _first_line(error)
        if self.program.nan_first and turn and not self.program.mixes:
            pergrad.runtime.caches.clear_caches()
            plain, model = self._models()
            truth = self._truth(plain, batch, turn)
            if self._attempt(model, batch, quantities, truth, turn, copied_state(model)) is None:
                raise FoundError("poisoned", f"refused after a batch with a NaN: {why}")
        return Outcome("refused", why)

    def _certificate(self, batch: tuple[Tensor, ...]) -> str:
        """Asks for the certificate of the answer, which is right, where there are certificates."""
        certify = getattr(pergrad, "certify", None)
        if certify is None:
            return ""
        model = self._model()
        if self.turn:
            self._pass_on(model)
        torch.default_generator.manual_seed(self.seed + self.turn)  # the answer's random numbers
        try:
            report = certify(model, self.loss_fn, *batch, quiet=True)
        except pergrad.PergradError:
            return "refused"
        except Exception as error:
            raise FoundError("crash", f"certify: {_described(error)}") from error
        if report.ok and self.program.mixes and self._samples_meet(batch):
            raise FoundError("certified", "the certificate passes samples that meet in the forward")
        if not report.ok and not self.program.may_refuse:
            raise FoundError("alarm", f"the certificate rejects a right answer: {report}")
        return "passed" if report.ok else "rejected"

    def _is_certified(self, batch: tuple[Tensor, ...]) -> bool:
        """Whether there is a certificate of an answer that is wrong."""
        certify = getattr(pergrad, "certify", None)
        if certify is None:
            return False
        model = self._model()
        if self.turn:
            self._pass_on(model)
        torch.default_generator.manual_seed(self.seed + self.turn)
        try:
            return bool(certify(model, self.loss_fn, *batch, quiet=True).ok)
        except Exception:  # the answer is wrong anyway
            return False

    def _is_decided_by_rounding(self, batch: tuple[Tensor, ...]) -> bool:
        """Whether changes of the inputs as small as rounding change the gradients by more than the tolerance.

        As where equal numbers are normalised twice: what is left of the first norm is rounding.
        """
        shaken = tuple(
            t * (1 + 1e-15 * torch.randn_like(t)) if t.is_floating_point() else t for t in batch
        )
        truths = []
        for given in (batch, shaken):
            model = self._model()
            if self.turn:
                self._pass_on(model)
            truths.append(self._truth(model, given, self.turn))
        try:
            compare_grads(truths[0].grads, truths[1])
        except FoundError:
            return True
        return False

    def _samples_meet(self, batch: tuple[Tensor, ...]) -> bool:
        """Whether the loss of some sample depends on another one, whichever of the batch is in its place."""
        losses = self._losses(batch)
        count = len(losses)
        for n in range(count):
            moved = torch.ones(count, dtype=torch.bool)
            for donor in set(range(count)) - {n}:
                other = tuple(t.clone() for t in batch)
                for t in other:
                    t[n] = t[donor]
                moved &= (self._losses(other) - losses).abs() > 1e-9
            moved[n] = False
            if moved.any():
                return True
        return False

    def _sample_of_each_loss(self, batch: tuple[Tensor, ...]) -> Tensor | None:
        """Returns the sample that each loss is computed from, if samples are only put in another order.

        A sum of losses does not say which of them is whose: there row n is the gradient of sample n.
        """
        inputs = [t for t in batch if t.is_floating_point()]
        given = [t.clone().requires_grad_() if t.is_floating_point() else t for t in batch]
        leaves = [t for t in given if t.requires_grad]
        losses = self._losses(tuple(given), with_graph=True)
        if not inputs or len(losses) != len(inputs[0]):
            return None
        rows = []
        for loss in losses:
            found = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
            reached = [g.flatten(1).ne(0).any(1) for g in found if g is not None]
            if not reached:
                return None
            rows.append(torch.stack(reached).any(0))
        needs = torch.stack(rows)  # (m, n)
        return needs.long().argmax(1) if bool((needs.sum(1) == 1).all()) else None

    def _has_an_order(self, batch: tuple[Tensor, ...], sample: Tensor) -> bool:
        """Whether changes as small as rounding leave every loss to its sample.

        Samples that are sorted by the sums of a layer norm's outputs, which are zero, come in any order.
        """
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(8):
            moved = tuple(
                t * (1 + 1e-12 * torch.randn(t.shape, generator=generator, dtype=t.dtype))
                if t.is_floating_point()
                else t
                for t in batch
            )
            found = self._sample_of_each_loss(moved)
            if found is None or not torch.equal(found, sample):
                return False
        return True

    def _losses(self, batch: tuple[Tensor, ...], with_graph: bool = False) -> Tensor:
        model = self._model()
        if self.turn:
            self._pass_on(model)
        torch.default_generator.manual_seed(self.seed + self.turn)
        losses = self.loss_fn(model, *batch)
        return losses if with_graph else losses.detach()


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _described(error: BaseException) -> str:
    return _first_line(error)[:300]


@contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise FoundError("crash", f"it has not ended after {_SECONDS} seconds")

    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
