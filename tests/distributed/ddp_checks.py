"""Checks of DistributedDataParallel on two ranks; see ranks.py."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import pergrad
from tests.distributed.models import (
    SPLITS,
    all_near,
    batch,
    clipped_of,
    losses,
    made,
    near,
    norms_of,
    oracle,
    own,
    plain_step,
    recorded,
    refusal,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "bucket views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 1e-5},
}


def wrapped(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(made(), **options)


def sums_over_ranks(find: Callable[[dict[str, Tensor]], Any], quantity: Any) -> Iterator[Any]:
    """Returns quantities over all ranks, and what one process computes from all samples."""
    model, x = made(), batch()
    for split in SPLITS:
        found = copy.copy(quantity)
        recorded(model, own(x, split), found)
        yield found.all_reduce(), find(oracle(model, x)), split


def check_clipped_sums_are_those_of_one_process() -> None:
    for found, wanted, split in sums_over_ranks(
        lambda grads: clipped_of(grads, 1.0), pergrad.ClippedSum(1.0)
    ):
        all_near(found.result, wanted)
        assert len(found.norms) == len(own(batch(), split))


def check_second_moments_are_those_of_one_process() -> None:
    for found, wanted, _ in sums_over_ranks(
        lambda grads: {name: g.square().sum(0) for name, g in grads.items()}, pergrad.SecondMoment()
    ):
        all_near(found.result, wanted)


def check_sums_are_those_of_one_process() -> None:
    for found, wanted, _ in sums_over_ranks(
        lambda grads: {name: g.sum(0) for name, g in grads.items()}, pergrad.Sum()
    ):
        all_near(found.result, wanted)


def check_variances_and_means_are_those_of_one_process() -> None:
    for found, wanted, _ in sums_over_ranks(
        lambda grads: {name: (g.var(0), g.mean(0)) for name, g in grads.items()}, pergrad.Variance()
    ):
        all_near(found.result, {name: of[0] for name, of in wanted.items()})
        all_near(found.mean, {name: of[1] for name, of in wanted.items()})
        assert found.count == 8


def check_noise_scales_are_those_of_one_process() -> None:
    model = made()
    whole, parts = pergrad.NoiseScale(), pergrad.NoiseScale()
    for seed, split in enumerate(SPLITS):
        x = batch(seed=seed)
        recorded(model, x, whole)
        recorded(model, own(x, split), parts)
        parts.all_reduce()
    for name in ("trace", "squared_mean", "result", "running"):
        found, wanted = getattr(parts, name), getattr(whole, name)
        assert abs(found - wanted) <= 1e-12 * abs(wanted), (name, found, wanted)


def check_gathered_norms_are_in_the_order_of_the_ranks() -> None:
    model, x = made(), batch()
    grads = oracle(model, x)
    for split in SPLITS:
        norms = pergrad.Norms()
        recorded(model, own(x, split), norms)
        norms.all_gather()
        near(norms.result, norms_of(grads))
        all_near(norms.per_param, {name: g.flatten(1).norm(dim=1) for name, g in grads.items()})


def check_a_group_of_some_ranks_reduces_over_them_alone() -> None:
    model, x = made(), batch()
    group = dist.new_group([0])
    quantity = pergrad.ClippedSum(1.0)
    recorded(model, own(x), quantity)
    if dist.get_rank() == 0:
        all_near(quantity.all_reduce(group).result, clipped_of(oracle(model, own(x)), 1.0))
    else:
        assert "is not in the process group" in refusal(lambda: quantity.all_reduce(group))


def check_a_second_reduction_is_an_error() -> None:
    model, x = made(), batch()
    quantity, other = pergrad.ClippedSum(1.0), pergrad.ClippedSum(1.0)
    recorded(model, own(x), quantity)
    recorded(model, own(x), other)
    quantity.all_reduce()
    assert "already" in refusal(quantity.all_reduce)
    assert "add them first" in refusal(lambda: quantity.__iadd__(other))


def check_ranks_with_different_parameters_are_told() -> None:
    model, x = made(), batch()
    quantity = pergrad.SecondMoment()
    if dist.get_world_size() == 1:
        return
    with pergrad.record(model, quantity, params=["first.*", "last.*"][dist.get_rank() % 2]):
        losses(model, own(x)).sum().backward()
    assert "another rank something else" in refusal(quantity.all_reduce)


def check_recorded_steps_leave_plain_steps_as_they_were() -> None:
    x = own(batch())
    for name, options in OPTIONS.items():
        want, found = wrapped(**options), wrapped(**options)
        for called in (found, found.module):
            recorded(called, x, pergrad.Norms(), called=found)
        for _ in range(3):
            plain_step(want, x)
            plain_step(found, x)
            recorded(found, x, pergrad.Norms())
            for (n, p), q in zip(want.named_parameters(), found.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad), (name, n)
        assert found.static_graph == want.static_graph
        assert found.find_unused_parameters == want.find_unused_parameters
        assert found.require_forward_param_sync == want.require_forward_param_sync


def check_training_is_that_of_one_process_and_bit_equal_across_ranks() -> None:
    for options in OPTIONS.values():
        model = wrapped(**options)
        one = made()
        for step in range(5):
            x = batch(seed=step)
            clipped = pergrad.ClippedSum(1.0)
            recorded(model, own(x, SPLITS[step % 2]), clipped)
            clipped.assign(reduce=True)
            for p, g in zip(
                one.parameters(), clipped_of(oracle(one, x), 1.0).values(), strict=True
            ):
                p.grad = g
            for trained in (model, one):
                torch.optim.SGD(trained.parameters(), lr=0.1).step()
                trained.zero_grad()
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            near(p.detach(), q.detach())
            others = [torch.empty_like(p) for _ in range(dist.get_world_size())]
            dist.all_gather(others, p.detach())
            assert all(torch.equal(p, other) for other in others)


def check_a_sum_of_one_rank_is_not_assigned() -> None:
    model, x = wrapped(), own(batch())
    for called, runs in ((model, model), (model.module, model), (model.module, model.module)):
        if runs is model.module and dist.get_world_size() == 1:
            continue  # its wrapper is looked for where there are other ranks
        clipped = pergrad.ClippedSum(1.0)
        recorded(called, x, clipped, called=runs)
        message = refusal(clipped.assign)
        assert "DistributedDataParallel" in message
        assert "reduce=True" in message
        assert all(p.grad is None for p in model.parameters())


def check_a_module_without_a_wrapper_may_keep_its_sums() -> None:
    model, x = made(), own(batch())
    clipped = pergrad.ClippedSum(1.0)
    recorded(model, x, clipped)
    clipped.assign()
    all_near({name: p.grad for name, p in model.named_parameters()}, clipped.result)


def check_ordinary_gradients_may_be_kept() -> None:
    model, want, x = wrapped(), wrapped(), own(batch())
    for _ in range(2):
        norms = pergrad.Norms()
        model.zero_grad()
        with pergrad.record(model, norms, keep_grad=True):
            losses(model, x).sum().backward()
        plain_step(want, x)
        near(norms.result, norms_of(oracle(made(), x)))
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


def check_no_sync_and_communication_hooks_are_left_alone() -> None:
    model, want, x = wrapped(), wrapped(), own(batch())
    for ddp in (model, want):
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    with model.no_sync(), want.no_sync():
        recorded(model, x, pergrad.Norms())
        plain_step(model, x)
        plain_step(want, x)
    for step in range(2):
        losses(model, x + step).sum().backward()
        losses(want, x + step).sum().backward()
    for p, q in zip(model.parameters(), want.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def check_buffers_are_those_of_a_plain_step() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = made()
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += dist.get_rank() + 1
            return self.inner(x)

    model, want, x = (
        DistributedDataParallel(Counting()),
        DistributedDataParallel(Counting()),
        own(batch()),
    )
    for _ in range(2):
        recorded(model, x, pergrad.Norms())
        plain_step(want, x)
    assert model.module.seen == want.module.seen


def check_a_parameter_that_is_not_recorded_is_refused() -> None:
    model, x = wrapped(), own(batch())

    def step() -> None:
        with pergrad.record(model.module.last, pergrad.Norms()):
            losses(model, x).sum().backward()

    message = refusal(step)
    assert "first.weight" in message
    assert "record the whole wrapper" in message
    norms = pergrad.Norms()
    with pergrad.record(model, norms, params="module.last.*"):
        losses(model, x).sum().backward()
    plain_step(model, x)


def check_join_is_refused_where_ranks_may_have_left() -> None:
    model, x = wrapped(), batch(2)
    clipped = pergrad.ClippedSum(1.0)
    with Join([model]):
        recorded(model, x, clipped)
        near(clipped.norms, norms_of(oracle(made(), x)))
        message = refusal(clipped.all_reduce)
        assert "Join" in message
        assert "empty batches" in message


def check_the_contract_fills_grad_samples_of_this_rank() -> None:
    model, x = wrapped(), own(batch())
    pergrad.call_for_per_sample_grads(model)(x).square().sum().backward()
    found = {name: p.grad_sample for name, p in model.module.named_parameters()}
    all_near(found, oracle(made(), x))
    for p in model.parameters():
        del p.grad_sample
    plain_step(model, x)


def check_verify_and_certify_prove_a_wrapped_model() -> None:
    model, x = wrapped(), own(batch())
    assert pergrad.certify(model, losses, x, quiet=True).ok
    with pergrad.record(model, pergrad.Norms(), certify=True):
        losses(model, x).sum().backward()
    assert pergrad.verify(model, losses, x, quiet=True).ok
    plain_step(model, x)


class Scaled(nn.Module):
    """Has a buffer, which DDP broadcasts before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = made()
        self.register_buffer("scale", torch.tensor(1.0 + dist.get_rank(), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.scale * x)


def check_compiled_steps_do_not_leave_out_broadcasts_of_buffers() -> None:
    model, x = DistributedDataParallel(Scaled()), own(batch())
    message = refusal(lambda: pergrad.compiled(model, losses, pergrad.Norms()))
    assert "'scale'" in message
    assert "forward_sync_buffers=False" in message
    options = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"
    model = DistributedDataParallel(Scaled(), **{name: False})
    norms = pergrad.Norms()
    step = pergrad.compiled(model, losses, norms, backend="eager")
    wanted = norms_of(oracle(model.module, x))
    for _ in range(3):
        step(x)
        near(norms.result, wanted)
    plain_step(model, x)


def check_compiled_steps_are_exact_and_reduced() -> None:
    model, x = wrapped(), batch()
    norms, clipped = pergrad.Norms(), pergrad.ClippedSum(1.0)
    step = pergrad.compiled(model, losses, norms, clipped, backend="eager")
    for seed in range(4):
        x = batch(seed=seed)
        step(own(x))
        grads = oracle(made(), x)
        near(norms.result, own(norms_of(grads)))
        assert "reduce=True" in refusal(clipped.assign)
        clipped.all_reduce()
        found = {name.removeprefix("module."): t for name, t in clipped.result.items()}
        all_near(found, clipped_of(grads, 1.0))
    assert step.graphs == 1
    plain_step(model, own(x))
