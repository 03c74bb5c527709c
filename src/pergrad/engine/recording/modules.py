"""Walks over a module's submodules, parameters and buffers: every step begins with one.

Torch's own iterators (`named_modules`, `named_parameters`) are nested generators: a walk by them takes as
long as launching a hundred kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from pergrad.errors import PergradError
from pergrad.runtime import internals
from pergrad.runtime.caches import CACHES

__all__ = [
    "buffers_in",
    "hooks_of_parameters",
    "leaving_grads",
    "names_of_tensors",
    "parameters_by_name",
    "refuse_new_parameters",
    "submodules",
    "survey",
    "tensors_of",
]


Hook: TypeAlias = Callable[[Tensor], Tensor | None]

# Looking takes 2 µs for each parameter, as long as a tenth of its use: once for each module.
_WITHOUT_NODE_HOOKS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
CACHES.add(
    __name__,
    "modules whose parameters have no hooks on autograd nodes",
    "at most the modules alive",
    _WITHOUT_NODE_HOOKS,
)


def submodules(module: nn.Module, names: list[str] | None = None) -> list[nn.Module]:
    """Lists the modules that `module.named_modules()` gives, in its order; `names` gets their names."""
    found: list[nn.Module] = []
    _visit(module, "", found, set(), names)
    return found


def _visit(
    module: nn.Module,
    name: str,
    found: list[nn.Module],
    seen: set[nn.Module],
    names: list[str] | None,
) -> None:
    seen.add(module)
    found.append(module)
    if names is not None:
        names.append(name)
    children = internals.children_of(module)
    if not children:  # most have none
        return
    for key, child in children.items():
        if child is not None and child not in seen:
            path = key if not name or names is None else f"{name}.{key}"
            _visit(child, path, found, seen, names)


def tensors_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Lists the parameters and buffers of modules, each once."""
    found: dict[int, Tensor] = {}
    for module in modules:
        for t in (
            *internals.parameters_of(module).values(),
            *internals.buffers_of(module).values(),
        ):
            if t is not None:
                found[id(t)] = t
    return list(found.values())


def parameters_by_name(module: nn.Module) -> dict[str, Tensor]:
    """Returns `dict(module.named_parameters())`."""
    prefixes: list[str] = []
    found: dict[int, tuple[str, Tensor]] = {}
    for m, prefix in zip(submodules(module, prefixes), prefixes, strict=True):
        for key, p in internals.parameters_of(m).items():
            if p is not None:
                found.setdefault(id(p), (f"{prefix}.{key}" if prefix else key, p))
    return dict(found.values())


def buffers_in(module: nn.Module) -> list[Tensor]:
    """Returns `list(module.buffers())`."""
    found: dict[int, Tensor] = {}
    for m in submodules(module):
        for b in internals.buffers_of(m).values():
            if b is not None:
                found[id(b)] = b
    return list(found.values())


def names_of_tensors(module: nn.Module) -> list[str]:
    """Names the tensors that `tensors_of(submodules(module))` lists, each by the first of its names."""
    prefixes: list[str] = []
    names: dict[int, str] = {}
    for m, prefix in zip(submodules(module, prefixes), prefixes, strict=True):
        for key, t in (*internals.parameters_of(m).items(), *internals.buffers_of(m).items()):
            if t is not None:
                names.setdefault(id(t), f"{prefix}.{key}" if prefix else key)
    return list(names.values())


def hooks_of_parameters(
    weights: Mapping[str, Tensor], *, may_accumulate: bool = False
) -> dict[str, list[Hook]]:
    """Finds the hooks of the user on the gradients of parameters, by name.

    Raises an error for a hook that runs after a gradient is accumulated, unless the recording keeps `.grad`.
    """
    found: dict[str, list[Hook]] = {}
    for name, p in weights.items():
        hooks = internals.hooks_of(p)
        if hooks:
            own = [hooks[key] for key in hooks if key >= 0]  # those of this package are negative
            if own:
                found[name] = own
        if not may_accumulate and internals.post_accumulate_hooks_of(p):
            raise PergradError(
                f"parameter {name!r} has a hook that runs after its gradient is accumulated, and would not "
                "run: within a recording no parameter gets a `.grad`; remove it, or freeze the parameter"
            )
    return found


def _refuse_node_hooks(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raises an error if a parameter's AccumulateGrad node has a hook, which no recorded gradient meets."""
    with internals.DisableTorchFunction(), torch.enable_grad():
        for name, p in weights.items():
            behind: Any = p.view_as(p).grad_fn
            if behind is None:  # in inference mode, where no gradients come
                return
            handle = behind.next_functions[0][0].register_prehook(_unused)
            hooks = handle.hooks_dict_ref()
            handle.remove()
            if hooks:
                raise PergradError(
                    f"the AccumulateGrad node of parameter {name!r} has a hook by register_prehook, which "
                    "would not run: within a recording no ordinary gradient reaches the node; register it "
                    "on the parameter (`Tensor.register_hook`), and it gets the gradient of each sample"
                )
    _WITHOUT_NODE_HOOKS.add(module)


def _unused(*_: Any) -> None:
    pass


@contextmanager
def leaving_grads(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Leaves `.grad` of buffers that require grad as it was, whatever a backward pass adds to it."""
    held = [(t, t.grad) for t in tensors if t.requires_grad and not isinstance(t, nn.Parameter)]
    for t, _ in held:
        t.grad = None
    try:
        yield
    finally:
        for t, grad in held:
            t.grad = grad


def refuse_new_parameters(module: nn.Module, strangers: Mapping[int, Tensor]) -> None:
    """Raises an error if a parameter that was used came to the module after the recording began."""
    for name, p in module.named_parameters():
        if id(p) in strangers:
            raise PergradError(
                f"parameter {name!r} was made or replaced while the module ran, and was not recorded: call "
                "the module once before the recording, and do not assign parameters in its forward"
            )


def survey(module: nn.Module) -> tuple[dict[str, Tensor], list[Tensor], list[nn.Module]]:
    """Finds the trainable parameters by name, all parameters and buffers, and modules with backward hooks.

    The names are those of `named_parameters`.
    """
    hooked: list[nn.Module] = []
    weights: dict[str, Tensor] = {}
    own: dict[int, Tensor] = {}
    prefixes: list[str] = []
    hooks_of, pre_hooks_of = internals.backward_hooks_of, internals.backward_pre_hooks_of
    parameters_of, buffers_of = internals.parameters_of, internals.buffers_of
    strided = torch.strided
    for m, prefix in zip(submodules(module, prefixes), prefixes):  # noqa: B905  # as long
        if isinstance(m, nn.DataParallel):
            raise PergradError(
                "nn.DataParallel copies the module to other threads and devices, where its parameters "
                "cannot be recorded: record its `.module`, on one device"
            )
        for key, p in parameters_of(m).items():
            if p is None or id(p) in own:
                continue
            own[id(p)] = p
            name = f"{prefix}.{key}" if prefix else key
            if type(p) is not nn.Parameter and isinstance(p, UninitializedParameter):
                raise PergradError(
                    f"parameter {name!r} of a lazy module has no shape yet: call the module once first"
                )
            if p.requires_grad:
                if p.layout is not strided:
                    raise PergradError(
                        f"parameter {name!r} is sparse ({p.layout}), so its gradients cannot be told apart "
                        "by sample: make it dense, or freeze it"
                    )
                weights[name] = p
                if p.is_meta:
                    raise PergradError(
                        f"parameter {name!r} is on the meta device and has no values: materialise the "
                        "module first, for example with module.to_empty(device=...) and its weights"
                    )
        buffers = buffers_of(m)
        if buffers:
            for b in buffers.values():
                if b is not None:
                    own[id(b)] = b
        if hooks_of(m) or pre_hooks_of(m):
            hooked.append(m)
    if module not in _WITHOUT_NODE_HOOKS:
        _refuse_node_hooks(module, weights)
    return weights, list(own.values()), hooked
