"""A private step is the clipped sum plus noise over a public number, whatever its pieces."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from pergrad.errors import PergradError, PrivacyError
from pergrad.private import Adaptive, Step
from pergrad.testing import loop_grads
from tests.private.stepping.cases import data, losses, mlp, plan, run, seeded, sgd, weights


def clipped(model: nn.Module, x: Tensor, y: Tensor, bound: float) -> Tensor:
    """The oracle: a loop over the samples."""
    if not len(x):
        return torch.zeros_like(weights(model))
    found = loop_grads(model, losses, x, y)
    flat = torch.cat([g.flatten(1) for g in found.values()], 1)
    return (flat * (bound / flat.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)


# What a step is


@pytest.mark.parametrize("piece_size", [None, 1, 3, 100])
def test_a_step_without_noise_is_the_clipped_sum_over_the_expected_size(piece_size: Any) -> None:
    model = mlp()
    step, loader = run(plan(noise_multiplier=0.0), model, piece_size=piece_size)
    for x, y in loader:
        before = weights(model)
        expected = before - clipped(model, x, y, 0.5) / 8
        step(x, y)
        torch.testing.assert_close(weights(model), expected, rtol=1e-12, atol=1e-13)
        assert all(p.grad is None for p in model.parameters())
    assert step.number == 6


def test_noise_is_drawn_once_for_a_batch_with_the_plan_s_deviation() -> None:
    ends = []
    for noise in (0.0, 1.5):
        model = nn.Linear(300, 200).double()
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        made = plan(noise_multiplier=noise, steps=1, sample_rate=0.5)
        samples = TensorDataset(torch.zeros(40, 300).double())
        step, loader = run(made, model, lambda m, x: 0 * m(x).sum(1), samples, piece_size=2)
        for batch in loader:
            step(*batch)
        ends.append(weights(model))
    noise = (ends[1] - ends[0]) * 8 / (1.5 * 0.5)
    assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-3


def test_an_empty_batch_takes_noise_and_does_not_run_the_model() -> None:
    model = mlp()

    def never(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        raise AssertionError

    step, loader = run(plan(sample_rate=1e-9), model, never)
    before = weights(model)
    for x, y in loader:
        step(x, y)
    assert step.number == 6
    assert (weights(model) != before).all()
    assert step.last.batch_size == 0


def test_all_trained_parameters_get_noise_and_frozen_ones_nothing() -> None:
    class Partly(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*mlp())
            self.unused = nn.Parameter(torch.zeros(5, dtype=torch.float64))

    model = Partly()
    model[0].weight.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step, loader = run(plan(steps=1), model)
    for batch in loader:
        step(*batch)
    changed = {name: bool((p != before[name]).all()) for name, p in model.named_parameters()}
    assert changed == {name: name != "0.weight" for name in changed}


def test_a_step_returns_its_number_and_the_budget() -> None:
    made = plan(delta=1e-3)
    step, loader = run(made)
    for k, batch in enumerate(loader, start=1):
        released = step(*batch)
        assert (released.step, released.spent, released.delta) == (k, k, 1e-3)
        assert released.epsilon == made.epsilon(steps=k)
    assert repr(released) == "Released(step=6, spent=6)"
    assert re.search("[0-9a-f]{16}", repr(step)) is None  # no key


def test_the_first_step_is_certified() -> None:
    step, loader = run(plan())
    assert not step.is_certified
    step(*next(iter(loader)))
    assert step.is_certified


def test_samples_that_meet_are_refused() -> None:
    def mixed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return losses(model, x - x.mean(0), y)

    step, loader = run(plan(), loss_fn=mixed)
    with pytest.raises(PergradError):
        step(*next(iter(loader)))
    assert step.number == 0


def test_any_optimizer_and_a_scheduler_work() -> None:
    for kind in (torch.optim.Adam, torch.optim.RMSprop, torch.optim.AdamW, torch.optim.Adagrad):
        model = mlp()
        optimizer = kind(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        step, loader = run(plan(), model, optimizer=optimizer)
        before = weights(model)
        for batch in loader:
            step(*batch)
            scheduler.step()
        assert (weights(model) != before).any()


# Samples that would break the bound


def test_a_sample_without_finite_gradient_adds_nothing_and_is_counted() -> None:
    x, y = data().tensors
    spoilt = x.clone()
    spoilt[::7] = float("nan")
    spoilt[1::7] = float("inf")
    kept = torch.ones(40, dtype=torch.bool)
    kept[::7] = kept[1::7] = False
    model = mlp()
    made = plan(noise_multiplier=0.0, sample_rate=1.0, steps=1)
    step, loader = run(made, model, samples=TensorDataset(spoilt, y), certify=False)
    before = weights(model)
    expected = before - clipped(model, x[kept], y[kept], 0.5) / 8
    for batch in loader:
        step(*batch)
    torch.testing.assert_close(weights(model), expected)
    assert step.last.nonfinite == int((~kept).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clipping", ["flat", "per-layer", "automatic"])
def test_removing_a_sample_moves_the_sum_by_the_bound_at_most(
    dtype: torch.dtype, clipping: Any
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    x, y = data(24, torch.float32).tensors
    x = (x * torch.logspace(-2, 3, 24)[:, None]).to(dtype)

    def summed(rows: Tensor) -> Tensor:
        made = plan(noise_multiplier=0.0, sample_rate=1.0, steps=1, clipping=clipping)
        made.loader(TensorDataset(x[rows], y[rows]))
        step = Step(model, sgd(model), losses, made, certify=False)
        sums, _ = step._summation((x[rows], y[rows]), len(rows), bytes(12))
        assert all(t.dtype is torch.float32 for t in sums.values())
        return torch.cat([t.flatten() for t in sums.values()]).double()

    everybody = torch.arange(24)
    whole = summed(everybody)
    moved = [(whole - summed(everybody[everybody != k])).norm() for k in range(24)]
    assert max(moved) <= 0.5 * (1 + 1e-6)
    assert max(moved) > 0.4  # the bound is used


# Ways to run


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("piece_size", [7, 64])
def test_pieces_of_aligned_gradients_keep_the_bound(piece_size: int, backend: Any) -> None:
    size, bound = 500, 0.37
    x = torch.rand(8, generator=seeded()) * (1 + 10 * torch.rand(size, 1, generator=seeded(1)))
    model = nn.Linear(8, 1, bias=False)  # all gradients have one direction: sums round most
    made = plan(noise_multiplier=0.0, max_norm=bound, expected_batch_size=size)
    step = Step(
        model, sgd(model), lambda m, x: m(x)[:, 0], made, piece_size, backend=backend, certify=False
    )
    whole = step.clipped_sums(x)["weight"].double()
    for n in range(0, size, 50):
        rest = step.clipped_sums(x[torch.arange(size) != n])["weight"].double()
        assert (whole - rest).norm() <= bound * (1 + 1e-6)


def test_discrete_noise_is_that_of_the_plan() -> None:
    model = nn.Linear(100, 50)
    made = plan(sample_rate=1e-9, steps=1, noise="discrete")
    step, loader = run(made, model, samples=TensorDataset(torch.zeros(9, 100), torch.zeros(9)))
    before = weights(model)
    for batch in loader:
        step(*batch)
    noise = (before - weights(model)) * 8 / 0.5
    assert noise.std().item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("clipping", ["flat", "per-layer"])
def test_views_are_clipped_by_bounds_of_names(clipping: Any) -> None:
    bounds: Any = {"0.*": 0.1, "*": 0.2} if clipping == "flat" else 0.1
    made = plan(noise_multiplier=0.0, max_norm=bounds, clipping=clipping)

    def of_views(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([losses(model, x, y), losses(model, -x, y)], 1)

    def averaged(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return of_views(model, x, y).mean(1)

    model, batch = mlp(), data(5).tensors
    with_views = Step(model, sgd(model), of_views, made, views=True, certify=False)
    plain = Step(model, sgd(model), averaged, made, certify=False)
    found, expected = with_views.clipped_sums(*batch), plain.clipped_sums(*batch)
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=1e-12, atol=1e-14)


class Scaled(nn.Linear):
    """Divides by the largest output of the batch, which hides that samples meet from the gradients."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found / found.abs().max().detach()


@pytest.mark.parametrize("size", [1, 2])
def test_padding_does_not_hide_that_samples_meet(size: int) -> None:
    made = plan(sample_rate=0.05, steps=40)
    loader = next(
        loader
        for loader in (made.loader(data(), seeded(k)) for k in range(100))
        if len(loader.sampler.drawn(0)) == size
    )
    model = Scaled(4, 3).double()
    step = Step(model, sgd(model), losses, made, 8, backend="eager")
    made.run.sampler = loader.sampler
    for batch in loader:
        if len(batch[0]) > 1:
            break
        step(*batch)
        assert not step.is_certified
    with pytest.raises(PergradError, match="mixes samples"):
        step(*batch)


@pytest.mark.parametrize("options", [{}, {"backend": "eager", "piece_size": 8}])
def test_a_first_batch_of_one_sample_certifies_nothing(options: dict[str, Any]) -> None:
    step, loader = run(plan(sample_rate=0.02, steps=40), **options)
    for batch in loader:
        step(*batch)
        assert step.last is not None
        if step.last.batch_size > 1:
            break
        assert not step.is_certified
    assert step.is_certified


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_compiled_step_pads_and_gives_the_same(backend: Any) -> None:
    if backend == "inductor":
        pytest.importorskip("triton")
    ends = []
    for options in ({}, {"backend": backend, "piece_size": 4}):
        model = mlp()
        step, loader = run(plan(), model, **options)
        for batch in loader:
            step(*batch)
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-10, atol=1e-12)


def test_a_truncated_plan_is_padded_to_its_cap() -> None:
    ends = []
    for backend in (None, "eager"):
        model = mlp()
        made = plan(sampling="truncated", population=40, expected_batch_size=None)
        step, loader = run(made, model, backend=backend)
        for batch in loader:
            step(*batch)
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-10, atol=1e-12)


def test_autocast_around_a_step_changes_its_rounding_only() -> None:
    ends = []
    for is_enabled in (False, True):
        model = mlp(torch.float32)
        step, loader = run(plan(noise_multiplier=0.0), model, samples=data(dtype=torch.float32))
        for batch in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
                step(*batch)
        ends.append(weights(model))
        assert step.is_certified
    torch.testing.assert_close(ends[0], ends[1], rtol=0.05, atol=0.01)
    assert not torch.equal(ends[0], ends[1])


def test_dropout_repeats_by_the_step_and_leaves_the_global_generator_alone() -> None:
    def trained() -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        step, loader = run(plan(), model)
        for batch in loader:
            torch.rand(1)
            step(*batch)
        return weights(model)

    first = trained()
    state = torch.get_rng_state()
    assert torch.equal(first, trained())
    assert torch.equal(state, torch.get_rng_state())


def test_views_of_a_sample_are_averaged_before_clipping() -> None:
    x, y = data().tensors
    views = torch.stack([x, x + 0.3, x * 0.7], 1)  # (n, k, 4)

    def of_views(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        flat = losses(model, x.flatten(0, 1), y.repeat_interleave(3))
        return flat.view(-1, 3)

    model = mlp()
    made = plan(noise_multiplier=0.0, sample_rate=1.0, steps=1)
    step, loader = run(made, model, of_views, TensorDataset(views, y), views=True)
    before = weights(model)
    grads = [loop_grads(model, losses, views[:, k], y) for k in range(3)]
    flat = torch.stack([torch.cat([g.flatten(1) for g in gs.values()], 1) for gs in grads]).mean(0)
    total = (flat * (0.5 / flat.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
    for batch in loader:
        step(*batch)
    torch.testing.assert_close(weights(model), before - total / 8)
    assert step.is_certified


# Bounds


def test_bounds_by_pattern_clip_each_group() -> None:
    x, y = data().tensors
    for made in (
        plan(noise_multiplier=0.0, sample_rate=1.0, steps=1, max_norm={"0.*": 0.1, "*": 0.2}),
        plan(noise_multiplier=0.0, sample_rate=1.0, steps=1, clipping="per-layer"),
    ):
        model = mlp()
        bounds = [0.1, 0.2] if made.clipping == "flat" else [0.5 / 2**0.5] * 2
        grads = loop_grads(model, losses, x, y)
        total = []
        for layer, bound in zip(("0.", "2."), bounds, strict=True):
            flat = torch.cat([g.flatten(1) for n, g in grads.items() if n.startswith(layer)], 1)
            total.append((flat * (bound / flat.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0))
        step, loader = run(made, model)
        before = weights(model)
        for batch in loader:
            step(*batch)
        torch.testing.assert_close(weights(model), before - torch.cat(total) / 8)


def test_an_adaptive_bound_finds_its_quantile() -> None:
    samples = TensorDataset(torch.ones(400, 1) * torch.arange(400)[:, None].add(1) / 100)
    model = nn.Linear(1, 1, bias=False)
    made = plan(
        steps=150,
        max_norm=0.1,
        sample_rate=0.5,
        expected_batch_size=200,
        clipping=Adaptive(quantile=0.5),
    )
    step, loader = run(
        made,
        model,
        lambda m, x: m(x).sum(1),
        samples,
        optimizer=sgd(model, lr=0.0),
        certify=False,
    )
    for batch in loader:
        step(*batch)
    assert step._bound.sensitivity == pytest.approx(2.0, rel=0.2)  # the median of 0.01 ... 4


def test_an_adaptive_bound_stays_where_norms_are_exact() -> None:
    """The squares of smaller gradients vanish in float32, and a sample would add more than the bound."""
    samples = TensorDataset(torch.full((40, 1000), 2.6e-23))
    model = nn.Linear(1000, 1, bias=False)
    adaptive = Adaptive(quantile=0.0, rate=20.0, noise=2.0)
    made = plan(noise_multiplier=0.0, clipping=adaptive)
    step, loader = run(
        made, model, lambda m, x: m(x)[:, 0], samples, optimizer=sgd(model, lr=0.0), certify=False
    )
    for batch in loader:
        step(*batch)
    assert step._bound.sensitivity == pytest.approx(1e-8)


# Refusals, before any data is touched


class Untouched(TensorDataset):
    """A data set that must not be read."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("read")


def refused(reason: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises(PrivacyError, match=reason) as caught:
        Step(*arguments, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(8),
        nn.BatchNorm1d(8, track_running_stats=False),
        nn.SyncBatchNorm(8),
        nn.InstanceNorm1d(8, track_running_stats=True),
    ],
)
def test_batch_norm_in_training_mode_is_refused(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 3)).double()
    refused(f"{type(layer).__name__} '1' is in training mode", model, sgd(model), losses, plan())


def test_batch_norm_in_eval_mode_works_until_it_trains_again() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    model[1].eval()
    step, loader = run(plan(), model)
    batches = iter(loader)
    step(*next(batches))
    model.train()
    with pytest.raises(PrivacyError, match="BatchNorm1d '1' is in training mode"):
        step(*next(batches))


def test_a_buffer_that_the_forward_changes_is_refused_unless_it_is_public() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.register_buffer("seen", torch.zeros(4).double())

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.detach().sum(0)
            return self.inner(x)

    step, loader = run(plan(), Counting(), certify=False)
    with pytest.raises(PrivacyError, match="changed the buffer 'seen'"):
        step(*next(iter(loader)))
    step, loader = run(plan(), Counting(), certify=False, public_buffers=("se*",))
    step(*next(iter(loader)))


def test_parameters_without_noise_are_refused() -> None:
    model, other = mlp(), mlp()
    refused("not the model's: its gradient would get no noise", model, sgd(other), losses, plan())
    refused("must be a torch.optim.Optimizer, got str", model, "sgd", losses, plan())
    frozen = mlp().requires_grad_(False)
    refused("nothing to train", frozen, sgd(frozen), losses, plan())


def test_an_optimizer_that_repeats_the_loss_is_refused() -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters())
    refused("LBFGS calls the loss several times", model, optimizer, losses, plan())


def test_an_ordinary_gradient_of_before_is_never_applied() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    step, loader = run(plan(), model)
    before = model[0].weight.clone()
    for batch in loader:
        model[0].weight.grad = torch.ones_like(model[0].weight)
        losses(model, *data().tensors).sum().backward()
        step(*batch)
        assert all(p.grad is None for p in model.parameters())
    assert torch.equal(before, model[0].weight)
    calm = mlp()
    calm[0].weight.requires_grad_(False)
    once, batches = run(plan(), calm)
    for batch in batches:
        once(*batch)
    assert torch.equal(weights(calm), weights(model))


def test_parameters_that_change_during_a_run_are_refused() -> None:
    model = mlp()
    optimizer = sgd(model)
    step, loader = run(plan(), model, optimizer=optimizer)
    batches = iter(loader)
    step(*next(batches))
    batch = next(batches)
    model[0].bias.requires_grad_(False)
    with pytest.raises(PrivacyError, match=r"trained parameters have changed .*\(0.bias\)"):
        step(*batch)
    model[0].bias.requires_grad_(True)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(PrivacyError, match="group 1 of the optimizer"):
        step(*batch)
    del optimizer.param_groups[1]
    step(*batch)


def test_bad_arguments_are_refused() -> None:
    model = mlp()
    optimizer = sgd(model)
    refused("must be a torch.nn.Module", "model", optimizer, losses, plan())
    refused("must be a Plan, got dict", model, optimizer, losses, {})
    refused("loss_fn must be a function", model, optimizer, None, plan())
    refused("no expected_batch_size", model, optimizer, losses, plan(expected_batch_size=None))
    refused("piece_size must be", model, optimizer, losses, plan(), piece_size=0)
    refused("piece_size must be", model, optimizer, losses, plan(), piece_size=True)
    refused("backend must be one of", model, optimizer, losses, plan(), backend="jit")
    refused("pass backend='inductor'", model, optimizer, losses, plan(), cuda_graphs=True)
    refused("needs one shape: pass piece_size", model, optimizer, losses, plan(), backend="eager")
    adaptive = plan(clipping=Adaptive(noise=2.0))
    refused("moves at each step", model, optimizer, losses, adaptive, backend="eager", piece_size=2)
    grouped = plan(max_norm={"0.*": 1.0})
    refused("no bound of the plan matches parameter '2.weight'", model, optimizer, losses, grouped)
    for bounds in ({"9.*": 1.0, "*": 1.0}, {"*": 1.0, "9.*": 2.0}, {"*": 1.0, "0.*": 2.0}):
        idle = "'9.*'" if "9.*" in bounds else "'0.*'"
        refused(re.escape(idle), model, optimizer, losses, plan(max_norm=bounds))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_reduced_loss_is_refused(reduction: str) -> None:
    step, loader = run(
        plan(), loss_fn=lambda m, x, y: nn.functional.cross_entropy(m(x), y, reduction=reduction)
    )
    with pytest.raises(PrivacyError, match=r"shape \(n,\), one for each sample, got \(\)"):
        step(*next(iter(loader)))
    assert step.number == 0


def test_a_batch_of_another_loader_is_refused() -> None:
    model = mlp()
    step = Step(model, sgd(model), losses, plan())
    for batch in DataLoader(data(), batch_size=8):
        with pytest.raises(PrivacyError, match="does not come from the plan's sampler"):
            step(*batch)
        break
    made = plan()
    step, _ = run(made)
    for batch in DataLoader(data(), batch_size=8, shuffle=True):
        with pytest.raises(PrivacyError, match="that the plan's sampler did not draw"):
            step(*batch)
        break


def test_a_batch_that_was_cut_is_refused() -> None:
    step, loader = run(plan(sample_rate=0.5))
    x, y = next(iter(loader))
    with pytest.raises(PrivacyError, match=f"drew {len(x)} samples"):
        step(x[1:], y[1:])
    step(x, y)


def test_a_batch_takes_one_step_and_none_is_skipped() -> None:
    step, loader = run(plan(sample_rate=0.5))
    batches = iter(loader)
    batch = next(batches)
    step(*batch)
    with pytest.raises(PrivacyError, match="got batch 0 of the plan's loader"):
        step(*batch)
    next(batches)
    with pytest.raises(PrivacyError, match="got batch 2 of the plan's loader"):
        step(*next(batches))
    for batch in loader:  # goes on where the run is
        step(*batch)
    assert step.number == 6


def test_a_step_beyond_the_plan_is_refused() -> None:
    step, loader = run(plan(steps=2))
    for batch in loader:
        step(*batch)
    assert [*loader] == []
    with pytest.raises(PrivacyError, match="has 2 steps, and all of them are spent"):
        step(*batch)


def test_pieces_never_cut_what_all_samples_share() -> None:
    scale = torch.arange(1.0, 5.0, dtype=torch.float64)

    def collated(items: list[Any]) -> Any:
        return *torch.utils.data.default_collate(items), scale

    def scaled(model: nn.Module, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return losses(model, x, y) * scale.sum()

    ends = []
    for piece_size in (None, 3, 1):
        model, made = mlp(), plan(noise_multiplier=0.0, sample_rate=0.1, steps=20)
        loader = made.loader(data(), seeded(), collate_fn=collated)
        step = Step(model, sgd(model), scaled, made, piece_size=piece_size)
        sizes = []
        for batch in loader:
            step(*batch)
            sizes.append(len(batch[0]))
        assert sizes[0] != 4
        assert 4 in sizes
        ends.append(weights(model))
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused(block: Any) -> None:
    step, loader = run(plan())
    for batch in loader:
        with block(), pytest.raises(PrivacyError, match="gradients are switched off"):
            step(*batch)
        step(*batch)
    assert step.number == 6


def test_a_second_loader_during_a_run_is_refused() -> None:
    made = plan()
    step, loader = run(made)
    step(*next(iter(loader)))
    with pytest.raises(PrivacyError, match="another loader during this run"):
        step(*next(iter(made.loader(data()))))


def test_refusals_leave_the_model_as_it_was() -> None:
    model = mlp()
    step, loader = run(plan(sample_rate=0.5), model)
    before = weights(model)
    x, y = next(iter(loader))
    with pytest.raises(PrivacyError):
        step(x[1:], y[1:])
    with pytest.raises(ValueError, match="batch_size"):
        step(x[1:], y)
    assert torch.equal(before, weights(model))
    assert all(p.grad is None for p in model.parameters())


def test_a_record_with_several_losses_is_refused() -> None:
    def doubled(items: list[Any]) -> Any:
        x, y = default_collate(items)
        return torch.cat([x, x]), torch.cat([y, y]), torch.arange(len(x))

    for options in (
        {},
        {"certify": False},
        {"piece_size": 3},
        {"backend": "eager", "piece_size": 99},
    ):
        made, model = plan(), mlp()
        step = Step(model, sgd(model), lambda m, x, y, _: losses(m, x, y), made, **options)
        before = weights(model)
        with pytest.raises(PergradError, match="losses for"):
            step(*next(iter(made.loader(data(), seeded(), collate_fn=doubled))))
        assert torch.equal(before, weights(model))


@pytest.mark.parametrize("options", [{}, {"backend": "eager", "piece_size": 16}])
def test_a_first_batch_with_samples_that_are_not_finite_trains_on_the_others(
    options: dict[str, Any],
) -> None:
    x, y = data().tensors
    x[::3] = float("nan")
    step, loader = run(plan(noise_multiplier=0.0), samples=TensorDataset(x, y), **options)
    found = 0
    for batch in loader:
        step(*batch)
        assert step.last is not None
        assert step.last.nonfinite == int(batch[0].isnan().any(1).sum())
        found += step.last.nonfinite
    assert found
    assert weights(step._model).isfinite().all()


def test_samples_that_are_not_finite_hide_no_mixing() -> None:
    x, y = data().tensors
    x[::3] = float("nan")

    def centred(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return losses(model, x - x.nanmean(0), y)

    step, loader = run(plan(), loss_fn=centred, samples=TensorDataset(x, y))
    with pytest.raises(PergradError, match="mixes samples"):
        step(*next(iter(loader)))


class Codebook(nn.Module):
    """Writes what it sees into a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.codes = nn.Parameter(torch.zeros(4, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.codes.mul_(0.9).add_(x.detach().sum(0))
        logits: Tensor = self.inner(x)
        return logits


@pytest.mark.parametrize("options", [{}, {"certify": False}, {"backend": "eager", "piece_size": 8}])
def test_a_frozen_parameter_that_the_forward_changes_is_refused(options: dict[str, Any]) -> None:
    step, loader = run(plan(), Codebook(), **options)
    with pytest.raises(PrivacyError, match="changed the parameter 'codes'"):
        step(*next(iter(loader)))


def test_two_threads_do_not_share_a_step() -> None:
    step, loader = run(plan())
    batch = next(iter(loader))
    found: list[str] = []

    def nested(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with pytest.raises(PrivacyError, match="in the middle of this step"):
            step(*batch)
        found.append("refused")
        return losses(model, x, y)

    step._summation._loss_fn = nested
    step(*batch)
    assert found
    assert step.number == 1
