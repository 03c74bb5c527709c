"""Checks of `fully_shard` on two ranks; see ranks.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import pergrad
from pergrad.engine.recording.recording import is_recording
from pergrad.errors import FallbackWarning, MixedSamplesError
from pergrad.runtime import internals
from tests.distributed.models import (
    SPLITS,
    Block,
    Net,
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


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.last(h)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].wide.weight = self.blocks[0].wide.weight


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.blocks[0].wide.weight.requires_grad_(False)


class Adapted(Net):
    """Low-rank adapters beside frozen layers."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.down, block.up = nn.Linear(4, 1, bias=False), nn.Linear(1, 4, bias=False)
            block.forward = self.adapted.__get__(block)

    @staticmethod
    def adapted(block: Any, x: Tensor) -> Tensor:
        return Block.forward(block, x) + block.up(block.down(x))


class Normed(Net):
    """Derived weights: a layer under weight normalization, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.utils.parametrizations.weight_norm(self.last)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks[1](self.blocks[0](self.blocks[1](self.first(x)))))


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].spare = nn.Linear(4, 4)


def sharded(model: nn.Module, **options: Any) -> Any:
    options.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    if isinstance(model, Tied):
        fully_shard(list(model.blocks), **options)
    else:
        for block in model.blocks:
            fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def whole(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.full_tensor() for name, t in found.items()}


def every_quantity_is_that_of_one_process(
    kind: Callable[[], nn.Module] = Net, splits: tuple[str, ...] = SPLITS[:1], **options: Any
) -> None:
    x = batch()
    one = made(kind)
    grads = oracle(one, x)
    plain = plain_step(sharded(made(kind), **options), own(x))
    for split in splits:
        model = sharded(made(kind), **options)
        mine = {name: own(g, split) for name, g in grads.items()}
        total, moment, variance = pergrad.Sum(), pergrad.SecondMoment(), pergrad.Variance()
        norms, full, noise = pergrad.Norms(), pergrad.Grads(), pergrad.NoiseScale()
        kept, low = pergrad.ClippedSum(1.0), pergrad.ClippedSum(1.0, memory="low")
        recorded(model, own(x, split), total, moment, variance, norms, full, noise, kept)
        recorded(model, own(x, split), low)
        all_near(full.result, mine)
        near(norms.result, norms_of(mine))
        for clipped in (kept, low):
            all_near(whole(clipped.result), clipped_of(grads, 1.0))
            near(clipped.norms, norms_of(mine))
        all_near(whole(total.result), {name: g.sum(0) for name, g in grads.items()})
        all_near(whole(moment.result), {name: g.square().sum(0) for name, g in grads.items()})
        all_near(whole(variance.result), {name: g.var(0) for name, g in grads.items()})
        all_near(whole(variance.mean), {name: g.mean(0) for name, g in grads.items()})
        want = pergrad.NoiseScale()
        recorded(one, x, want)
        for name in ("trace", "squared_mean", "result", "running"):
            wanted = getattr(want, name)
            assert abs(getattr(noise, name) - wanted) <= 1e-12 * abs(wanted), name
        for p, shard in zip(
            [p for p in model.parameters() if p.requires_grad], kept.result.values(), strict=True
        ):
            assert shard.placements == p.placements
            assert p.grad is None
        norms.all_gather()
        near(norms.result, norms_of(grads))
        all_near(plain_step(model, own(x)), plain, 0.0)


def check_every_quantity() -> None:
    every_quantity_is_that_of_one_process(splits=SPLITS)


def check_parameters_that_stay_unsharded_after_the_forward() -> None:
    every_quantity_is_that_of_one_process(reshard_after_forward=False)


def check_units_of_single_layers_and_units_of_units() -> None:
    class Layered(Net):
        def __init__(self) -> None:
            super().__init__()
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            self.double()
            for block in self.blocks:
                for layer in (block.norm, block.wide, block.narrow):
                    fully_shard(layer, mesh=mesh)
            fully_shard(self.last, mesh=mesh)

    x = batch()
    grads = oracle(made(), x)
    torch.manual_seed(0)
    model = sharded(Layered())
    clipped, low = pergrad.ClippedSum(1.0), pergrad.ClippedSum(1.0, memory="low")
    total = pergrad.Sum()
    recorded(model, own(x), clipped, total)
    recorded(model, own(x), low)
    all_near(whole(total.result), {name: g.sum(0) for name, g in grads.items()})
    for found in (clipped, low):
        all_near(whole(found.result), clipped_of(grads, 1.0))


class Branching(Block):
    """Uses one of its layers or the other, as data may decide."""

    def forward(self, x: Tensor) -> Tensor:
        other = self.other if dist.get_rank() % 2 else self.wide
        return x + self.narrow(other(self.norm(x)).tanh())


class Branched(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.other = nn.Linear(4, 8)
            block.__class__ = Branching


def check_ranks_that_reach_different_parameters() -> None:
    x, model = batch(), sharded(made(Branched))
    mine = own(x)
    wanted = {name: g.sum(0) for name, g in oracle(made(Branched), mine).items()}
    for t in wanted.values():
        dist.all_reduce(t)
    total = pergrad.Sum()
    recorded(model, mine, total)
    all_near(whole(total.result), wanted)


class WatchedSum(pergrad.Sum):
    """Counts the blocks whose sums are whole at a time."""

    most = 0

    def consume(self, name: str, gradients: Any) -> None:
        super().consume(name, gradients)
        whole = {
            n.split(".")[1] for n, t in self._totals.items() if type(t) is Tensor and "." in n[7:]
        }
        self.most = max(self.most, len(whole))


def check_the_sums_of_at_most_two_blocks_are_whole_at_a_time() -> None:
    model, watched = sharded(made(lambda: Net(blocks=6))), WatchedSum()
    recorded(model, own(batch()), watched)
    assert 1 <= watched.most <= 2, watched.most
    assert all(type(t).__name__ == "DTensor" for t in watched.result.values())


def check_checkpoints() -> None:
    every_quantity_is_that_of_one_process(Checkpointed)


def check_tied_parameters() -> None:
    every_quantity_is_that_of_one_process(Tied)


def check_frozen_parameters() -> None:
    every_quantity_is_that_of_one_process(Frozen)


def check_adapters_on_a_frozen_sharded_base() -> None:
    every_quantity_is_that_of_one_process(Adapted)


def check_derived_weights_and_blocks_that_run_twice() -> None:
    every_quantity_is_that_of_one_process(Normed)


def check_unused_parameters() -> None:
    every_quantity_is_that_of_one_process(Unused)


def check_shards_that_are_offloaded() -> None:
    every_quantity_is_that_of_one_process(offload_policy=CPUOffloadPolicy(pin_memory=False))


def check_hybrid_meshes() -> None:
    shape = {1: (1, 1), 2: (2, 1), 4: (2, 2)}[dist.get_world_size()]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    every_quantity_is_that_of_one_process(mesh=mesh)


def check_training_is_that_of_one_process() -> None:
    for options in ({}, {"reshard_after_forward": False}):
        model, one = sharded(made(), **options), made()
        for step in range(3):
            x = batch(seed=step)
            clipped = pergrad.ClippedSum(1.0, memory=("kept", "low", "high")[step])
            recorded(model, own(x), clipped)
            clipped.assign(reduce=True)
            for p, g in zip(
                one.parameters(), clipped_of(oracle(one, x), 1.0).values(), strict=True
            ):
                p.grad = g
            for trained in (model, one):
                torch.optim.SGD(trained.parameters(), lr=0.1).step()
                trained.zero_grad()
        for p, q in zip(model.parameters(), one.parameters(), strict=True):
            near(p.detach().full_tensor(), q.detach())


def check_training_with_uneven_batches_and_none() -> None:
    model, one = sharded(made()), made()
    for step in range(5):
        x, split = batch(seed=step).roll(step, 0), SPLITS[step % 2]
        clipped = pergrad.ClippedSum(1.0, memory=("kept", "low")[step % 2])
        recorded(model, own(x, split), clipped)
        clipped.assign(reduce=True)
        for p, g in zip(one.parameters(), clipped_of(oracle(one, x), 1.0).values(), strict=True):
            p.grad = g
        for trained in (model, one):
            torch.optim.SGD(trained.parameters(), lr=0.1).step()
            trained.zero_grad()
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        near(p.detach().full_tensor(), q.detach())


def check_ordinary_gradients_may_be_kept() -> None:
    x, model = batch(), sharded(made())
    want = plain_step(sharded(made()), own(x))
    norms = pergrad.Norms()
    recorded(model, own(x), norms, keep_grad=True)
    near(norms.result, norms_of(oracle(made(), own(x))))
    all_near({name: p.grad.full_tensor() for name, p in model.named_parameters()}, want)


def check_a_mixed_precision_policy() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    x = batch().float()
    model, one = sharded(made().float(), mp_policy=policy), made().bfloat16()
    full, clipped, norms = pergrad.Grads(), pergrad.ClippedSum(1.0), pergrad.Norms()
    wanted_grads, wanted = pergrad.Grads(), pergrad.ClippedSum(1.0)
    recorded(model, own(x), full, clipped, norms)
    recorded(one, x.bfloat16(), wanted_grads, wanted)
    near(norms.result, own(wanted.norms), 2e-3)
    all_near(whole(clipped.result), wanted.result, 2e-3)
    rounded = {name: g.bfloat16().float() for name, g in full.result.items()}
    all_near(rounded, {n: own(g).float() for n, g in wanted_grads.result.items()}, 1e-6)
    near(norms.result, own(norms_of(oracle(made(), batch()))).float(), 0.05)
    assert {t.dtype for t in (*full.result.values(), *clipped.result.values())} == {torch.float32}


def check_an_evaluation_leaves_the_root_unsharded_and_does_not_matter() -> None:
    x, model = batch(), sharded(made())
    with torch.no_grad():
        model(own(x))
    clipped = pergrad.ClippedSum(1.0)
    recorded(model, own(x), clipped)
    all_near(whole(clipped.result), clipped_of(oracle(made(), x), 1.0))


def check_chosen_parameters() -> None:
    x, model = batch(), sharded(made())
    clipped = pergrad.ClippedSum(1.0)
    recorded(model, own(x), clipped, params=["blocks.1.*", "last.bias"])
    grads = oracle(made(), x)
    some = {n: g for n, g in grads.items() if n.startswith("blocks.1.") or n == "last.bias"}
    all_near(whole(clipped.result), clipped_of(some, 1.0))
    all_near(plain_step(model, own(x)), plain_step(sharded(made()), own(x)), 0.0)


def check_one_rank_of_a_sum_is_not_assigned() -> None:
    x, model = batch(), sharded(made())
    clipped = pergrad.ClippedSum(1.0)
    recorded(model, own(x), clipped)
    message = refusal(clipped.assign)
    assert "fully_shard" in message
    assert "reduce=True" in message
    clipped.assign(reduce=True)
    wanted = clipped_of(oracle(made(), x), 1.0)
    all_near({name: p.grad.full_tensor() for name, p in model.named_parameters()}, wanted)


def check_the_contract_fills_grad_samples_of_this_rank() -> None:
    x, model = batch(), sharded(made())
    pergrad.call_for_per_sample_grads(model)(own(x)).square().sum().backward()
    all_near({name: p.grad_sample for name, p in model.named_parameters()}, oracle(made(), own(x)))


def check_grads_and_norms() -> None:
    x, model = own(batch()), sharded(made())
    wanted = oracle(made(), x)
    all_near(pergrad.grads(model, losses, x), wanted)
    near(pergrad.norms(model, losses, x), norms_of(wanted))


def check_an_error_in_the_middle_leaves_the_model_ready() -> None:
    x, model = batch(), sharded(made())

    def mixed(model: nn.Module, x: Tensor) -> Tensor:
        return losses(model, x - model(x).mean(0).sum())

    assert refusal(lambda: pergrad.norms(model, mixed, x))
    near(pergrad.norms(model, losses, x), norms_of(oracle(made(), x)))


def check_flat_parameters_are_refused_by_their_name() -> None:
    x = own(batch())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a world of one rank
        flat = FullyShardedDataParallel(made(), device_id=torch.device("cpu"), use_orig_params=True)
    message = refusal(lambda: pergrad.norms(flat, losses, x))
    assert "FSDP1" in message
    assert "fully_shard" in message


def check_compiled_steps_are_refused_with_the_way_out() -> None:
    x, model = own(batch()), sharded(made())
    message = refusal(lambda: pergrad.compiled(model, losses, pergrad.Norms()))
    assert "pergrad.compiled" in message
    assert "fully_shard" in message
    assert "pergrad.record" in message
    assert "linear" in str(pergrad.explain(model, losses, x))
    near(pergrad.norms(model, losses, x), norms_of(oracle(made(), x)))


def check_verify_and_certify_prove_a_sharded_model() -> None:
    for options in ({}, {"reshard_after_forward": False}):
        x, model = own(batch()), sharded(made(), **options)
        wanted = norms_of(oracle(made(), x))
        assert pergrad.certify(model, losses, x, quiet=True).ok  # before the first plain step
        assert pergrad.verify(model, losses, x, quiet=True).ok
        near(pergrad.norms(model, losses, x, certify=True), wanted)
        near(pergrad.norms(model, losses, x, fallback="loop"), wanted)
        norms, clipped = pergrad.Norms(), pergrad.ClippedSum(1.0)
        recorded(model, x, norms, clipped, certify=True)
        near(norms.result, wanted)
        all_near(whole(clipped.result), clipped_of(oracle(made(), batch()), 1.0))
        recorded(model, x, pergrad.Norms(), verify=True)
        assert {type(p).__name__ for p in model.parameters()} == {"DTensor"}
        plain = plain_step(sharded(made(), **options), x)
        all_near(plain_step(model, x), plain, 0.0)


def check_certificates_of_checkpoints_ties_and_policies() -> None:
    x = own(batch())
    for kind in (Checkpointed, Tied, Adapted):
        assert pergrad.certify(sharded(made(kind)), losses, x, quiet=True).ok
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(made().float(), mp_policy=policy)
    assert pergrad.certify(model, losses, x.float(), quiet=True).ok
    assert pergrad.verify(model, losses, x.float(), quiet=True).ok
    losses(model, x.float()).sum().backward()


def check_the_loop_runs_on_each_rank_by_itself() -> None:
    x, model = own(batch()), sharded(made())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        found = pergrad.norms(model, out_of_sight, x, fallback="loop")
    near(found, norms_of(oracle(made(), x)))
    all_near(plain_step(model, x), plain_step(sharded(made()), x), 0.0)


def out_of_sight(model: nn.Module, x: Tensor) -> Tensor:
    """Losses of the samples, by a function that pergrad refuses."""
    output = model(x)
    if is_recording():
        raise MixedSamplesError("a stand-in for a refusal")
    return output.square().sum(-1)


def check_shards_over_fewer_ranks_after_the_forward() -> None:
    if dist.get_world_size() == 4:
        every_quantity_is_that_of_one_process(reshard_after_forward=2)


def check_optimizers_that_write_past_versions_do_not_matter() -> None:
    x, model = own(batch()), sharded(made())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        total = pergrad.Sum()
        recorded(model, x, total)
        total.assign(reduce=True)
        optimizer.step()


def check_modes_of_the_user_may_be_within_the_block() -> None:
    x, model = own(batch()), sharded(made())
    norms = pergrad.Norms()
    with pergrad.record(model, norms), torch.device("cpu"):
        losses(model, x).sum().backward()
    near(norms.result, norms_of(oracle(made(), x)))


def check_parameters_are_gathered_out_of_sight() -> None:
    class Seen(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: set[str] = set()

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names.add(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    x, model = own(batch()), sharded(made())
    with Seen() as seen, pergrad.record(model, pergrad.Norms()):
        losses(model, x).sum().backward()
    assert "copy_" not in seen.names  # of the shards
    assert "linear" in seen.names
    for unit in (*model.blocks, model):
        for group in internals.fsdp_groups_of(unit):
            assert "unshard" not in vars(group)
