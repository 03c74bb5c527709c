"""Guards hooks of the user: one that changes a gradient must treat each sample by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.engine.samples.layouts import Owners, Samples
from pergrad.engine.samples.proving import subsets
from pergrad.errors import MixedSamplesError, UnsupportedFunctionError
from pergrad.runtime import internals
from pergrad.runtime.containers import tensors_in

__all__ = ["guard_nodes", "guarded", "guarding_modules", "lasting_nodes"]

Hook = Callable[[Tensor], Tensor | None]


def guarded(hook: Hook, layout: Samples | Owners) -> Hook:
    """Returns the hook with a check that what it returns for a sample depends on that sample alone.

    A hook that returns None only looks, and needs no check. Proofs do not call hooks.
    """

    def call(gradient: Tensor) -> Tensor | None:
        if layout.scope.is_pulling_back:
            return None
        version = internals.version_of(gradient)
        changed = hook(gradient)
        if internals.version_of(gradient) != version:
            raise UnsupportedFunctionError(
                f"a hook on a tensor of shape {tuple(gradient.shape)} changes the gradient in place, which a "
                "recording cannot follow; return a new gradient"
            )
        if changed is gradient:
            return None  # it only looks, as those of `fully_shard` do
        if changed is not None and not _treats_each_alone(hook, gradient, layout):
            raise MixedSamplesError(
                f"a hook on a tensor of shape {tuple(gradient.shape)} combines the gradients of several "
                "samples, or makes something of zeros, so no sample has a gradient of its own; let it change "
                "each row by itself, and leave zeros zero, or remove it"
            )
        return changed

    return call


def _treats_each_alone(hook: Hook, gradient: Tensor, layout: Samples | Owners) -> bool:
    """Whether the hook gives each sample's rows whatever the others are, and zero for zero.

    It draws the same random numbers each time, and none that anybody notices.
    """
    shape = [-1 if d == layout.dim else 1 for d in range(gradient.dim())]
    owner = layout.owner_of_each(gradient.device).view(shape)
    generators = [torch.default_generator]
    if gradient.is_cuda:
        generators.append(torch.cuda.default_generators[gradient.device.index])

    def rerun(gradient: Tensor) -> Tensor | None:
        for generator in generators:
            generator.manual_seed(0)
        return hook(gradient)

    with torch.no_grad(), torch.random.fork_rng([gradient.device] if gradient.is_cuda else []):
        whole = rerun(gradient)
        for mask in subsets(layout.scope.count).to(gradient.device):
            rows = mask[owner]
            alone = rerun(gradient * rows)
            if alone is None or whole is None or not torch.equal(alone, whole * rows):
                return False
    return True


@contextmanager
def guarding_modules(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Makes it an error, within, if a backward hook of a module changes a gradient."""
    saved: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for module in modules:
        for hooks in (internals.backward_hooks_of(module), internals.backward_pre_hooks_of(module)):
            if hooks:
                saved.append((hooks, dict(hooks)))
                for key, hook in saved[-1][1].items():
                    hooks[key] = _looking_only(hook, f"a backward hook of {type(module).__name__}")
    try:
        yield
    finally:
        for hooks, before in saved:
            hooks.update({key: hook for key, hook in before.items() if key in hooks})


def guard_nodes(nodes: Iterable[Any]) -> None:
    """Makes it an error if a hook on a node of autograd's graph, or on one behind it, changes a gradient.

    Who has a node reaches all nodes behind it. Backward hooks of modules are hooks on nodes that torch looks
    at, also those that `guarding_modules` does not know: of a module outside of the recorded one, of all
    modules, or registered in the forward. Taps return nothing.
    """
    for node in _and_behind(nodes):
        for register in (node.register_hook, node.register_prehook):
            handle = register(_nothing)
            hooks = handle.hooks_dict_ref()
            handle.remove()
            for key, hook in hooks.items():
                hooks[key] = _looking_only(hook, _name_of_hook(node))


def lasting_nodes(node: Any) -> list[Any]:
    """Returns a node, and where it may be gone before the backward pass, those behind it.

    Up to torch 2.11 the Python object of an autograd.Function does not keep its node alive; all other nodes
    keep those behind them.
    """
    found, left = list[Any](), [node]
    while left:
        found.append(left.pop())
        if isinstance(found[-1], torch.autograd.function.BackwardCFunction):
            left += _behind(found[-1])
    return found


def _and_behind(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yields the nodes and those behind them, each once, but for those that only accumulate or are gone."""
    left, seen = [*nodes], set()
    while left:
        node = left.pop()
        if node in seen or type(node).__name__ == "AccumulateGrad":
            continue
        seen.add(node)
        try:
            left += _behind(node)
        except RuntimeError:  # no gradient comes to a node that is gone
            continue
        yield node


def _behind(node: Any) -> list[Any]:
    return [behind for behind, _ in node.next_functions if behind is not None]


def _name_of_hook(node: Any) -> str:
    kind = type(node).__name__
    if kind == "BackwardHookFunctionBackward":
        return "a backward hook of a module"
    return f"a hook on the autograd node {kind}"


def _nothing(*_: Any) -> None:
    pass


def _looking_only(hook: Callable[..., Any], what: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        gradients = [*tensors_in(args)]
        versions = [*map(internals.version_of, gradients)]
        changed = hook(*args)
        is_changed = changed is not None and not _are_same(changed, args[0])
        if is_changed or versions != [*map(internals.version_of, gradients)]:
            raise UnsupportedFunctionError(
                f"{what} changes gradients, which a recording cannot follow; let it return None and write "
                "nothing in place, or remove it"
            )
        return changed

    return call


def _are_same(changed: Any, gradients: Any) -> bool:
    """Whether a hook returns the gradients that it got, as torch's own for the hooks of modules do."""
    if not isinstance(changed, tuple) or not isinstance(gradients, tuple):
        return False
    return len(changed) == len(gradients) and all(
        new is old for new, old in zip(changed, gradients, strict=True)
    )
