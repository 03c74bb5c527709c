"""Draws the batches of a plan, and remembers which of them a step may use."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler

from pergrad.errors import PrivacyError
from pergrad.private.drawing.fingerprint import fingerprint_of
from pergrad.private.drawing.ranks import Ranks
from pergrad.private.drawing.scheme import Scheme
from pergrad.private.drawing.streams import Stream, Streams, new_key
from pergrad.private.planning.plain import is_integer

__all__ = ["PlanSampler", "Run", "poisson_indices"]


class Run:
    """Ties the sampler of a plan to the step that uses it, and to the state that it resumes from."""

    def __init__(self) -> None:
        self.sampler: PlanSampler | None = None
        self.resumed: Mapping[str, Any] | None = None  # for a sampler that is made later

    def sampler_of(
        self,
        scheme: Scheme,
        dataset: Any,
        generator: torch.Generator | None,
        *,
        cryptographic: bool = False,
        steps_per_epoch: int | None = None,
    ) -> PlanSampler:
        sampler = PlanSampler(
            scheme,
            dataset,
            generator,
            cryptographic=cryptographic,
            steps_per_epoch=steps_per_epoch,
        )
        if self.resumed is not None:
            sampler.load_state_dict(self.resumed)
            self.resumed = None
        self.sampler = sampler
        return sampler

    def resume(self, state: Mapping[str, Any]) -> None:
        if self.sampler is None:
            self.resumed = state
        else:
            self.sampler.load_state_dict(state)

    def move_to(self, number: int) -> None:
        """Goes on with batch `number`."""
        if self.sampler is not None:
            self.sampler.move_to(number)
        elif self.resumed is not None:
            self.resumed = {**self.resumed, "done": number}

    def __deepcopy__(self, memo: Any) -> Run:
        return Run()  # a copy of a plan is the plan of another run

    def __reduce__(self) -> tuple[type[Run], tuple[()]]:
        return Run, ()


class PlanSampler(Sampler[list[int]]):
    """Yields the batches of a plan as lists of indices: a batch sampler for any map-style data set.

    Batch k is a function of the key and of k. An iteration starts at the first batch that no step has used.
    """

    def __init__(
        self,
        scheme: Scheme,
        dataset: Any,
        generator: torch.Generator | None,
        *,
        cryptographic: bool,
        steps_per_epoch: int | None,
    ) -> None:
        size = _length_of(dataset)
        _check_size(scheme, size)
        if steps_per_epoch is not None and not (
            is_integer(steps_per_epoch) and steps_per_epoch > 0
        ):
            raise PrivacyError(
                f"steps_per_epoch must be a positive integer, got {steps_per_epoch!r}"
            )
        self.ranks = Ranks()
        self._scheme, self.size = scheme, size
        self._cryptographic = cryptographic
        self._steps_per_epoch = None if steps_per_epoch is None else int(steps_per_epoch)
        self._dataset = dataset
        self._fingerprint: str | None = None
        self._set_key(self.ranks.shared(new_key(generator)))
        self.done = 0  # batches that steps have used
        self._drawn: deque[tuple[int, int]] = deque()  # (number, size) of batches on their way
        self._iteration = 0  # the newest one, whose batches these are
        self.handed_out: int | None = None  # the last batch that a `PlanLoader` gave

    def _set_key(self, key: bytes) -> None:
        self._key = key
        self.streams = Streams(key, cryptographic=self._cryptographic)
        self._groups: list[Tensor] | None = None
        self._shuffled: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return self._scheme.steps if self._steps_per_epoch is None else self._steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        self._begin()
        mine, first = self._iteration, self.done
        last = self._scheme.steps
        if self._steps_per_epoch is not None:
            last = min(last, first + self._steps_per_epoch)
        for number in range(first, last):
            if self._iteration != mine:
                raise PrivacyError(
                    "the plan's sampler was iterated again or moved, so these batches are no longer the next "
                    "ones: take them from the newest iteration of the loader"
                )
            indices = self.drawn(number)
            self._drawn.append((number, len(indices)))
            yield indices

    def _begin(self) -> None:
        """Forgets the batches that are on their way."""
        self._drawn.clear()
        self.handed_out = None
        self._iteration += 1

    def drawn(self, number: int) -> list[int]:
        """Returns the indices of batch `number`: this rank's share of them."""
        scheme, stream = self._scheme, self.streams("batch", number)
        if scheme.sampling == "shuffled":
            found = self._of_pass(number)
        elif scheme.bands > 1:
            group = self._group(number % scheme.bands)
            found = group[poisson_indices(stream, len(group), scheme.bands * scheme.rate)]
        else:
            found = poisson_indices(stream, self.size, scheme.rate)
            if scheme.cap is not None and len(found) > scheme.cap:
                kept = stream.uniforms(len(found)).argsort()[: scheme.cap]
                found = found[kept.sort().values]
        return found[self.ranks.rank :: self.ranks.count].tolist()

    def _of_pass(self, number: int) -> Tensor:
        size, per_pass = self._scheme.batch_size or 0, self._scheme.steps_of_a_pass
        turn, place = divmod(number, per_pass)
        if self._shuffled is None or self._shuffled[0] != turn:
            order = self.streams("pass", turn).uniforms(self.size).argsort()
            self._shuffled = (turn, order)
        return self._shuffled[1][place * size : (place + 1) * size]

    def _group(self, number: int) -> Tensor:
        """Returns the records of a group; each record is in one, independently of the others."""
        if self._groups is None:
            bands = self._scheme.bands
            of_record = (self.streams("groups").uniforms(self.size) * bands).long()
            self._groups = [(of_record == k).nonzero()[:, 0] for k in range(bands)]
        return self._groups[number]

    # -- what a step asks

    def take(self, number: int) -> int:
        """Returns the size of batch `number`, which a step is about to use."""
        if self.handed_out is not None and self.handed_out != number:
            raise PrivacyError(
                f"step {number} got batch {self.handed_out} of the plan's loader: every batch takes one "
                "step, empty ones too; iterate the loader again to go on"
            )
        while self._drawn and self._drawn[0][0] < number:
            self._drawn.popleft()
        if not self._drawn or self._drawn[0][0] != number:
            raise PrivacyError(
                f"step {number} got a batch that the plan's sampler did not draw: take batches from "
                "plan.loader(dataset), one for each step"
            )
        return self._drawn[0][1]

    def used(self, number: int) -> None:
        self.done = number + 1
        self._drawn.popleft()

    def move_to(self, number: int) -> None:
        """Goes on with batch `number`: those on their way are no longer taken."""
        if number != self.done:
            self.done = number
            self._begin()

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the key, the position and the data set's fingerprint: secret, as the key is."""
        return {
            "key": self._key.hex(),
            "cryptographic": self._cryptographic,
            "done": self.done,
            "data": self._data(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["data"] != self._data():
            raise PrivacyError(
                "the data set is not the one that this run began with: its length or its samples differ; "
                "resume with the same data, or begin a new run"
            )
        if state["cryptographic"] != self._cryptographic:
            raise PrivacyError(
                f"the run began with cryptographic={state['cryptographic']} batches: make its loader with "
                "the same value"
            )
        self._set_key(bytes.fromhex(state["key"]))
        self.done = int(state["done"])
        self._begin()

    def _data(self) -> str:
        if self._fingerprint is None:
            self._fingerprint = fingerprint_of(self._dataset, self.size)
        return self._fingerprint

    def data_seal(self) -> str:
        """Returns a code of the data set that tells nothing without the key."""
        sealed = hashlib.blake2b(self._data().encode(), key=self._key, digest_size=8)
        return sealed.hexdigest()


def poisson_indices(stream: Stream, size: int, rate: float) -> Tensor:
    """Returns the indices below `size` that are in, each with probability `rate` by itself, ascending.

    Gaps between them are geometric: ⌊log u / log(1 - rate)⌋, which is exact down to the smallest rates and
    takes size · rate numbers rather than size.
    """
    if rate >= 1:
        return torch.arange(size)
    expected = size * rate
    block = int(expected + 6 * math.sqrt(expected) + 16)
    last, found = -1.0, []
    while last < size:
        chances = 1 - stream.uniforms(block)  # in (0, 1]
        gaps = (chances.log() / math.log1p(-rate)).floor().clamp(max=size) + 1
        places = last + gaps.cumsum(0)
        found.append(places[places < size])
        last = float(places[-1])
    return torch.cat(found).long()


def _length_of(dataset: Any) -> int:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise PrivacyError(
            f"{type(dataset).__name__} cannot be indexed: the sampler draws records by their index, so the "
            "data set must be a map-style one"
        )
    try:
        return len(dataset)
    except TypeError:
        raise PrivacyError(f"{type(dataset).__name__} has no length: define __len__") from None


def _check_size(scheme: Scheme, size: int) -> None:
    if scheme.sampling in ("truncated", "shuffled") and size != scheme.population:
        raise PrivacyError(
            f"the plan accounts for a population of {scheme.population}, and the data set has another number "
            f"of records: make the plan for it"
        )
    if scheme.delta is not None and scheme.delta * size >= 1:
        raise PrivacyError(
            f"delta = {scheme.delta:g} is not below one over the number of records: make the plan with a "
            "smaller one"
        )
