"""Follows parameters that `fully_shard` (FSDP2) shards, and sums over ranks module by module."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from pergrad.distributed.groups import Ranks, is_running, together
from pergrad.distributed.placing import is_sharded
from pergrad.distributed.tensor_parallel import Piece, data_dims_of
from pergrad.runtime import internals

__all__ = [
    "Shards",
    "device_of_steps",
    "grad_of",
    "is_sharded",
    "length_over_ranks",
    "policies_of",
    "precision_of",
    "reshard",
    "sharding_modules",
]


GATHERED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # those within `gathering.gathered`


def reshard(module: nn.Module) -> list[nn.Module]:
    """Makes all parameters sharded again, as between steps; returns the modules that shard them.

    Between steps some may be unsharded, such as those of the root after a forward pass without a backward.
    """
    found = sharding_modules(module)
    for unit in found:
        unit.reshard()
    return found


def sharding_modules(module: nn.Module, *, are_gathered: bool = False) -> list[Any]:
    """Lists the modules that `fully_shard` was applied to, outer ones first.

    Those whose parameters are whole for a while are not among them, or, with `are_gathered`, they alone.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp") if is_running() else None
    if fsdp is None:
        return []
    found = [m for m in module.modules() if isinstance(m, fsdp.FSDPModule)]
    return [m for m in found if (m in GATHERED) == are_gathered]


def device_of_steps(module: nn.Module) -> torch.device:
    """Returns the device that a sharded module runs on; its shards may be offloaded from there."""
    reshard(module)
    spread: list[Any] = [p for p in module.parameters() if is_sharded(p)]
    return _device_of(spread[0].device_mesh) or torch.device("cpu")


def precision_of(module: nn.Module) -> torch.dtype:
    """Returns the coarsest dtype that a sharded module computes its parameters' gradients in."""
    states = [internals.fsdp_state_of(unit) for unit in sharding_modules(module)]
    dtypes = {p.dtype for p in module.parameters() if p.requires_grad}
    given = {state._mp_policy.param_dtype for state in states} - {None}
    return max(dtypes | given, key=lambda dtype: torch.finfo(dtype).eps)


def policies_of(units: Iterable[nn.Module]) -> list[str]:
    """Describes the mixed-precision policies of modules that shard, each once, but for those of no effect."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    policies = [internals.fsdp_state_of(unit)._mp_policy for unit in units]
    plain = None if fsdp is None else fsdp.MixedPrecisionPolicy()
    return sorted({repr(policy) for policy in policies if policy != plain})


def grad_of(parameter: Tensor, total: Tensor) -> Tensor:
    """Returns a sum of gradients as a new tensor that may be the parameter's `.grad`."""
    if not is_sharded(parameter):
        return total.to(parameter.device, parameter.dtype, copy=True)
    made: Any = torch.zeros_like(parameter)
    with torch.no_grad():
        made.to_local().copy_(cast(Any, total).to_local())
    return cast(Tensor, made)


def _unseen(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the call without modes that intercept functions of torch."""

    def unseen(*args: Any, **kwargs: Any) -> Any:
        with internals.DisableTorchFunction():
            return call(*args, **kwargs)

    return unseen


def _restore(group: Any, name: str, own: Any) -> None:
    """Gives a group its own attribute back, or that of its class."""
    if own is None:
        delattr(group, name)
    else:
        setattr(group, name, own)


@dataclass(eq=False)
class _Unit:
    """A module that shards parameters, and how often it was entered in this pass."""

    module: nn.Module
    names: list[str]  # of recorded parameters
    inner: set[nn.Module]  # the modules inside of it
    calls: int = 0
    entered: int = 0
    is_summed: bool = False


class Shards:
    """The sharded parameters of a recorded module.

    A parameter is unsharded while its module runs: the module then holds another tensor in its place.
    Quantities sum over ranks module by module, when the backward pass has left one, so that no rank holds the
    sums of all parameters. All ranks do so in the same order.
    """

    def __init__(
        self, module: nn.Module, units: Sequence[nn.Module], weights: Mapping[str, Tensor]
    ) -> None:
        names = {id(p): name for name, p in weights.items() if is_sharded(p)}
        self._parameters: dict[str, Any] = {name: weights[name] for name in names.values()}
        self.names = list(self._parameters)
        self._slots = [  # where a recorded parameter is held
            (m, key, names[id(p)])
            for m in module.modules()
            for key, p in internals.parameters_of(m).items()
            if p is not None and id(p) in names
        ]
        first = next(iter(self._parameters.values()), None)
        self._mesh: Any = None if first is None else _data_mesh(first)
        self.device = _device_of(self._mesh)
        self._units = self._found(units, names)

    def _found(self, units: Sequence[nn.Module], names: Mapping[int, str]) -> list[_Unit]:
        """Gives every recorded parameter to the module that shards it; to none if several use it."""
        inside = {unit: {*unit.modules()} for unit in units}
        innermost = {m: unit for unit in units for m in inside[unit]}  # outer ones come first
        owners: dict[str, set[nn.Module | None]] = {name: set() for name in self.names}
        for module, _, name in self._slots:
            owners[name].add(innermost.get(module))
        return [
            _Unit(unit, [name for name, own in owners.items() if own == {unit}], inside[unit])
            for unit in units
        ]

    def unsharded(self) -> Iterator[tuple[Tensor, str]]:
        """Yields the tensors that stand for recorded parameters now, and the names of these."""
        for module, key, name in self._slots:
            t = internals.parameters_of(module).get(key)
            if t is not None and t is not self._parameters[name]:
                yield t, name

    def is_tensor_parallel(self, name: str) -> bool:
        """Whether a parameter is a DTensor also while it is unsharded."""
        p = self._parameters[name]
        return data_dims_of(p) < p.device_mesh.ndim

    def groups_of(self, names: Iterable[str]) -> list[list[str]]:
        """Groups parameters by the modules that shard them, in an order that all ranks share."""
        wanted = {*names}
        of_units = [[name for name in unit.names if name in wanted] for unit in self._units]
        rest = [name for name in self.names if name in wanted - {n for of in of_units for n in of}]
        return [group for group in (*of_units, rest) if group]

    # -- the backward pass

    @contextmanager
    def watching(self, leave: Callable[[list[str]], None]) -> Iterator[None]:
        """Calls `leave` with the names of a unit's parameters when a backward pass has left the unit."""
        with ExitStack() as hooks:
            for unit in self._units:
                hook = partial(self._after_forward, unit, leave)
                hooks.callback(unit.module.register_forward_hook(hook).remove)
            yield

    @contextmanager
    def dropping_gradients(self, are_unwanted: Callable[[], bool]) -> Iterator[None]:
        """Drops ordinary gradients within where they are unwanted: `fully_shard` would reduce them.

        A rank without samples has such gradients, all zero, and others have none to reduce with.
        """
        hooks = ExitStack()
        seen: dict[int, Tensor] = {}

        def drop_those_of_unsharded(*_: Any) -> None:
            for t, _name in self.unsharded() if are_unwanted() else ():
                if id(t) not in seen and t.requires_grad:
                    seen[id(t)] = t
                    hooks.callback(t.register_post_accumulate_grad_hook(_drop).remove)

        with hooks:
            for unit in self._units:
                hook = unit.module.register_forward_pre_hook(drop_those_of_unsharded)
                hooks.callback(hook.remove)
            yield

    @contextmanager
    def gathering_unseen(self) -> Iterator[None]:
        """Gathers parameters out of sight of the recorder within: samples have no part in that."""
        with ExitStack() as undo:
            for unit in self._units:
                for group in internals.fsdp_groups_of(unit.module):
                    for name in ("unshard", "wait_for_unshard"):
                        undo.callback(_restore, group, name, vars(group).get(name))
                        setattr(group, name, _unseen(getattr(group, name)))
            yield

    @contextmanager
    def adopting(self, adopt: Callable[[], None]) -> Iterator[None]:
        """Calls `adopt` within when a unit has unsharded parameters that are DTensors still.

        Torch makes these in sight of the recorder, which takes them for results of functions.
        """
        with ExitStack() as hooks:
            for unit in self._units if any(map(self.is_tensor_parallel, self.names)) else ():
                hook = unit.module.register_forward_pre_hook(lambda *_: adopt())
                hooks.callback(hook.remove)
            yield

    def begin_pass(self) -> None:
        """Begins a backward pass through the same graph, or another recording."""
        for unit in self._units:
            unit.entered = 0

    def _after_forward(
        self,
        unit: _Unit,
        leave: Callable[[list[str]], None],
        module: nn.Module,
        args: Any,
        output: Any,
    ) -> None:
        is_recomputation = internals.current_graph_task_id() != -1
        if is_recomputation or not torch.is_grad_enabled():
            return
        unit.calls += 1
        seen: list[int] = []  # the backward pass, by its number

        def enter(_: Tensor) -> None:
            number = internals.current_graph_task_id()
            if number not in seen:
                seen.append(number)
                self._enter(unit, leave)

        for t in internals.pytree.tree_leaves(output):
            if isinstance(t, Tensor) and t.requires_grad:
                t.register_hook(enter)

    def _enter(self, unit: _Unit, leave: Callable[[list[str]], None]) -> None:
        """Leaves the units that the backward pass has been through, as it enters one that they do not hold.

        Autograd runs what was made last first: when the gradient of a unit's output is complete, all that
        ran after the unit is done.
        """
        unit.entered += 1
        for other in self._units:
            is_around = unit.module in other.inner or other.module in unit.inner
            is_done = other.entered == other.calls and not other.is_summed
            if other.entered and is_done and not is_around:
                leave(other.names)

    def summed(self, names: Iterable[str]) -> None:
        """Notes that the sums of these parameters are complete."""
        done = {*names}
        for unit in self._units:
            unit.is_summed |= bool(unit.names) and done.issuperset(unit.names)

    def reset(self) -> None:
        """Makes the modules ready for another step after an error in the middle of one."""
        inner = {m for unit in self._units for m in unit.inner if m is not unit.module}
        for unit in self._units:
            module: Any = unit.module
            if unit.module not in inner and hasattr(
                module, "reset_iter_state"
            ):  # torch 2.13 has it
                module.reset_iter_state()

    # -- sums over ranks

    @property
    def ranks(self) -> Ranks:
        """Returns the ranks with other samples; None if the mesh has several dimensions."""
        group: Ranks = self._mesh.get_group() if self._mesh.ndim == 1 else None
        return group

    def shard_of_sum(self, name: str, total: Tensor) -> Tensor:
        """Returns this rank's shard of a sum over all ranks; `total` has the shape of the whole parameter."""
        p = self._parameters[name]
        dims = data_dims_of(p)
        with together():
            found: Any = _sum_of(total, _data_mesh(p)).redistribute(placements=_data_kinds(p))
        return found if dims == p.device_mesh.ndim else _filled(p, found.to_local())

    def whole(self, name: str, shard: Tensor) -> Tensor:
        """Returns the tensor of which every rank of the mesh has a shard; of a DTensor, the local part."""
        from torch.distributed.tensor import DTensor  # noqa: PLC0415  # it takes half a second

        p, spread = self._parameters[name], cast(Any, shard)
        with together():
            if data_dims_of(p) == p.device_mesh.ndim:
                return cast(Tensor, spread.full_tensor())
            shape = torch.Size(Piece.of(p, data_dims_of(p)).local_shape)
            stride = torch.empty(shape, device="meta").stride()
            kinds = _data_kinds(p)
            joined = DTensor.from_local(
                spread.to_local(), _data_mesh(p), kinds, run_check=False, shape=shape, stride=stride
            )
            return joined.full_tensor()

    def is_summed(self, t: Tensor) -> bool:
        return is_sharded(t)

    def sum(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: t if is_sharded(t) else self._total(t) for name, t in tensors.items()}

    def count(self, own: int) -> int:
        return int(self._total(torch.tensor([own], device=self.device)))

    def _total(self, t: Tensor) -> Tensor:
        """Returns the sum of a tensor over all ranks of the mesh."""
        there = t if self.device is None else t.to(self.device)
        with together():
            found: Tensor = _sum_of(there, self._mesh).full_tensor()
        return found.to(t.device)


def length_over_ranks(tensors: Iterable[Tensor]) -> Tensor:
    """Σ |t|² of tensors, some of which are sharded, in float64; all ranks call it."""
    length: Any = 0.0
    of_meshes: dict[int, tuple[Any, list[Tensor]]] = {}
    for t in tensors:
        part: Any = t
        if not is_sharded(t):
            length = length + _squares(t)
            continue
        mesh = part.device_mesh
        sizes = zip(part.placements, mesh.shape, strict=True)
        copies = math.prod(size for kind, size in sizes if kind.is_replicate())
        of_meshes.setdefault(id(mesh), (mesh, []))[1].append(_squares(part.to_local()) / copies)
    for mesh, parts in of_meshes.values():
        with together():
            length = length + _sum_of(torch.stack(parts).sum(), mesh).full_tensor()
    return cast(Tensor, length)


def _data_mesh(parameter: Any) -> Any:
    """Returns the mesh over whose ranks `fully_shard` shards: they have different samples."""
    mesh, dims = parameter.device_mesh, data_dims_of(parameter)
    return mesh if dims == mesh.ndim else mesh[mesh.mesh_dim_names[:dims]]


def _data_kinds(parameter: Any) -> list[Any]:
    """Returns the placements on that mesh; where others shard the same dimension, of their shard."""
    from torch.distributed.tensor import Shard  # noqa: PLC0415

    kinds = parameter.placements[: data_dims_of(parameter)]
    return [kind if kind.is_replicate() else Shard(kind.dim) for kind in kinds]


def _filled(parameter: Any, local: Tensor) -> Tensor:
    """Returns a tensor spread as a parameter is, of which `local` is this rank's shard."""
    made: Any = torch.zeros_like(parameter, dtype=local.dtype)
    with torch.no_grad():
        made.to_local().copy_(local)
    return cast(Tensor, made)


def _drop(t: Tensor) -> None:
    t.grad = None


def _squares(t: Tensor) -> Tensor:
    real = torch.view_as_real(t) if t.is_complex() else t
    return torch.linalg.vector_norm(real, dtype=torch.float64).square()


def _sum_of(t: Tensor, mesh: Any) -> Any:
    """Returns the sum of the tensors of all ranks, before it is computed."""
    from torch.distributed.tensor import DTensor, Partial  # noqa: PLC0415  # it takes half a second

    return DTensor.from_local(t, mesh, [Partial()] * mesh.ndim, run_check=False)


def _device_of(mesh: Any) -> torch.device | None:
    """Returns the device that unsharded parameters are on, also if shards are offloaded."""
    if mesh is None or mesh.device_type == "cpu":
        return None
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
