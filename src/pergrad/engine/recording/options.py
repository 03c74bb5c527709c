"""Holds the options of a recording, checked once, and chooses parameters by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from torch import Tensor, nn

from pergrad.engine.recording.owning import Ownership, OwnersOption, ownership_of
from pergrad.errors import BatchSizeError, PergradError

if TYPE_CHECKING:
    from typing import TypedDict

__all__ = ["DEFAULT", "Calls", "LossReduction", "Options", "Owners", "Params"]

LossReduction: TypeAlias = Literal["auto", "sum", "mean"]
Calls: TypeAlias = Literal["same", "more"]
Owners: TypeAlias = OwnersOption | Callable[..., OwnersOption]
Params: TypeAlias = str | Tensor | Iterable[str | Tensor]
_REDUCTIONS: tuple[LossReduction, ...] = get_args(LossReduction)

if TYPE_CHECKING:

    class RecordOptions(TypedDict, total=False):
        """The options as keyword arguments."""

        batch_size: int | None
        loss_reduction: LossReduction
        batch_first: bool
        params: Params | None
        sample_weights: Tensor | None
        max_bytes: int | None
        offload: bool
        owners: Owners | None
        loss_scale: float | Tensor | None


@dataclass(frozen=True)
class Options:
    """The options of a recording; see `pergrad.record`."""

    batch_size: int | None = None
    loss_reduction: LossReduction = "auto"
    batch_first: bool = True
    params: Params | None = None
    sample_weights: Tensor | None = None
    max_bytes: int | None = None
    offload: bool = False
    keep_grad: bool = False
    owners: Owners | None = None
    loss_scale: float | Tensor | None = None
    calls: Calls | None = None
    batch_dim: int = field(init=False)  # of the samples in the inputs
    ownership: Ownership | None = field(init=False, default=None)  # what `owners` says
    is_scaled: bool = field(init=False)  # whether `scale` may be anything but 1

    @classmethod
    def from_call(cls, function: str, given: Mapping[str, Any]) -> Options:
        """Makes the options that a function was called with; names those there are if one is unknown."""
        known = [own.name for own in fields(cls) if own.init]
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None:
            raise TypeError(
                f"{function}() got an unexpected keyword argument {unknown!r}. Options are "
                f"{', '.join(known)}; arguments of loss_fn are passed by position"
            )
        return cls(**given)

    def __post_init__(self) -> None:
        """Refuses wrong batch sizes and reductions, in the words of PyTorch's own checks."""
        size: Any = self.batch_size
        object.__setattr__(self, "batch_dim", 0 if self.batch_first else 1)  # it is frozen
        is_scaled = self.loss_reduction == "mean" or self.sample_weights is not None
        object.__setattr__(self, "is_scaled", is_scaled)
        if self.loss_reduction not in _REDUCTIONS:
            raise PergradError(
                f"Expected loss_reduction argument to be {', '.join(_REDUCTIONS[:-1])} or {_REDUCTIONS[-1]}, "
                f"got {self.loss_reduction}"
            )
        if self.calls is not None and self.calls not in get_args(Calls):
            allowed = " or ".join(map(repr, get_args(Calls)))
            raise PergradError(f"calls must be {allowed}, got {self.calls!r}")
        given = self.loss_scale
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        if given is not None and not (is_number or (isinstance(given, Tensor) and not given.dim())):
            raise PergradError(f"loss_scale must be a number or a 0-dim tensor, got {given!r}")
        if is_number and not (0 < given < float("inf")):  # type: ignore[operator]
            raise PergradError(f"loss_scale must be positive and finite, got {given!r}")
        if size is not None and not isinstance(size, int):
            raise BatchSizeError(
                f"Batch size passed must be None or an integer, got {type(size).__name__}"
            )
        if size is not None and size < 1:
            raise BatchSizeError(f"Batch size must be positive, got {size}")
        if self.owners is not None:
            if not self.batch_first:
                raise BatchSizeError(
                    "owners= says where the samples are, so batch_first=False has no meaning: leave it out"
                )
            if not callable(self.owners):
                object.__setattr__(self, "ownership", ownership_of(self.owners, size))
        if self.max_bytes is not None and self.max_bytes < 1:
            raise PergradError(f"max_bytes must be positive, got {self.max_bytes}")

    def of(self, batch: Sequence[Any]) -> Options:
        """Returns the options of one batch: where `owners` is a function, with its result."""
        if not callable(self.owners):
            return self
        return replace(self, owners=self.owners(*batch))

    def scale(
        self, size: int, is_mean: bool | None = None, factors: Iterable[float | Tensor] = ()
    ) -> Tensor | float:
        """The factor of each sample's gradient: B for a mean loss, times the user's sample weights.

        It undoes factors on the whole loss, too.
        """
        is_mean = self.loss_reduction == "mean" if is_mean is None else is_mean
        undone: float | Tensor = float(size) if is_mean else 1.0
        for factor in factors:
            undone = undone / (factor.detach() if isinstance(factor, Tensor) else factor)
        if self.sample_weights is None:
            return undone.expand(size) if isinstance(undone, Tensor) else undone
        if self.sample_weights.shape != (size,):
            raise BatchSizeError(
                f"sample_weights must have one weight for each of {size} samples, got shape "
                f"{tuple(self.sample_weights.shape)}"
            )
        return self.sample_weights.detach() * undone

    def chosen(self, module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Chooses the trainable parameters that `params` asks for."""
        if self.params is None:
            return dict(weights)
        asked = [self.params] if isinstance(self.params, str | Tensor) else list(self.params)
        aliases: dict[int, list[str]] = {}  # a tied weight has several names
        for name, p in module.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(p), []).append(name)
        if not asked:
            raise PergradError(f"params is empty: choose some of {list(weights)}")
        found: set[str] = set()
        for wanted in asked:
            matching = {
                name
                for name, p in weights.items()
                if (p is wanted)
                or (
                    isinstance(wanted, str)
                    and any(fnmatchcase(alias, wanted) for alias in aliases[id(p)])
                )
            }
            if not matching:
                what = f"pattern {wanted!r}" if isinstance(wanted, str) else "tensor"
                raise PergradError(
                    f"params: the {what} matches no trainable parameter of the module; there are "
                    f"{list(weights)}"
                )
            found |= matching
        return {name: p for name, p in weights.items() if name in found}


DEFAULT = Options()  # one object for all recordings without options, since they are frozen
