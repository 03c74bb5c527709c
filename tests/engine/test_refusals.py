"""Models without per-sample gradients are refused in one clear sentence, and no state is left."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import pergrad
from pergrad.errors import MixedSamplesError, PergradError, UnseenUseError
from pergrad.testing import loop_grads
from tests.engine.exactness import Formula, assert_all_near, numbers, state_of, total

B = T = D = 4

Loss = Callable[..., Tensor]


def plain(model: Callable[..., Any], x: Tensor) -> Tensor:
    return total(model(x))


def between(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """A linear layer, the function, a linear layer."""
    return lambda: Formula(lambda m, x: m.b(function(m.a(x))), a=nn.Linear(D, D), b=nn.Linear(D, 3))


@dataclass(frozen=True)
class Refusal:
    """A model and a loss that are refused, and the pieces of what is said."""

    build: Callable[[], nn.Module]
    pieces: tuple[str, ...]
    loss: Loss = plain
    shape: tuple[int, ...] = (B, D)
    error: type[PergradError] = PergradError


def normed(norm: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(D, D), copy.deepcopy(norm), nn.Linear(D, 3))


def contrastive(model: Callable[..., Tensor], x: Tensor) -> Tensor:
    z = F.normalize(model(x), dim=-1)
    return F.cross_entropy(z @ z.t(), torch.arange(len(x)), reduction="sum")


def rolled(compare: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """Each sample's output is compared with its neighbour's."""
    return lambda model, x: compare(z := model(x), z.roll(1, 0)).sum()


NEIGHBOURS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "difference": lambda z, other: (z - other).square(),
    "pairwise_distance": F.pairwise_distance,
    "cosine_similarity": F.cosine_similarity,
    "dot product": lambda z, other: torch.einsum("nd,nd->n", z, other),
    "triplet": lambda z, other: F.triplet_margin_loss(
        z, other, z.roll(2, 0), 9.0, reduction="none"
    ),
    "ranking": lambda z, other: F.margin_ranking_loss(
        z.sum(1), other.sum(1), torch.ones(B), 9.0, reduction="sum"
    ),
    "cosine": lambda z, other: F.cosine_embedding_loss(z, other, -torch.ones(B), -1.0),
}


def variance(model: Callable[..., Tensor], x: Tensor) -> Tensor:
    return model(x).var(0).sum()


def squared_sum(model: Callable[..., Tensor], x: Tensor) -> Tensor:
    return model(x).sum() ** 2


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3)).double()


MIXING_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(0),
    "mean, kept": lambda x: x - x.mean(0, keepdim=True),
    "mean over everything": lambda x: x - x.mean(),
    "standardised": lambda x: (x - x.mean(0)) / (x.std(0) + 1),
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(-2),
    "norm": lambda x: x / x.norm(),
    "largest": lambda x: x / x.abs().amax(),
    "cumsum": lambda x: x.cumsum(0),
    "similarity": lambda x: x @ x.t() @ x,
    "attention over the batch": lambda x: F.scaled_dot_product_attention(x, x, x),
    "neighbour": lambda x: x + x.roll(1, 0),
    "reversed": lambda x: x + x.flip(0),
    "permuted": lambda x: 0.3 * x + 0.7 * x[torch.tensor([1, 0, 3, 2])],
    "difference": lambda x: F.pad(x[1:] - x[:-1], (0, 0, 1, 0)),
    "first sample": lambda x: x - x[0],
    "distances": lambda x: torch.cdist(x, x),
    "covariance": lambda x: x @ torch.cov(x.t()),
    "einsum": lambda x: torch.einsum("nd,md->nm", x, x) @ x,
    "transposed": lambda x: x.t() @ x @ x.t(),
    "reshaped across samples": lambda x: x.t().reshape(2, -1).cumsum(1).reshape(D, B).t(),
}

REFUSALS: dict[str, Refusal] = {
    **{
        f"mixed by {name}": Refusal(between(function), (), error=MixedSamplesError)
        for name, function in MIXING_FUNCTIONS.items()
    },
    "contrastive loss": Refusal(two_layers, (), contrastive, error=MixedSamplesError),
    **{
        f"{name} of neighbours": Refusal(two_layers, (), rolled(f), error=MixedSamplesError)
        for name, f in NEIGHBOURS.items()
    },
    "variance as loss": Refusal(two_layers, (), variance, error=MixedSamplesError),
    "squared sum as loss": Refusal(two_layers, (), squared_sum, error=MixedSamplesError),
    "BatchNorm1d": Refusal(normed(nn.BatchNorm1d(D)), ("BatchNorm", "GroupNorm")),
    "BatchNorm1d, not affine": Refusal(
        normed(nn.BatchNorm1d(D, affine=False)), ("BatchNorm", "GroupNorm")
    ),
    "BatchNorm1d, no statistics, eval": Refusal(
        lambda: normed(nn.BatchNorm1d(D, track_running_stats=False))().eval(),
        ("BatchNorm", "GroupNorm"),
    ),
    "BatchNorm1d, frozen": Refusal(
        lambda: normed(nn.BatchNorm1d(D).requires_grad_(False))(), ("BatchNorm", "GroupNorm")
    ),
    "BatchNorm1d, momentum None": Refusal(
        normed(nn.BatchNorm1d(D, momentum=None)), ("BatchNorm", "GroupNorm")
    ),
    "BatchNorm2d": Refusal(
        lambda: nn.Sequential(nn.Conv2d(D, 3, 1), nn.BatchNorm2d(3)),
        ("BatchNorm", "GroupNorm"),
        shape=(B, D, 3, 3),
    ),
    "BatchNorm3d alone": Refusal(
        lambda: nn.BatchNorm3d(D), ("BatchNorm", "GroupNorm"), shape=(B, D, 2, 2, 2)
    ),
    "functional batch_norm": Refusal(
        lambda: Formula(
            lambda m, x: F.batch_norm(x @ m.w, None, None, m.g, training=True),
            w=numbers(D, D),
            g=numbers(D),
        ),
        ("BatchNorm", "GroupNorm"),
    ),
    "penalty": Refusal(
        two_layers,
        ("penalty",),
        lambda m, x: plain(m, x) + 0.1 * sum(p.pow(2).sum() for p in m.parameters()),
    ),
    "penalty by norm": Refusal(
        two_layers, ("penalty",), lambda m, x: plain(m, x) + m[0].weight.norm()
    ),
    "meta device": Refusal(lambda: nn.Linear(D, 3, device="meta"), ("meta", "to_empty")),
    "DataParallel": Refusal(lambda: nn.DataParallel(two_layers()), ("DataParallel", "module")),
    "DataParallel inside": Refusal(
        lambda: nn.Sequential(nn.Linear(D, D), nn.DataParallel(nn.Linear(D, 3))),
        ("DataParallel", "module"),
    ),
}


def attempt_in_record(model: nn.Module, loss: Loss, x: Tensor) -> None:
    with pergrad.record(model, pergrad.Grads()):
        loss(model, x).backward()


def attempt_in_call(model: nn.Module, loss: Loss, x: Tensor) -> None:
    loss(pergrad.call_for_per_sample_grads(model), x).backward()


ATTEMPTS = {"record": attempt_in_record, "call": attempt_in_call}
# The call records the module alone: it does not see what its outputs go into.
ATTEMPTED = [
    (name, attempt)
    for name, refusal in REFUSALS.items()
    for attempt in ATTEMPTS
    if attempt == "record" or refusal.loss is plain
]


@pytest.mark.filterwarnings("ignore:.*DataParallel")
@pytest.mark.parametrize(("name", "attempt"), ATTEMPTED)
def test_refusal_says_why_and_the_model_trains_on(name: str, attempt: str) -> None:
    refusal = REFUSALS[name]
    torch.manual_seed(0)
    model = refusal.build().double()
    x = numbers(*refusal.shape).to(next(model.parameters()).device)
    untouched = copy.deepcopy(model)
    before = state_of(model)
    with pytest.raises(refusal.error) as caught:
        ATTEMPTS[attempt](model, refusal.loss, x)
    for piece in refusal.pieces:
        assert piece.lower() in str(caught.value).lower()
    assert state_of(model) == before
    if next(model.parameters()).is_meta:
        return
    for trained in (model, untouched):
        plain(trained, x).backward()
    for p, same in zip(model.parameters(), untouched.parameters(), strict=True):
        assert_close(p.grad, same.grad)


def test_penalty_on_the_loss_of_each_sample_counts_for_each() -> None:
    model, x = two_layers(), numbers(B, D)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum(1) + model[2].weight.abs().mean()

    assert_all_near(pergrad.grads(model, loss, x), loop_grads(model, loss, x))


def test_graph_from_before_the_scope_is_refused() -> None:
    model = nn.Linear(D, 3).double()
    scaled = model.weight * 2
    x = numbers(B, D)
    with pytest.raises(UnseenUseError, match="weight"), pergrad.record(model, pergrad.Grads()):
        total(model(x) + F.linear(x, scaled)).backward()
    assert model.weight.grad is None
    assert not model.weight._backward_hooks


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_code_is_refused_or_exact() -> None:
    inner = torch.jit.script(nn.Linear(D, 3).double())
    model = Formula(lambda m, x: m.inner(x), inner=inner)
    before = state_of(model)
    with pytest.raises(PergradError):
        pergrad.grads(model, plain, numbers(B, D))
    assert state_of(model) == before
