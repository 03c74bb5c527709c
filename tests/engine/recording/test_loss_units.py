"""`loss_reduction="auto"`: each natural loss gives the norms of the samples' own losses, or a clear error."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pergrad
from pergrad.engine.recording.loss_units import EvenSamples, UnitsOfLoss
from pergrad.errors import MixedSamplesError, PergradError
from pergrad.testing import assert_near

B, T, V = 6, 4, 5
LENGTHS = torch.tensor([1, 2, 1, 2, 1, 2])
FRACTIONS = torch.full((B, T, V), 1 / V, dtype=torch.float64)
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, V)).double()


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(B, T, 3, generator=random, dtype=torch.float64)
    return x, torch.randint(V, (B, T), generator=random)


def tokens(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    """The loss of each position, (B, T)."""
    flat = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none", **options)
    return flat.view(y.shape)


def summed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return tokens(model, x, y).sum(1)


def averaged(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return tokens(model, x, y).mean(1)


def smoothed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return tokens(model, x, y, label_smoothing=0.1).mean(1)


def flat(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), **options)


def penalised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    picked = -out.log_softmax(-1).gather(-1, y[..., None])
    return picked.mean((1, 2)) + 0.1 * out.square().mean((1, 2))


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x).square().mean((1, 2))


def divergence(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.kl_div(model(x).log_softmax(-1), FRACTIONS, reduction="none").sum(-1)


def aligned(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    targets = torch.ones(B, 2, dtype=torch.long)
    lengths = torch.full((B,), T)
    return F.ctc_loss(
        model(x).log_softmax(-1).transpose(0, 1), targets, lengths, LENGTHS, **options
    )


def triplets(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    rows = x.mean(1)
    return F.triplet_margin_loss(model(rows), model(rows + 1), model(-rows), **options)


def term(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return F.cross_entropy(out.transpose(1, 2), y) + 0.1 * out.square().mean()


def soft(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), F.one_hot(y.flatten(), V).double(), **options)


def of_each(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    return [F.cross_entropy(out, target) for out, target in zip(model(x), y, strict=True)]


def weighted_rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return averaged(model, x, y) * x[:, 0, 0]


def kept(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A mask with two valid positions in each sample, (B, T)."""
    return torch.ones_like(x[..., 0]) * (torch.arange(T) % 2 == 0)


def masked(model: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return (tokens(model, x, y) * mask).sum() / mask.sum()


def masked_rows(model: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return (tokens(model, x, y) * mask).sum(1) / mask.sum(1)


def in_one_vector(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    scores = model(x).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(
        scores, torch.ones(9, dtype=torch.long), torch.full((B,), T), LENGTHS, reduction="mean"
    )


# A scalar loss, and the losses of the samples that it stands for.
LOSSES: dict[str, tuple[Loss, Loss]] = {
    "sum": (lambda *a: flat(*a, reduction="sum"), summed),
    "mean": (flat, averaged),
    "mean of a module": (
        lambda m, x, y: nn.CrossEntropyLoss()(m(x).transpose(1, 2), y),
        averaged,
    ),
    "negative": (lambda m, x, y: F.nll_loss(m(x).log_softmax(-1).transpose(1, 2), y), averaged),
    "mean of means": (lambda *a: tokens(*a).mean(1).mean(), averaged),
    "mean over samples alone": (lambda *a: tokens(*a).mean(0).sum(), summed),
    "sum over samples, mean over positions": (lambda *a: tokens(*a).sum(0).mean(), averaged),
    "two terms": (term, penalised),
    "terms in a stack": (
        lambda m, x, y: torch.stack([tokens(m, x, y).mean(), m(x).square().mean()]).mean(),
        lambda *a: (averaged(*a) + squares(*a)) / 2,
    ),
    "minus": (lambda m, x, y: -(-tokens(m, x, y)).mean(), averaged),
    "divided by the batch's size": (lambda m, x, y: tokens(m, x, y).sum() / x.shape[0], summed),
    "divided by all positions": (
        lambda m, x, y: tokens(m, x, y).sum() / (x.size(0) * x.size(1)),
        averaged,
    ),
    "label smoothing": (lambda *a: flat(*a, label_smoothing=0.1), smoothed),
    "probabilities": (soft, averaged),
    "weighted probabilities": (
        lambda *a: soft(*a, weight=torch.full((V,), 2.0).double()),
        lambda *a: 2 * averaged(*a),
    ),
    "squared error": (lambda m, x, y: F.mse_loss(m(x), torch.zeros_like(FRACTIONS)), squares),
    "binary": (
        lambda m, x, y: F.binary_cross_entropy_with_logits(m(x), FRACTIONS),
        lambda m, x, y: F.binary_cross_entropy_with_logits(m(x), FRACTIONS, reduction="none").mean(
            (1, 2)
        ),
    ),
    "batchmean of flat rows": (
        lambda m, x, y: F.kl_div(
            m(x).log_softmax(-1).flatten(0, 1), FRACTIONS.flatten(0, 1), reduction="batchmean"
        ),
        lambda *a: divergence(*a).mean(1),
    ),
    "batchmean": (
        lambda m, x, y: F.kl_div(m(x).log_softmax(-1), FRACTIONS, reduction="batchmean"),
        lambda *a: divergence(*a).sum(1),
    ),
    "batchmean of positions in front": (
        lambda m, x, y: F.kl_div(
            m(x).log_softmax(-1).transpose(0, 1), FRACTIONS.transpose(0, 1), reduction="batchmean"
        ),
        lambda *a: divergence(*a).mean(1),
    ),
    "margin": (
        lambda m, x, y: F.multi_margin_loss(m(x[:, 0]), y[:, 0]),
        lambda m, x, y: F.multi_margin_loss(m(x[:, 0]), y[:, 0], reduction="none"),
    ),
    "triplet": (triplets, lambda *a: triplets(*a, reduction="none")),
    "alignment": (aligned, lambda *a: aligned(*a, reduction="none") / LENGTHS),
    "divided by the number of elements": (
        lambda m, x, y: (lambda t: t.sum() / t.numel())(tokens(m, x, y)),
        averaged,
    ),
    "dot": (lambda m, x, y: torch.dot(averaged(m, x, y), x[:, 0, 0]) / x.shape[0], weighted_rows),
    "einsum": (lambda m, x, y: torch.einsum("b,b->", averaged(m, x, y), x[:, 0, 0]), weighted_rows),
    "mean without NaN": (lambda *a: tokens(*a).nanmean(), averaged),
    "targets in one vector": (in_one_vector, lambda *a: aligned(*a, reduction="none") / LENGTHS),
    "masked mean": (lambda *a: masked(*a, kept(*a)), lambda *a: masked_rows(*a, kept(*a))),
    "masked mean, clamped": (
        lambda m, x, y: (tokens(m, x, y) * kept(m, x, y)).sum() / kept(m, x, y).sum().clamp(min=1),
        lambda *a: masked_rows(*a, kept(*a)),
    ),
    "masked mean over features": (
        lambda m, x, y: (m(x) * kept(m, x, y)[..., None]).sum() / (kept(m, x, y).sum() * V),
        lambda m, x, y: (m(x).mean(-1) * kept(m, x, y)).sum(1) / 2,
    ),
    "masked mean, divided before": (
        lambda m, x, y: (tokens(m, x, y) * kept(m, x, y) / kept(m, x, y).mean()).mean(),
        lambda *a: masked_rows(*a, kept(*a)),
    ),
    "mean with equal weights": (
        lambda m, x, y: (averaged(m, x, y) * torch.full((B,), 2.0).double()).mean(),
        lambda *a: 2 * averaged(*a),
    ),
    "ratio of means": (
        lambda m, x, y: (tokens(m, x, y) * kept(m, x, y)).mean() / kept(m, x, y).mean(),
        lambda *a: masked_rows(*a, kept(*a)),
    ),
    "sum over valid labels": (
        lambda m, x, y: flat(m, x, y, reduction="sum") / (y != -100).sum(),
        averaged,
    ),
    "loop": (lambda *a: sum(of_each(*a)), averaged),  # type: ignore[arg-type, return-value]
    "stack of all": (lambda *a: torch.stack(of_each(*a)).mean(), averaged),
}
OF_SIX = [
    "alignment",
    "targets in one vector",
    "mean with equal weights",
    "mean without NaN",  # `verify` writes NaN into samples
    "squared error",
    "binary",
    *(n for n in LOSSES if "batchmean" in n),
]
each_loss = pytest.mark.parametrize("name", LOSSES)


@each_loss
def test_losses_are_told_and_undone(name: str) -> None:
    model, (x, y) = net(), batch()
    loss, own = LOSSES[name]
    norms = pergrad.Norms()
    for _ in range(2):  # the second time by cached layouts
        norms.reset()
        with pergrad.record(model, norms):
            loss(model, x, y).backward()
        assert_near(norms.result, pergrad.norms(model, own, x, y), name)
    assert_near(pergrad.norms(model, loss, x, y), norms.result, name)
    if name not in OF_SIX:
        assert pergrad.verify(model, loss, x, y, quiet=True).ok


@pytest.mark.parametrize("name", ["mean", "two terms", "label smoothing", "sum", "masked mean"])
def test_compiled_steps_tell_too(name: str) -> None:
    model, (x, y), norms = net(), batch(), pergrad.Norms()
    loss, own = LOSSES[name]
    step = pergrad.compiled(model, loss, norms, backend="eager")
    for _ in range(3):
        step(x, y)
        assert_near(norms.result, pergrad.norms(model, own, x, y), name)
    assert step.graphs == 1


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in OF_SIX])
def test_one_sample_has_no_mean_to_undo(name: str) -> None:
    model, (x, y) = net(), batch()
    loss, own = LOSSES[name]
    found = pergrad.norms(model, loss, x[:1], y[:1])
    assert_near(found, pergrad.norms(model, own, x[:1], y[:1]), name)


def ignoring(*places: tuple[int, int]) -> Tensor:
    y = batch()[1].clone()
    for place in places:
        y[place] = -100
    return y


def test_mean_over_valid_positions_is_undone_if_all_samples_have_as_many() -> None:
    model, (x, _) = net(), batch()
    y = ignoring(*((n, n % T) for n in range(B)))

    def own(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return tokens(model, x, y).sum(1) / (T - 1)

    assert_near(pergrad.norms(model, flat, x, y), pergrad.norms(model, own, x, y))

    def by_mask(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return tokens(model, x, y)[y != -100].mean()

    assert_near(pergrad.norms(model, by_mask, x, y), pergrad.norms(model, own, x, y))


def test_compiled_step_looks_at_valid_positions_in_every_call() -> None:
    model, (x, y), norms = net(), batch(), pergrad.Norms()
    step = pergrad.compiled(model, flat, norms, backend="eager")
    for _ in range(3):
        step(x, y)
    with pytest.raises(PergradError, match="different numbers"):
        step(x, ignoring((1, 0)))
    assert "no result yet" in repr(norms)
    step(x, ignoring(*((n, 0) for n in range(B))))
    assert step.graphs == 1
    assert norms.samples == B


def test_compiled_step_looks_at_masks_in_every_call() -> None:
    model, (x, y), norms = net(), batch(), pergrad.Norms()
    even = kept(model, x, y).clone()
    step = pergrad.compiled(
        model, lambda m, x, y, mask: masked(m, x, y, mask), norms, backend="eager"
    )
    step(x, y, even)
    step(x, y, even)
    with pytest.raises(PergradError, match="different numbers"):
        step(x, y, even.index_fill(0, torch.tensor([1]), 1.0))


def weighted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return flat(model, x, y, weight=torch.rand(V).double())


OFFERS = r'loss_reduction="sum" or loss_reduction="mean", or backpropagate losses of shape \(B,\)$'
UNTOLD: dict[str, tuple[Loss, str]] = {
    "class weights": (weighted, rf"class weights divides by .* own classes: pass {OFFERS}"),
    "padding": (lambda m, x, _: flat(m, x, ignoring((1, 0))), rf"different numbers: pass {OFFERS}"),
    "mask": (lambda m, x, _: tokens(m, x, batch()[1])[x[..., 0] > 0].mean(), "different numbers"),
    "some samples": (lambda *a: tokens(*a)[:3].mean(), "different numbers"),
    "sum and mean": (
        lambda m, x, y: tokens(m, x, y).sum() + m(x).mean(),
        "one term of it is a sum",
    ),
    "divided by the mask": (
        lambda *a: tokens(*a).sum() / torch.tensor(7.0),
        "multiplied by 0.142857 as a whole: pass loss_scale=0.142857",
    ),
    "accumulation": (
        lambda *a: flat(*a) / 4,
        r"a mean over the samples, is multiplied by 0.25 as a whole: pass loss_scale=0.25 .*loss_reduct"
        r'ion="mean" to make it part',
    ),
    "accumulation in place": (lambda *a: flat(*a).div_(4), "loss_scale=0.25"),
    "all terms": (lambda *a: (flat(*a) + flat(*a)) * 0.5, "loss_scale=0.5"),
    "by hand": (lambda *a: tokens(*a).sum() / B, '"mean" if it divides by the number of samples'),
    "uneven mask": (lambda m, x, y: masked(m, x, y, (x[..., 0] > 0).double()), "different parts"),
    "weights of samples": (
        lambda m, x, y: (averaged(m, x, y) * x[:, 0, 0]).sum() / x[:, 0, 0].sum(),
        "different parts",
    ),
    "mean over a sum": (lambda m, x, y: flat(m, x, y) / (y >= 0).sum(), "multiplied by 0.0416667"),
    "each divided by the batch's size": (
        lambda m, x, y: (tokens(m, x, y) / x.shape[0]).sum(),
        rf"`sum` adds up terms that are each divided by 6 before: pass {OFFERS}",
    ),
    "each divided by len": (lambda m, x, y: (averaged(m, x, y) / len(x)).sum(), "divided by 6"),
    "weights of sum one": (
        lambda m, x, y: averaged(m, x, y) @ torch.full((B,), 1 / B, dtype=torch.float64),
        "weights of sum one",
    ),
    "terms with weights of sum one": (
        lambda m, x, y: (averaged(m, x, y) * torch.full((B,), 1 / B)).sum(),
        "weights of sum one",
    ),
    "each divided, and a mean of each sample": (
        lambda m, x, y: (tokens(m, x, y) / len(x)).mean(1).sum(),
        "divided by 6",
    ),
    "each divided, and the largest of each sample": (
        lambda m, x, y: (tokens(m, x, y) / x.shape[0]).amax(1).sum(),
        "divided by 6",
    ),
    "each divided, and its positions apart": (
        lambda m, x, y: sum(part.sum() for part in (tokens(m, x, y) / len(x)).unbind(1)),  # type: ignore[arg-type, return-value]
        "divided by 6",
    ),
    "each divided, and two of them joined": (
        lambda m, x, y: torch.cat([averaged(m, x, y) / len(x), -averaged(m, x, y) / len(x)]).sum(),
        "divided by 6",
    ),
    "each divided, in a product": (
        lambda m, x, y: ((tokens(m, x, y) / len(x)) @ torch.ones(T).double()).sum(),
        "divided by 6",
    ),
    "positive parts of divided ones": (
        lambda m, x, y: (tokens(m, x, y) / len(x)).relu().sum(),
        "divided by 6",
    ),
    "flat weights of sum one": (
        lambda m, x, y: torch.inner(
            tokens(m, x, y).flatten(), torch.full((B * T,), 1 / (B * T)).double()
        ),
        "weights of sum one",
    ),
    "mean with weights of mean one": (
        lambda m, x, y: (averaged(m, x, y) * x[:, 0, 0] / x[:, 0, 0].mean()).mean(),
        "divided by a mean over the batch in which the samples have different parts",
    ),
    "mean with normalised weights": (
        lambda m, x, y: (averaged(m, x, y) * (x[:, 0, 0] / x[:, 0, 0].mean())).mean(),
        "weights of mean one",
    ),
    "mean of each, with weights of mean one": (
        lambda m, x, y: (tokens(m, x, y) * x[..., 0] / x[..., 0].mean()).mean(1).mean(),
        "divided by a mean over the batch in which the samples have different parts",
    ),
    "mean of shares": (
        lambda m, x, y: (averaged(m, x, y) * x[:, 0, 0] / x[:, 0, 0].sum()).mean(),
        "`mean` averages terms that are each divided by a sum over the batch",
    ),
    "some NaN": (
        lambda m, x, y: tokens(m, x, y).where(x[..., 0] > 0, torch.nan).nanmean(),
        "`nanmean` averages over positions of which the samples have different numbers",
    ),
    "repeated": (lambda *a: flat(*a).expand(3).sum(), "`expand` repeats it"),
}


@pytest.mark.parametrize("name", UNTOLD)
def test_loss_that_cannot_be_told_is_refused_and_the_model_trains_on(name: str) -> None:
    model, (x, y) = net(), batch()
    loss, message = UNTOLD[name]
    with pytest.raises(PergradError, match=message), pergrad.record(model, pergrad.Norms()):
        loss(model, x, y).backward()
    assert all(p.grad is None for p in model.parameters())
    flat(model, x, y).backward()
    assert all(p.grad is not None for p in model.parameters())
    for how in ("sum", "mean"):
        with pergrad.record(model, pergrad.Norms(), loss_reduction=how):  # type: ignore[arg-type]
            loss(model, x, y).backward()


def test_mean_of_each_sample_by_hand_is_part_of_its_loss_if_positions_are_as_many_as_samples() -> (
    None
):
    model, (x, y) = net(), batch()
    x, y = x[:T], y[:T]  # T samples of T positions

    def by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        assert len(x) == T
        return (tokens(model, x, y).sum(1) / T).sum()

    assert_near(pergrad.norms(model, by_hand, x, y), pergrad.norms(model, averaged, x, y))


def test_weights_of_classes_may_be_as_many_as_samples() -> None:
    model, (x, _) = net(), batch()
    rows, targets = x[:V, 0], torch.eye(V, dtype=torch.float64)
    options = {"pos_weight": torch.arange(1.0, V + 1, dtype=torch.float64)}

    def loss(model: nn.Module, x: Tensor, t: Tensor, **more: str) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(x), t, **options, **more)  # type: ignore[arg-type]

    expected = pergrad.norms(model, lambda *a: loss(*a, reduction="none").mean(1), rows, targets)
    assert_near(pergrad.norms(model, loss, rows, targets), expected)


@pytest.mark.parametrize("divide", [lambda loss: 1 / loss, lambda loss: torch.ones(()) / loss])
def test_one_over_a_loss_mixes_the_samples(divide: Callable[[Tensor], Tensor]) -> None:
    model, (x, y) = net(), batch()
    with pytest.raises(MixedSamplesError), pergrad.record(model, pergrad.Norms()):
        divide(flat(model, x, y)).backward()


def test_accumulation_with_its_scale_gives_the_gradients_of_all_samples() -> None:
    model, (x, y) = net(), batch()
    norms = pergrad.Norms(accumulate=True)
    for rows in torch.arange(B).split(2):
        with pergrad.record(model, norms, loss_scale=1 / 3):
            (flat(model, x[rows], y[rows]) / 3).backward()
    assert_near(norms.result, pergrad.norms(model, averaged, x, y))


@pytest.mark.parametrize(("given", "factor"), [(0.5, 0.25), (0.5, 1.0)])
def test_scale_that_is_not_the_loss_s_is_refused(given: float, factor: float) -> None:
    model, (x, y) = net(), batch()
    message = f"loss_scale=0.5, but the loss is multiplied by {factor:g}"
    with (
        pytest.raises(PergradError, match=message),
        pergrad.record(model, pergrad.Norms(), loss_scale=given),
    ):
        (flat(model, x, y) * factor).backward()


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), True, "2", torch.ones(2)])
def test_scale_must_be_a_positive_number(scale: Any) -> None:
    with pytest.raises(PergradError, match="loss_scale must be"):
        pergrad.grads(net(), flat, *batch(), loss_scale=scale)


@pytest.mark.parametrize("options", [{}, {"loss_reduction": "mean"}])
def test_gradient_scaler_is_found_and_its_step_unscales(options: dict[str, Any]) -> None:
    model, (x, y) = net(), batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    norms, clipped = pergrad.Norms(), pergrad.ClippedSum(0.3)
    with pergrad.record(model, norms, clipped, **options):
        scaler.scale(flat(model, x, y)).backward()
    assert_near(norms.result, pergrad.norms(model, averaged, x, y))
    expected = {name: t.clone() for name, t in clipped.result.items()}
    clipped.assign()
    scaler.unscale_(optimizer)
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert_near(p.grad, expected[name])
    scaler.step(optimizer)
    scaler.update()


def test_gradient_scaler_and_accumulation_are_undone_together() -> None:
    model, (x, y) = net(), batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    expected = pergrad.norms(model, averaged, x, y)
    for scale in (0.25, 256.0):  # without the scaler's factor, or with it
        with pergrad.record(model, pergrad.Norms(), loss_scale=scale) as norms:
            scaler.scale(flat(model, x, y) / 4).backward()
        assert_near(norms.result, expected)


def test_autocast_changes_nothing_about_the_loss() -> None:
    model, (x, y) = net().float(), batch()
    x = x.float()
    with (
        pergrad.record(model, pergrad.Norms()) as norms,
        torch.autocast("cpu", torch.bfloat16),
    ):
        flat(model, x, y).backward()
    exact = pergrad.norms(model, averaged, x, y)
    torch.testing.assert_close(norms.result, exact, rtol=0.05, atol=0.0)


def test_losses_of_the_samples_need_nothing() -> None:
    model, (x, y) = net(), batch()
    with pergrad.record(model, pergrad.Norms()) as norms:
        summed(model, x, y).backward(torch.ones(B, dtype=torch.float64))
    assert_near(norms.result, pergrad.norms(model, summed, x, y))


def test_gradient_of_a_scalar_loss_is_a_factor_on_all_of_it() -> None:
    model, (x, y) = net(), batch()
    with (
        pytest.raises(PergradError, match="loss_scale=2"),
        pergrad.record(model, pergrad.Norms()),
    ):
        flat(model, x, y).backward(torch.tensor(2.0, dtype=torch.float64))


@pytest.mark.parametrize("is_sum_first", [True, False])
def test_backward_passes_of_one_block_must_agree(is_sum_first: bool) -> None:
    model, (x, y) = net(), batch()
    with pergrad.record(model, pergrad.Grads()) as grads:
        losses = averaged(model, x, y)
        losses.mean().backward(retain_graph=True)
        losses.mean().backward()
    twice = pergrad.grads(model, lambda *a: 2 * averaged(*a), x, y)
    assert_near(grads.result["0.weight"], twice["0.weight"])

    def apart() -> None:
        losses = averaged(model, x, y)
        first, second = losses.sum(), losses.mean()
        (first if is_sum_first else second).backward(retain_graph=True)
        (second if is_sum_first else first).backward()

    with (
        pytest.raises(PergradError, match="of different kinds"),
        pergrad.record(model, pergrad.Grads()),
    ):
        apart()


def test_several_losses_of_one_backward_must_agree() -> None:
    model, (x, y) = net(), batch()
    with pergrad.record(model, pergrad.Norms()) as norms:
        out = tokens(model, x, y)
        torch.autograd.backward([out.mean(), (out * 2).mean()])
    assert_near(norms.result, pergrad.norms(model, lambda *a: 3 * averaged(*a), x, y))


def test_checks_of_a_block_know_the_mean() -> None:
    model, (x, y) = net(), batch()
    for check in ("verify", "certify"):
        with pergrad.record(model, pergrad.Norms(), **{check: True}):  # type: ignore[arg-type]
            flat(model, x, y).backward()


def test_verify_names_the_batch_size_where_a_mean_is_called_a_sum() -> None:
    report = pergrad.verify(net(), flat, *batch(), loss_reduction="sum", quiet=True)
    assert not report.ok
    assert "exactly one by the batch size: is the loss a mean?" in str(report)
    told = pergrad.verify(net(), flat, *batch(), quiet=True)
    assert "the loss is a mean over the samples, which is undone" in told.notes


def test_contract_of_torch_knows_sums_and_means_alone() -> None:
    with pytest.raises(PergradError, match="to be sum or mean, got auto"):
        pergrad.call_for_per_sample_grads(net(), loss_reduction="auto")


def test_terms_divided_before_a_sum_are_seen_after_plain_sums_of_their_shape() -> None:
    """Layouts of sums are remembered by shape, and say nothing about what was divided before."""
    model, (x, y) = net(), batch()
    for _ in range(2):
        with pergrad.record(model, pergrad.Norms()):
            averaged(model, x, y).sum().backward()
    with (
        pytest.raises(PergradError, match="each divided by"),
        pergrad.record(model, pergrad.Norms()),
    ):
        (averaged(model, x, y) / x.shape[0]).sum().backward()


def test_backward_passes_with_equal_factors_of_a_trainer_agree() -> None:
    model, (x, y) = net(), batch()
    trainer: dict[str, Any] = {"__name__": "accelerate.accelerator"}
    exec("def backward(loss, steps):\n    return loss / steps\n", trainer)

    def run(*steps: float) -> None:
        losses = summed(model, x, y)
        scaled = [trainer["backward"](losses.sum(), by) for by in steps]
        for loss in scaled:
            loss.backward(retain_graph=True)

    with pergrad.record(model, pergrad.Sum()) as both:
        run(3.0, 3.0)
    with pergrad.record(model, pergrad.Sum()) as once:
        summed(model, x, y).sum().backward()
    for name, g in once.result.items():
        assert_near(both.result[name], 2 * g, name)
    with (
        pytest.raises(PergradError, match="of different kinds"),
        pergrad.record(model, pergrad.Sum()),
    ):
        run(3.0, 4.0)


@pytest.mark.parametrize("kind", [UnitsOfLoss, EvenSamples])
def test_quantities_that_only_look_allow_two_backward_passes(kind: type[Any]) -> None:
    model, (x, y) = net(), batch()
    with pergrad.record(model, kind()):
        losses = summed(model, x, y)
        losses.sum().backward(retain_graph=True)
        losses.sum().backward()


def test_factors_beside_the_given_scale_are_part_of_a_loss_whose_reduction_is_given() -> None:
    model, (x, y) = net(), batch()
    with pergrad.record(model, pergrad.Norms(), loss_scale=0.5, loss_reduction="sum") as norms:
        (summed(model, x, y).sum() * 1.5).backward()
    assert_near(norms.result, 3 * pergrad.norms(model, summed, x, y))


def test_a_scale_that_is_a_tensor_is_undone_as_it_is() -> None:
    model, (x, y) = net(), batch()
    scale = torch.tensor(0.25, dtype=torch.float64)
    with pergrad.record(model, pergrad.Norms(), loss_scale=scale) as norms:
        (summed(model, x, y).sum() * scale).backward()
    assert_near(norms.result, pergrad.norms(model, summed, x, y))


def test_a_factor_that_is_no_number_of_python_is_undone_by_the_given_scale() -> None:
    model, (x, y) = net(), batch()
    factor = np.float32(0.5)

    def run(**options: Any) -> Tensor:
        with pergrad.record(model, pergrad.Norms(), **options) as norms:
            (summed(model, x, y).sum() * factor).backward()
        return norms.result

    with pytest.raises(PergradError, match="multiplied by a factor as a whole: pass loss_scale="):
        run()
    assert_near(run(loss_scale=0.5), pergrad.norms(model, summed, x, y))
