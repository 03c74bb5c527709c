"""Checks of tensor and sequence parallel models, alone and inside of `fully_shard`; see ranks.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pergrad
import pergrad.private
from pergrad.testing import loop_grads
from tests.distributed.models import (
    Net,
    all_near,
    batch,
    clipped_of,
    losses,
    made,
    near,
    norms_of,
    oracle,
    refusal,
)

BLOCKS = {
    f"blocks.{k}.{name}": style()
    for k in (0, 1)
    for name, style in (("wide", ColwiseParallel), ("narrow", RowwiseParallel))
}


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def full(t: Any) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def whole(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: full(t) for name, t in found.items()}


class Scale(nn.Module):
    """Normalises by the root mean square, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = Scale(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        heads = [
            part(h).unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.q, self.k, self.v)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.o(mixed)


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8, padding_idx=0)
        self.attention = Attention()
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.attention(self.table(x))))


class Checkpointed(Language):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(checkpoint(self.attention, self.table(x), use_reentrant=False)))


def tokens(size: int = 8) -> Tensor:
    return torch.randint(11, (size, 4), generator=torch.Generator().manual_seed(3))


def of_tokens(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(full(model(x)).transpose(1, 2), x, reduction="none").sum(1)


def plan(*, of_sequences: bool) -> dict[str, Any]:
    """Shards heads, the table by rows, the head by columns; and activations by positions."""
    at = Shard(1) if of_sequences else Replicate()
    found: dict[str, Any] = {
        "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=at),
        "head": ColwiseParallel(input_layouts=at, output_layouts=Replicate()),
        "attention.o": RowwiseParallel(output_layouts=at),
    }
    for name in "qkv":
        found[f"attention.{name}"] = ColwiseParallel(input_layouts=at)
    if of_sequences:
        found |= {"norm": SequenceParallel(), "attention.norm": SequenceParallel()}
    return found


def language(kind: type[nn.Module] = Language, *, of_sequences: bool = True) -> nn.Module:
    return parallelize_module(made(kind), mesh(), plan(of_sequences=of_sequences))


def every_quantity_is_that_of_one_process(
    model: nn.Module,
    one: nn.Module,
    x: Tensor,
    loss: Callable[..., Tensor] = losses,
) -> None:
    grads = loop_grads(one, loss, x)

    def step(*quantities: Any, **options: Any) -> None:
        with pergrad.record(model, *quantities, **options):
            loss(model, x).sum().backward()

    norms, full_grads, total = pergrad.Norms(), pergrad.Grads(), pergrad.Sum()
    moment, variance, noise = pergrad.SecondMoment(), pergrad.Variance(), pergrad.NoiseScale()
    gram, sketch = pergrad.Gram(), pergrad.Projection(8)
    kept, low = pergrad.ClippedSum(1.0), pergrad.ClippedSum(1.0, memory="low")
    step(norms, full_grads, total, moment, variance, noise, gram, sketch, kept)
    step(low)
    near(norms.result, norms_of(grads))
    all_near(norms.per_param, {name: g.flatten(1).norm(dim=1) for name, g in grads.items()})
    all_near(full_grads.result, grads)
    for clipped in (kept, low):
        all_near(whole(clipped.result), clipped_of(grads, 1.0))
        near(clipped.norms, norms_of(grads))
    all_near(whole(total.result), {name: g.sum(0) for name, g in grads.items()})
    all_near(whole(moment.result), {name: g.square().sum(0) for name, g in grads.items()})
    all_near(whole(variance.result), {name: g.var(0) for name, g in grads.items()})
    wanted = pergrad.NoiseScale(), pergrad.Gram(), pergrad.Projection(8)
    with pergrad.record(one, *wanted):
        loss(one, x).sum().backward()
    assert abs(noise.result - wanted[0].result) <= 1e-11 * abs(wanted[0].result)
    near(gram.result, wanted[1].result)
    near(sketch.result, wanted[2].result)
    for p, shard in zip(model.parameters(), kept.result.values(), strict=True):
        assert isinstance(shard, DTensor) == isinstance(p, DTensor)
        assert getattr(shard, "placements", None) == getattr(p, "placements", None)
    kept.assign(reduce=True)
    all_near({name: full(p.grad) for name, p in model.named_parameters()}, clipped_of(grads, 1.0))
    norms.all_gather()
    near(norms.result, norms_of(grads))
    model.zero_grad()
    loss(model, x).sum().backward()
    all_near(
        {name: full(p.grad) for name, p in model.named_parameters()},
        {name: g.sum(0) for name, g in grads.items()},
    )


def check_columns_and_rows() -> None:
    every_quantity_is_that_of_one_process(
        parallelize_module(made(), mesh(), BLOCKS), made(), batch()
    )


def check_attention_by_heads() -> None:
    every_quantity_is_that_of_one_process(
        language(of_sequences=False), made(Language), tokens(), of_tokens
    )


def check_sequences() -> None:
    every_quantity_is_that_of_one_process(language(), made(Language), tokens(), of_tokens)


def check_checkpoints() -> None:
    every_quantity_is_that_of_one_process(
        language(Checkpointed), made(Language), tokens(), of_tokens
    )


def check_a_table_by_columns_and_uneven_shards() -> None:
    styles = {
        "table": ColwiseParallel(output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),  # eleven rows
    }
    model = parallelize_module(made(Language), mesh(), styles)
    every_quantity_is_that_of_one_process(model, made(Language), tokens(), of_tokens)


class Written(nn.Module):
    """Uses its weights without layers of torch: a transpose, a sum, a product."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = nn.Linear(3, 4), nn.Parameter(torch.linspace(1, 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.a.weight.t() + self.a.bias) * self.scale


def check_weights_that_are_used_without_layers() -> None:
    def shard(_: str, module: nn.Module, own: Any) -> None:
        for key, p in list(module.named_parameters(recurse=False)):
            spread = distribute_tensor(p.detach(), own, [Shard(0)])
            module.register_parameter(key, nn.Parameter(spread))

    def given(module: nn.Module, inputs: Any, own: Any) -> Any:
        if isinstance(module, nn.Linear):
            return inputs
        return tuple(DTensor.from_local(t, own, [Replicate()], run_check=False) for t in inputs)

    def returned(_: nn.Module, output: Any, own: Any) -> Any:
        return output.redistribute(placements=[Replicate()]).to_local()

    model = distribute_module(made(Written), mesh(), shard, given, returned)
    every_quantity_is_that_of_one_process(model, made(Written), batch())


def check_single_samples_and_none() -> None:
    model, one = parallelize_module(made(), mesh(), BLOCKS), made()
    for size in (1, 0):
        x = batch()[:size]
        norms, clipped = pergrad.Norms(), pergrad.ClippedSum(1.0)
        with pergrad.record(model, norms, clipped):
            losses(model, x).sum().backward()
        assert norms.result.shape == (size,)
        if size:
            grads = oracle(one, x)
            near(norms.result, norms_of(grads))
            all_near(whole(clipped.result), clipped_of(grads, 1.0))
        else:
            assert not any(full(t).any() for t in clipped.result.values())


def check_frozen_parameters_and_ordinary_gradients() -> None:
    model, one = language(of_sequences=False), made(Language)
    for each in (model, one):
        each.table.requires_grad_(False)
        each.attention.q.requires_grad_(False)
        each.norm.requires_grad_(False)
    grads = loop_grads(one, of_tokens, tokens())
    norms, clipped = pergrad.Norms(), pergrad.ClippedSum(1.0)
    with pergrad.record(model, norms, clipped, keep_grad=True):
        of_tokens(model, tokens()).sum().backward()
    near(norms.result, norms_of(grads))
    all_near(whole(clipped.result), clipped_of(grads, 1.0))
    found = {name: full(p.grad) for name, p in model.named_parameters() if p.requires_grad}
    all_near(found, {name: g.sum(0) for name, g in grads.items()})


def check_training_is_that_of_one_process() -> None:
    model, one = language(), made(Language)
    for step in range(3):
        clipped = pergrad.ClippedSum(1.0, memory=("kept", "low", "high")[step])
        with pergrad.record(model, clipped):
            of_tokens(model, tokens()).sum().backward()
        clipped.assign()
        wanted = clipped_of(loop_grads(one, of_tokens, tokens()), 1.0)
        for p, g in zip(one.parameters(), wanted.values(), strict=True):
            p.grad = g
        for trained in (model, one):
            torch.optim.SGD(trained.parameters(), lr=0.1).step()
            trained.zero_grad()
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        near(full(p.detach()), q.detach())


def check_the_contract_fills_whole_grad_samples() -> None:
    model = language()
    output = pergrad.call_for_per_sample_grads(model)(tokens())
    F.cross_entropy(full(output).transpose(1, 2), tokens(), reduction="sum").backward()
    wanted = loop_grads(made(Language), of_tokens, tokens())
    all_near({name: p.grad_sample for name, p in model.named_parameters()}, wanted)


def check_verify_and_certify() -> None:
    model = language()
    assert pergrad.certify(model, of_tokens, tokens(), quiet=True).ok
    assert pergrad.verify(model, of_tokens, tokens(), quiet=True).ok


def check_what_is_refused_says_so() -> None:
    model = language()
    message = refusal(lambda: pergrad.compiled(model, of_tokens, pergrad.Norms()))
    assert "parallelize_module" in message
    assert "pergrad.record" in message
    if dist.get_world_size() > 1:
        styles = {"last": ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0))}
        mixed = parallelize_module(made(), mesh(), styles)
        message = refusal(lambda: pergrad.norms(mixed, losses, batch()))
        assert "sharded along its samples" in message
        assert "fully_shard" in message
    plan = pergrad.private.Plan(
        noise_multiplier=1.0, sample_rate=0.1, steps=2, max_norm=1.0, expected_batch_size=2
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    message = refusal(lambda: pergrad.private.Step(model, optimizer, of_tokens, plan))
    assert "parallelize_module" in message
    assert "use fully_shard alone" in message
    hooked = parallelize_module(made(), mesh(), BLOCKS)
    hooked.blocks[0].wide.weight.register_hook(lambda g: g)
    assert "remove the hook" in refusal(lambda: pergrad.norms(hooked, losses, batch()))


# -- two dimensions


def two_dimensions() -> Any:
    world = dist.get_world_size()
    shape = (max(world // 2, 1), min(world, 2))
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))


def split(own: Any, sizes: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    return lambda rows: rows.split(sizes)[own["dp"].get_local_rank()]


def sharded_twice(own: Any) -> Any:
    model = parallelize_module(made(), own["tp"], BLOCKS)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=own["dp"])
    return model


def check_tensor_parallel_inside_of_fully_shard() -> None:
    own = two_dimensions()
    model, one, x = sharded_twice(own), made(), batch()
    grads = oracle(one, x)
    for sizes in ((5, 3), (8, 0)) if own.size(0) == 2 else ((8,),):
        mine = split(own, sizes)
        rows = {name: mine(g) for name, g in grads.items()}
        norms, full_grads, total = pergrad.Norms(), pergrad.Grads(), pergrad.Sum()
        variance, noise = pergrad.Variance(), pergrad.NoiseScale()
        kept, low = pergrad.ClippedSum(1.0), pergrad.ClippedSum(1.0, memory="low")
        with pergrad.record(model, norms, full_grads, total, variance, noise, kept):
            losses(model, mine(x)).sum().backward()
        with pergrad.record(model, low):
            losses(model, mine(x)).sum().backward()
        near(norms.result, norms_of(rows))
        all_near(full_grads.result, rows)
        all_near(whole(total.result), {name: g.sum(0) for name, g in grads.items()})
        all_near(whole(variance.result), {name: g.var(0) for name, g in grads.items()})
        for clipped in (kept, low):
            all_near(whole(clipped.result), clipped_of(grads, 1.0))
        wanted = pergrad.NoiseScale()
        with pergrad.record(one, wanted):
            losses(one, x).sum().backward()
        assert abs(noise.result - wanted.result) <= 1e-11 * abs(wanted.result)
        norms.all_gather()
        near(norms.result, norms_of(grads))
        assert "reduce=True" in refusal(kept.assign)
        kept.assign(reduce=True)
        found = {name: full(p.grad) for name, p in model.named_parameters()}
        all_near(found, clipped_of(grads, 1.0))
        model.zero_grad()
        losses(model, mine(x)).sum().backward()
        plain = {name: full(p.grad) * own.size(0) for name, p in model.named_parameters()}
        all_near(plain, {name: g.sum(0) for name, g in grads.items()})
        model.zero_grad()


def check_certificates_inside_of_fully_shard() -> None:
    own = two_dimensions()
    model, x = sharded_twice(own), batch()[: 5 + own["dp"].get_local_rank()]
    assert pergrad.certify(model, losses, x, quiet=True).ok
    assert pergrad.verify(model, losses, x, quiet=True).ok
    near(pergrad.norms(model, losses, x), norms_of(oracle(made(), x)))


def check_ranks_that_share_samples_are_not_summed_over() -> None:
    own = two_dimensions()
    if own.size(0) < 2:
        return
    model, x = parallelize_module(made(), own["tp"], BLOCKS), batch()
    mine, grads = split(own, (5, 3)), oracle(made(), x)
    clipped, variance = pergrad.ClippedSum(1.0), pergrad.Variance()
    with pergrad.record(model, clipped, variance):
        losses(model, mine(x)).sum().backward()
    assert "group=mesh['dp']" in refusal(clipped.all_reduce)
    message = refusal(lambda: clipped.all_reduce(own["tp"].get_group()))
    assert "count them again" in message
    clipped.assign(reduce=True, group=own["dp"].get_group())
    variance.all_reduce(own["dp"].get_group())
    found = {name: full(p.grad) for name, p in model.named_parameters()}
    all_near(found, clipped_of(grads, 1.0))
    all_near(whole(variance.result), {name: g.var(0) for name, g in grads.items()})


def check_a_part_of_a_sharded_module_is_refused() -> None:
    model: Any = made(Net)
    fully_shard(model, mesh=mesh())
    message = refusal(lambda: pergrad.norms(model.last, losses, torch.ones(2, 4).double()))
    assert "record the module that fully_shard was applied to" in message


def check_replicated_shards() -> None:
    world = dist.get_world_size()
    if world < 4:
        return
    own = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("copies", "shards", "tp"))
    model: Any = parallelize_module(made(), own["tp"], BLOCKS)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=own["copies", "shards"])
    grads = oracle(made(), batch())

    def mine(rows: Tensor) -> Tensor:
        return rows.split((5, 3))[own["copies"].get_local_rank()]

    norms, clipped = pergrad.Norms(), pergrad.ClippedSum(1.0)
    with pergrad.record(model, norms, clipped):
        losses(model, mine(batch())).sum().backward()
    near(norms.result, norms_of({name: mine(g) for name, g in grads.items()}))
    clipped.assign(reduce=True)
    found = {name: full(p.grad) for name, p in model.named_parameters()}
    all_near(found, clipped_of(grads, 1.0))
    assert "group=mesh['dp']" in refusal(norms.all_gather)


class Adapted(nn.Module):
    """A frozen layer and a low-rank adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class AdaptedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.wide = Adapted(block.wide)


def check_adapters_on_a_frozen_base() -> None:
    styles: dict[str, Any] = {}
    for k in (0, 1):
        styles[f"blocks.{k}.wide.base"] = ColwiseParallel()
        styles[f"blocks.{k}.wide.down"] = ColwiseParallel(output_layouts=Replicate())
        styles[f"blocks.{k}.wide.up"] = ColwiseParallel()
        styles[f"blocks.{k}.narrow"] = RowwiseParallel()
    model = parallelize_module(made(AdaptedNet), mesh(), styles)
    grads = oracle(made(AdaptedNet), batch())
    norms, clipped = pergrad.Norms(), pergrad.ClippedSum(1.0)
    with pergrad.record(model, norms, clipped):
        losses(model, batch()).sum().backward()
    near(norms.result, norms_of(grads))
    all_near(whole(clipped.result), clipped_of(grads, 1.0))
