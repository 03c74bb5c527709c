"""Checks of `torch.distributed.pipelining` with one stage on each rank; see ranks.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import pergrad
from pergrad.distributed.pipelines import Pipeline
from pergrad.testing import loop_grads
from tests.distributed.models import Net, all_near, batch, clipped_of, made, near, norms_of, refusal

LAYERS = {1: (4,), 2: (1, 3), 4: (1, 1, 1, 1)}  # in each stage


def summed(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def losses(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return (model(x) - target).square().sum(-1)


def averaged(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum(-1).mean()


class Piped:
    """A model, this rank's stage of it, and steps through the pipeline."""

    def __init__(
        self,
        schedule: Any = ScheduleGPipe,
        *,
        loss: Callable[..., Tensor] = summed,
        microbatches: int = 4,
        size: int = 8,
        by_name: bool = False,
    ) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.whole = whole = made()
        paths = iter(["first", *(f"blocks.{n}" for n in range(len(whole.blocks))), "last"])
        stages = [[next(paths) for _ in range(n)] for n in LAYERS[world]]
        layers = [whole.get_submodule(path) for path in stages[rank]]
        self.stage = named(whole, stages[rank]) if by_name else nn.Sequential(*layers)
        self._place = PipelineStage(self.stage, rank, world, torch.device("cpu"))
        self._schedule = schedule(self._place, n_microbatches=microbatches, loss_fn=loss)
        names = {id(p): name for name, p in whole.named_parameters()}
        self.names = {name: names[id(p)] for name, p in self.stage.named_parameters()}
        self.x = batch(size)
        self.target = batch(size, seed=7)[:, :2]

        self.grads = loop_grads(whole, losses, self.x, self.target)

    def own(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Takes what belongs to the parameters of this stage."""
        return {name: found[of] for name, of in self.names.items()}

    def step(self) -> None:
        given = (self.x,) if self._place.is_first else ()
        named = {"target": self.target, "losses": []} if self._place.is_last else {}
        self._schedule.step(*given, **named)

    def record(self, *quantities: Any, **options: Any) -> None:
        with pergrad.record(self.stage, *quantities, calls="more", **options):
            self.step()


def every_quantity_is_that_of_one_process(piped: Piped, **options: Any) -> None:
    grads = piped.grads
    norms, full, total = pergrad.Norms(), pergrad.Grads(), pergrad.Sum()
    moment, variance = pergrad.SecondMoment(), pergrad.Variance()
    kept, high = pergrad.ClippedSum(1.0), pergrad.ClippedSum(1.0, memory="high")
    piped.record(norms, full, total, moment, variance, kept, high, **options)
    near(norms.result, norms_of(grads))
    own = piped.own(grads)
    all_near(norms.per_param, {name: g.flatten(1).norm(dim=1) for name, g in own.items()})
    all_near(full.result, own)
    for clipped in (kept, high):
        all_near(clipped.result, piped.own(clipped_of(grads, 1.0)))
        near(clipped.norms, norms_of(grads))
    all_near(total.result, {name: g.sum(0) for name, g in own.items()})
    all_near(moment.result, {name: g.square().sum(0) for name, g in own.items()})
    all_near(variance.result, {name: g.var(0) for name, g in own.items()})
    norms.all_gather()
    near(norms.result, norms_of(grads))
    kept.assign(reduce=True)
    found = {name: p.grad for name, p in piped.stage.named_parameters()}
    all_near(found, piped.own(clipped_of(grads, 1.0)))


def named(whole: nn.Module, layers: Sequence[str]) -> nn.Sequential:
    """Returns layers as a stage whose parameters have the names of the whole model."""
    stage = nn.Sequential()
    for path in layers:
        at: nn.Module = stage
        *parents, last = path.split(".")
        for parent in parents:
            if parent not in dict(at.named_children()):
                at.add_module(parent, nn.Sequential())
            at = at.get_submodule(parent)
        at.add_module(last, whole.get_submodule(path))
    return stage


def check_inner_products_are_those_of_the_whole_model() -> None:
    piped = Piped(Schedule1F1B)
    grads = piped.grads
    flat = torch.cat([g.flatten(1) for g in grads.values()], 1)
    dots = pergrad.Dots({name: p.detach() for name, p in piped.stage.named_parameters()})
    stored = {name: g[:3] for name, g in piped.own(grads).items()}
    gram, noise = pergrad.Gram(against=stored), pergrad.NoiseScale()
    piped.record(dots, gram, noise)
    direction = torch.cat([p.detach().flatten() for p in made().parameters()])
    near(dots.result, flat @ direction)
    near(gram.result, flat @ flat[:3].T)
    trace = flat.var(0).sum()
    found = torch.tensor([noise.trace, noise.squared_mean], dtype=torch.float64)
    near(found, torch.stack([trace, flat.mean(0).square().sum() - trace / len(flat)]))
    alone = Piped(microbatches=1)
    products = pergrad.Gram()
    alone.record(products)
    near(products.result, flat @ flat.T)


def check_sketches_are_those_of_the_whole_model() -> None:
    for method in ("count", "two_sided"):
        piped = Piped(by_name=True)
        sketch, whole = (pergrad.Projection(16, 3, method=method) for _ in range(2))
        piped.record(sketch)
        with pergrad.record(piped.whole, whole):
            (piped.whole(piped.x) - piped.target).square().sum().backward()
        near(sketch.result, whole.result)
    if dist.get_world_size() > 1:
        own = ["all", f"of {dist.get_rank()}"]
        message = refusal(lambda: Pipeline(None).refuse_shared_names(own, "Projection"))
        assert "parameter 'all'" in message
        assert "Projection tells parameters apart by their names" in message
        assert "as in the whole model" in message


def check_gpipe() -> None:
    every_quantity_is_that_of_one_process(Piped(ScheduleGPipe))


def check_1f1b() -> None:
    every_quantity_is_that_of_one_process(Piped(Schedule1F1B))


def check_one_microbatch_and_uneven_ones() -> None:
    every_quantity_is_that_of_one_process(Piped(microbatches=1))
    every_quantity_is_that_of_one_process(Piped(microbatches=2, size=6))


def check_bounds_by_patterns() -> None:
    piped = Piped()
    clipped = pergrad.ClippedSum({"*bias": 0.5, "*": 1.0})
    piped.record(clipped)
    of = {True: {}, False: {}}
    for name, g in piped.grads.items():
        of[name.endswith("bias")][name] = g
    wanted = clipped_of(of[True], 0.5) | clipped_of(of[False], 1.0)
    all_near(clipped.result, piped.own(wanted))
    near(clipped.norms, norms_of(piped.grads))


def check_a_mean_is_undone_by_all_stages_or_refused() -> None:
    every_quantity_is_that_of_one_process(Piped(Schedule1F1B, loss=averaged), loss_reduction="mean")
    if dist.get_world_size() > 1:
        message = refusal(lambda: Piped(loss=averaged).record(pergrad.Norms()))
        assert 'loss_reduction="mean"' in message
        assert "torch.distributed.pipelining" in message


def check_plain_steps_are_what_they_were() -> None:
    piped = Piped()
    for _ in range(2):
        norms = pergrad.Norms()
        piped.record(norms)
        near(norms.result, norms_of(piped.grads))
        assert all(p.grad is None for p in piped.stage.parameters())
        piped.step()  # divides by the number of microbatches
        found = {name: p.grad * 4 for name, p in piped.stage.named_parameters()}
        all_near(found, piped.own({name: g.sum(0) for name, g in piped.grads.items()}))
        piped.stage.zero_grad()


def check_stages_are_not_summed_over() -> None:
    if dist.get_world_size() == 1:
        return
    piped, total = Piped(), pergrad.Sum()
    piped.record(total)
    message = refusal(lambda: total.all_reduce(dist.group.WORLD))
    assert "share the samples" in message
    assert "torch.distributed.pipelining" in message


def check_training_is_that_of_one_process() -> None:
    piped, one = Piped(Schedule1F1B), made()

    for _ in range(3):
        clipped = pergrad.ClippedSum(1.0)
        piped.record(clipped)
        clipped.assign()
        wanted = clipped_of(loop_grads(one, losses, piped.x, piped.target), 1.0)
        for p, g in zip(one.parameters(), wanted.values(), strict=True):
            p.grad = g
        for trained in (piped.stage, one):
            torch.optim.SGD(trained.parameters(), lr=0.1).step()
            trained.zero_grad()
    own = {name: p.detach() for name, p in one.named_parameters()}
    all_near({name: p.detach() for name, p in piped.stage.named_parameters()}, piped.own(own))


class Interleaved(Piped):
    """Two stages on each rank, in the order of the layers."""

    def __init__(self, schedule: Any = ScheduleInterleaved1F1B, **options: Any) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        loss = options.get("loss", summed)
        torch.manual_seed(0)
        self.whole = whole = Net(blocks=2 * world - 2).double()
        layers = [whole.first, *whole.blocks, whole.last]
        numbers = [rank, rank + world]
        self.stage = nn.ModuleList(layers[number] for number in numbers)
        device = torch.device("cpu")
        places = [PipelineStage(layers[n], n, 2 * world, device) for n in numbers]
        self._schedule = schedule(places, n_microbatches=4, loss_fn=loss)
        self._is_first, self._is_last = rank == 0, rank == world - 1
        names = {id(p): name for name, p in whole.named_parameters()}
        self.names = {name: names[id(p)] for name, p in self.stage.named_parameters()}
        self.x, self.target = batch(8), batch(8, seed=7)[:, :2]
        self.grads = loop_grads(whole, losses, self.x, self.target)

    def step(self) -> None:
        given = (self.x,) if self._is_first else ()
        named = {"target": self.target, "losses": []} if self._is_last else {}
        self._schedule.step(*given, **named)


def check_several_stages_on_a_rank() -> None:
    if dist.get_world_size() == 1:
        return
    every_quantity_is_that_of_one_process(Interleaved())
    every_quantity_is_that_of_one_process(Interleaved(ScheduleLoopedBFS))
    every_quantity_is_that_of_one_process(Interleaved(loss=averaged), loss_reduction="mean")


def check_two_steps_of_several_stages_in_a_block() -> None:
    if dist.get_world_size() == 1:
        return
    piped, norms = Interleaved(), pergrad.Norms()
    with pergrad.record(piped.stage, norms, calls="more"):
        piped.step()
        piped.step()
    near(norms.result, norms_of(piped.grads).repeat(2))


def check_stages_that_are_tensor_parallel() -> None:
    if dist.get_world_size() < 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    rank, one = mesh["pp"].get_local_rank(), made()
    stages = (
        nn.Sequential(one.first, one.blocks[0]),
        nn.Sequential(one.blocks[1], one.last),
    )
    stage, block = stages[rank], 1 - rank
    names = {id(p): name for name, p in one.named_parameters()}
    own = {name: names[id(p)] for name, p in stage.named_parameters()}
    x, target = batch(), batch(seed=7)[:, :2]

    grads = loop_grads(made(), losses, x, target)
    styles = {f"{block}.wide": ColwiseParallel(), f"{block}.narrow": RowwiseParallel()}
    parallelize_module(stage, mesh["tp"], styles)
    group = mesh["pp"].get_group()
    place = PipelineStage(stage, rank, 2, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(place, n_microbatches=4, loss_fn=summed)
    norms, clipped = pergrad.Norms(), pergrad.ClippedSum(1.0)
    with pergrad.record(stage, norms, clipped, calls="more"):
        if place.is_first:
            schedule.step(x)
        else:
            schedule.step(target=target)
    near(norms.result, norms_of(grads))
    found = {
        name: t.full_tensor() if hasattr(t, "full_tensor") else t
        for name, t in clipped.result.items()
    }
    wanted = clipped_of(grads, 1.0)
    all_near(found, {name: wanted[of] for name, of in own.items()})
