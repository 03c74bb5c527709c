"""Defines `Step`: one private training step, from a batch of the plan to the optimizer's update."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.distributed.sharding import grad_of, is_sharded
from pergrad.distributed.wrappers import refuse_tensor_parallel
from pergrad.errors import PrivacyError
from pergrad.private.drawing.ranks import Ranks
from pergrad.private.drawing.sampling import PlanSampler
from pergrad.private.drawing.streams import Streams, new_key
from pergrad.private.planning.plain import is_real
from pergrad.private.planning.plan import Plan
from pergrad.private.stepping.checks import (
    bare_model,
    bare_optimizer,
    check_modules,
    check_optimizer,
    check_parameters,
    check_trained,
    norms_of_batches,
)
from pergrad.private.stepping.clipping import Bound
from pergrad.private.stepping.guarding import guarded, updating
from pergrad.private.stepping.hashing import hashed
from pergrad.private.stepping.ledger import SEAL_DIFFERS, Ledger
from pergrad.private.stepping.noise import Noise, local_of
from pergrad.private.stepping.pieces import Shared
from pergrad.private.stepping.saving import gathered, loaded, read, write
from pergrad.private.stepping.summing import Backend, NotPrivate, Summation

__all__ = ["Released", "Step"]

_FORMAT = 1  # of `state_dict`


@dataclass(frozen=True)
class Released:
    """What a step makes public: its number, and the budget that is spent.

    spent: the releases so far, which is more than `step` after `Step.renew_noise`.
    """

    step: int
    spent: int
    plan: Plan = field(repr=False)

    @property
    def delta(self) -> float | None:
        return self.plan.delta

    @property
    def epsilon(self) -> float:
        """Epsilon at the plan's delta, counted when it is read."""
        return self.plan.epsilon(steps=self.spent)


def _told(setting: Any) -> Any:
    """Returns a setting of a plan to compare: of bounds by patterns, the first that matches counts."""
    return [*setting.items()] if isinstance(setting, Mapping) else setting


def _numbers(value: Any) -> list[float]:
    """Returns the numbers of a setting, which a checkpoint may have turned into a tensor or a list."""
    if is_real(value) or (isinstance(value, Tensor) and value.numel() == 1):
        return [float(value)]
    if isinstance(value, list | tuple) and not any(isinstance(v, Tensor) for v in value):
        return [number for v in value for number in _numbers(v)]
    return []


class Step:
    """Makes private steps: `step(*batch)` for each batch of the plan's loader.

    A step clips the gradient of each sample, adds them up, writes the ledger, adds noise, divides by the
    plan's expected batch size and calls the optimizer. It returns what is public; `last` holds what is
    not. The first step is certified as `pergrad.certify` does.

    All random numbers of a step, of noise and of dropout, are a function of a secret key and the step's
    number. The key is in `state_dict()`: a checkpoint of a private run is as secret as the data.

    Args:
        model: any module; the parameters that require grad are trained.
        optimizer: any optimizer of `torch.optim` over the model's parameters.
        loss_fn: called as loss_fn(model, *batch); returns the (n,) losses of the samples, not their mean.
        plan: the plan; the batches must come from its loader or its sampler.
        piece_size: the number of samples that are computed at once; the result does not depend on it.
        ledger: a file to which every step is written before it is made.
        generator: for noise that must repeat; by default the system's entropy. Whoever knows it can remove
            the noise.
        cryptographic: draw noise from ChaCha20 and not from torch's generators; slower.
        certify: prove the gradients of the first batch with two samples or more, or raise an error; by
            default wherever parameters are not sharded.
        backend: compile the step: "inductor", or "eager" to trace it only. Batches are cut and padded to
            `piece_size` (by default the plan's `batch_cap`), so that there is one shape; padded rows add
            nothing.
        cuda_graphs: launch the compiled pieces as a CUDA graph, as `pergrad.compiled` does: for a host that
            is slower than the GPU.
        views: loss_fn returns (n, k) losses of k views of each sample, which are averaged before the
            sample's gradient is clipped.
        public_buffers: patterns of names of buffers that the forward pass may change, because they do not
            depend on the data.

    >>> import torch
    >>> from pergrad.private import Plan, Step
    >>> data = torch.utils.data.TensorDataset(torch.randn(100, 4), torch.randn(100))
    >>> plan = Plan(
    ...     noise_multiplier=1.0,
    ...     sample_rate=0.1,
    ...     steps=3,
    ...     max_norm=1.0,
    ...     delta=1e-3,
    ...     expected_batch_size=10,
    ... )
    >>> model = torch.nn.Linear(4, 1)
    >>> step = Step(
    ...     model,
    ...     torch.optim.SGD(model.parameters(), lr=0.1),
    ...     lambda model, x, y: (model(x)[:, 0] - y).square(),
    ...     plan,
    ... )
    >>> for x, y in plan.loader(data):
    ...     released = step(x, y)
    >>> print(released, f"epsilon {released.epsilon:.2f}")
    Released(step=3, spent=3) epsilon 0.98
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., Tensor],
        plan: Plan,
        piece_size: int | None = None,
        *,
        ledger: str | os.PathLike[str] | None = None,
        generator: torch.Generator | None = None,
        cryptographic: bool = False,
        certify: bool | None = None,
        backend: Backend | None = None,
        cuda_graphs: bool = False,
        views: bool = False,
        public_buffers: Iterable[str] = (),
    ) -> None:
        if not isinstance(model, nn.Module):
            raise PrivacyError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(plan, Plan):
            raise PrivacyError(f"plan must be a Plan, got {type(plan).__name__}")
        if not callable(loss_fn):
            raise PrivacyError("loss_fn must be a function, called as loss_fn(model, *batch)")
        if plan.expected_batch_size is None:
            raise PrivacyError(
                "the plan has no expected_batch_size: the noisy sum is divided by this public number, never "
                "by the batch that was drawn; pass it, or the population, to the plan"
            )
        model, optimizer = bare_model(model), bare_optimizer(optimizer)
        check_optimizer(optimizer, model)
        self._norms = norms_of_batches(model)
        check_modules(self._norms)
        self._ranks = Ranks()
        check_parameters(model, self._ranks)
        self._model, self._optimizer, self._plan = model, optimizer, plan
        self._divisor = float(plan.expected_batch_size)
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        refuse_tensor_parallel(model, "pergrad.private.Step")
        self._is_sharded = any(is_sharded(p) for p in model.parameters())
        if self._is_sharded and (backend is not None or plan.bands > 1):
            raise PrivacyError(
                "parameters are sharded over ranks, for which steps are neither compiled nor given "
                "correlated noise: use backend=None and bands=1, or replicate the model"
            )
        prefix = Summation.PREFIX if views else ""
        self._bound = Bound(plan, self._names, is_fixed=backend is not None, prefix=prefix)
        if backend is not None and piece_size is None:
            piece_size = plan.batch_cap
        self._summation = Summation(
            model,
            loss_fn,
            self._bound.clipped_sum,
            piece_size=piece_size,
            backend=backend,
            cuda_graphs=cuda_graphs,
            certify=not self._is_sharded if certify is None else certify,
            views=views,
            public_buffers=public_buffers,
        )
        self._cryptographic = cryptographic
        self._key = b""
        self._loaded: str | None = None  # the code of the parameters that belong to a loaded state
        self._turn = [True]  # taken by the thread that makes a step
        self._set_key(self._ranks.shared(new_key(generator)))
        self._ledger = Ledger(ledger) if ledger is not None and self._ranks.rank == 0 else None
        self._sampler: PlanSampler | None = None
        self._number = 0  # steps made
        self._renewed = 0  # releases that were made again with new noise
        self.last: NotPrivate | None = None  # numbers of the last batch; not private
        weakref.finalize(self, guarded(optimizer).remove)

    def _set_key(self, key: bytes) -> None:
        if key != self._key:
            self._released: dict[int, str] = {}  # seals of this process's releases, by their number
        self._key = key
        self._streams = Streams(key, cryptographic=self._cryptographic)
        self._noise = Noise(self._plan, self._streams)

    def __repr__(self) -> str:
        return f"Step({self._number} of {self._plan.steps} steps made, {self._plan})"

    @property
    def number(self) -> int:
        """The number of steps made so far."""
        return self._number

    @property
    def spent(self) -> int:
        """The number of releases so far: what the account counts."""
        return self._number + self._renewed

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    @property
    def is_certified(self) -> bool:
        """Whether the gradients of a first batch have been proved."""
        return self._summation.is_certified

    # -- one step

    def __call__(self, *batch: Any) -> Released:
        """Makes one step with a batch of the plan's loader; returns what is public about it."""
        try:
            turn = self._turn.pop()
        except IndexError:
            raise PrivacyError(
                "another thread is in the middle of this step: make steps one after the other"
            ) from None
        try:
            return self._made(batch)
        finally:
            self._turn.append(turn)

    def _made(self, batch: tuple[Any, ...]) -> Released:
        if self.spent >= self._plan.steps:
            raise PrivacyError(
                f"the plan has {self._plan.steps} steps, and all of them are spent: a further one would not "
                "be accounted for; make a plan with more"
            )
        if not torch.is_grad_enabled():
            raise PrivacyError(
                "gradients are switched off (torch.no_grad or inference_mode), so there are none to clip: "
                "make the step outside of that block"
            )
        check_modules(self._norms)
        check_trained(self._optimizer, self._model, self._names)
        sampler = self._bound_sampler()
        size = sampler.take(self.spent)
        seed = self._streams.seed(f"model {self._ranks.rank}", self.spent, count=12)
        sums, self.last = self._summation(batch, size, seed)
        count = self._bound.centred_count(self.last.norms)
        # Sums of sharded parameters are over all ranks already.
        self._ranks.add_up([count] if self._is_sharded else [*sums.values(), count])
        self._check_model()
        self._write(self._seal(sums, count), count.device)
        self._update(sums, count)
        sampler.used(self.spent)
        self._number += 1
        return Released(self._number, self.spent, self._plan)

    def _bound_sampler(self) -> PlanSampler:
        newest = self._plan.run.sampler
        if newest is None:
            raise PrivacyError(
                "this batch does not come from the plan's sampler, so the account would not hold: take it "
                "from plan.loader(dataset)"
            )
        if self._sampler is not None and newest is not self._sampler:
            raise PrivacyError(
                "the plan has made another loader during this run, whose batches are others: use one loader; "
                "steps_per_epoch lets it be iterated in parts"
            )
        is_new = newest is not self._sampler
        if is_new and self._ranks.count > 1 and not self._ranks.agree(newest.data_seal()):
            raise PrivacyError(
                "the ranks have different data sets: give the whole one to plan.loader on all of them, which "
                "shares each batch out between the ranks"
            )
        self._sampler = newest
        return newest

    def _write(self, seal: str, device: torch.device) -> None:
        """Writes the ledger, before anything changes."""
        if self._released.setdefault(self.spent, seal) != seal:
            raise PrivacyError(SEAL_DIFFERS.format(number=self.spent))
        error: PrivacyError | None = None
        if self._ledger is not None:
            try:
                self._ledger.begin(self._head())
                self._ledger.write(self.spent, seal)
            except PrivacyError as found:
                error = found
        if self._ranks.any(error is not None, device):
            raise error or PrivacyError("the first rank could not write the ledger")

    def _check_model(self) -> None:
        """Refuses to go on from a state with parameters that are not of its moment.

        Their sums are others, and the noise is that of the state. A ledger sees this by its codes.
        """
        loaded, self._loaded = self._loaded, None
        if self._ledger is None and loaded not in (None, self._parameters_seal()):
            self._loaded = loaded
            raise PrivacyError(
                "the model is not the one that this run's state was taken with, and the noise of its next "
                "steps may have been used: load the model of the same moment (step.save and step.load keep "
                "both), or keep a ledger"
            )

    def _parameters_seal(self) -> str | None:
        """Returns a code of the parameters; None where no rank has them whole."""
        if self._is_sharded:
            return None
        parts = [int(hashed(p)) for p in self._model.parameters()]
        return hashlib.blake2b(f"{parts}".encode(), key=self._key, digest_size=8).hexdigest()

    def _head(self) -> dict[str, Any]:
        assert self._sampler is not None
        return {
            "plan": self._plan.state_dict(),
            "data": self._sampler.data_seal(),
            "run": self._streams.seed("run", count=8).hex(),
        }

    def _seal(self, sums: Mapping[str, Tensor], count: Tensor) -> str:
        """Returns a code of all that a release is made from; it tells nothing without the key.

        It is the same on all ranks. It tells whether a step that is made again is the same one.
        """
        parts = [local_of(t) for t in (*sums.values(), count)]
        hashes = torch.stack([hashed(t).to(count.device) for t in parts])
        told = f"{self._number} {self._run()} {self._ranks.gathered(hashes).tolist()}".encode()
        return hashlib.blake2b(told, key=self._key, digest_size=8).hexdigest()

    def _scale(self) -> float:
        """Returns the standard deviation of the noise on a sum."""
        return self._plan.gradient_noise_multiplier * self._bound.sensitivity

    def _run(self) -> str:
        """Names what the noise is for: the batches, its size, and how the optimizer uses them.

        A run that goes back to a checkpoint and on with another learning rate has other sums there, and the
        same noise on both would reveal their difference.
        """
        assert self._sampler is not None
        settings = [
            (name, number)
            for group in self._optimizer.param_groups
            for name, value in sorted(group.items())
            for number in _numbers(value)
        ]
        batches = self._sampler.streams.seed("batches", count=16).hex()
        return f"{batches} {self._scale()!r} {settings}"

    def _update(self, sums: Mapping[str, Tensor], count: Tensor) -> None:
        run = self._run()
        noisy = self._noise.added(sums, self.spent, self._scale(), run)
        parameters = dict(self._model.named_parameters())
        self._forget_gradients()  # an ordinary one, of before, would be applied as it is
        try:
            for name, total in noisy.items():
                p = parameters[name]
                local_of(total).div_(self._divisor)
                p.grad = grad_of(p, total) if is_sharded(p) else total.to(p.dtype)
            with updating(self._optimizer):
                self._optimizer.step()
        finally:
            self._forget_gradients()
        self._noise.commit()
        self._bound.move(count, self._streams(f"count {run}", self.spent))

    def _forget_gradients(self) -> None:
        for p in self._model.parameters():
            p.grad = None

    def clipped_sums(self, *batch: Tensor) -> dict[str, Tensor]:
        """Returns the clipped sums of any batch, without noise: to test, never to publish."""
        size = len(batch[0])
        return self._summation(batch, size, bytes(12))[0]

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the run, with its keys: as secret as the data.

        It does not hold the model and the optimizer: save all three in one file, or call `save`.
        """
        run = self._plan.run
        return {
            "format": _FORMAT,
            "plan": self._plan.state_dict(),
            "key": self._key.hex(),
            "cryptographic": self._cryptographic,
            "number": self._number,
            "renewed": self._renewed,
            "certified": self.is_certified,
            "shared": sorted(self._summation.shared.places),
            "noise": self._noise.state_dict(),
            "bound": self._bound.state_dict(),
            "sampler": run.resumed if run.sampler is None else run.sampler.state_dict(),
            "parameters": self._parameters_seal(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where a state was taken; refuses another plan and another data set."""
        if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
            raise PrivacyError("this is not the state of a private step")
        if {*self.state_dict()} - {*state, "parameters", "shared"} or not isinstance(
            state["plan"], Mapping
        ):
            raise PrivacyError("this state of a private step is not complete")
        mine = self._plan.state_dict()
        changed = [name for name in mine if _told(mine[name]) != _told(state["plan"].get(name))]
        if changed:
            was = ", ".join(f"{name} was {state['plan'].get(name)!r}" for name in changed)
            raise PrivacyError(
                f"the plan has changed since this state was taken ({was}): an account holds for one plan; "
                "resume with the same"
            )
        if state["cryptographic"] != self._cryptographic:
            raise PrivacyError(
                f"the run began with cryptographic={state['cryptographic']} noise: make the Step with the "
                "same value"
            )
        if state["sampler"] is not None:
            self._plan.run.resume(state["sampler"])
        self._sampler = None
        self._set_key(bytes.fromhex(state["key"]))
        self._number, self._renewed = int(state["number"]), int(state["renewed"])
        if self._renewed:  # earlier states count the batches of such a run from its steps
            self._plan.run.move_to(self.spent)
        self._summation.is_certified = bool(state["certified"])
        self._summation.shared = Shared(state.get("shared", ()))
        self._noise.load_state_dict(state["noise"], dict(self._model.named_parameters()))
        self._bound.load_state_dict(state["bound"])
        self._loaded = state.get("parameters")

    def save(self, path: str | os.PathLike[str], **others: Any) -> None:
        """Writes model, optimizer and step into one file, which is complete or as it was before.

        Args:
            path: the file; it holds the keys of the noise, so keep it as secret as the data.
            others: further objects with `state_dict()`, such as scheduler=...
        """
        if self._plan.run.sampler is None and self._plan.run.resumed is None:
            raise PrivacyError(
                "the run has no batches yet, and a checkpoint must hold their key: make the loader before "
                "you save"
            )
        model, optimizer = gathered(self._model, self._optimizer)  # on all ranks
        if self._ranks.rank == 0:
            more = {name: part.state_dict() for name, part in {"step": self, **others}.items()}
            write(path, {"model": model, "optimizer": optimizer, **more})

    def load(self, path: str | os.PathLike[str], **others: Any) -> None:
        """Reads what `save` has written."""
        states = read(path, {"model", "optimizer", "step", *others}, self._device)
        self.load_state_dict(states["step"])  # refuses before anything is changed
        loaded(self._model, self._optimizer, states)
        for name, part in others.items():
            part.load_state_dict(states[name])

    def renew_noise(self) -> None:
        """Goes on with new batches and new noise after the steps that the ledger has and this state has not.

        For a run that cannot repeat its steps bit for bit, such as one on a GPU without deterministic
        algorithms. What it has released stays counted, and the next step takes the batch behind it: the same
        batch released twice would tell more than two batches. Iterate the loader again.
        """
        if self._plan.bands > 1:
            raise PrivacyError("correlated noise cannot be renewed: begin a new run")
        has_ledger = self._ranks.any(self._ledger is not None, self._device)
        known = max(self._released, default=-1) + 1
        if self._ledger is not None:
            known = len(self._ledger.seals)
        known = self._ranks.most(known, self._device)
        if not has_ledger and known <= self._number:
            raise PrivacyError("only a run with a ledger knows which steps were released before")
        self._renewed = max(self._renewed, known - self._number)
        self._plan.run.move_to(self.spent)
