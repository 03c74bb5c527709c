"""Classifies functions by what the recorder does with them, once per function."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.engine.intercepting.composites import CONTROL_FLOW, checks_overrides
from pergrad.engine.samples.propagation import is_own, name_of
from pergrad.engine.samples.propagation.in_place import writes_in_place
from pergrad.runtime import internals
from pergrad.runtime.caches import cached

__all__ = ["Kind", "kind_of"]

# Attributes that are tensors; other attributes, and setting one, do not move samples.
_TENSOR_ATTRIBUTES = frozenset("T mT H mH real imag data".split())

# Functions that return no tensor, or read tensors without moving samples.
_PASSIVE = frozenset(
    """
    dim element_size stride storage_offset is_contiguous is_floating_point is_complex
    is_signed data_ptr get_device hash repr format ndimension is_pinned
    untyped_storage storage reduce_ex is_nonzero is_inference result_type can_cast is_same_size
    is_tensor allclose equal bool item tolist numpy
    _has_compatible_shallow_copy_type _cudnn_rnn_flatten_weight _set_grad_enabled
    """.split()
)

# Methods that return a number; `float` and `int` are names of casts, too.
_NUMBERS = frozenset(["__float__", "__int__", "__index__", "__complex__"])

# Functions that return numbers of samples, among others.
_SIZES = frozenset(["size", "numel", "nelement", "len"])

# Functions through which no gradient flows to a weight.
_HARMLESS = frozenset(
    """
    detach data requires_grad deepcopy zeros_like ones_like empty_like rand_like randn_like full_like
    new_zeros new_ones new_empty new_full new_tensor
    """.split()
)

# Functions that update running statistics.
_UPDATING = frozenset([F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm])

# Attributes and methods that depend on a tensor's place in autograd's graph.
_PLACES = frozenset("is_leaf _base _is_view retain_grad retains_grad".split())

_HOOKS = frozenset([Tensor.register_hook, Tensor.register_post_accumulate_grad_hook])
_BACKWARDS = frozenset([Tensor.backward, torch.autograd.backward, torch.autograd.grad])


class Kind(Enum):
    """Says what the recorder does with a function."""

    PASSIVE = auto()  # moves no samples and no gradients
    SHAPE = auto()
    SIZE = auto()
    SET_DATA = auto()  # assigns other memory to a tensor
    HOOK = auto()  # registers a hook on a gradient
    NODE = auto()  # returns a node of autograd's graph, which can be hooked too
    PLACE = auto()  # asks for the place of a tensor in autograd's graph
    BACKWARD = auto()
    HARMLESS = auto()  # no gradient flows to a weight
    CONTROL_FLOW = auto()  # calls functions of the user, which are recorded
    TRANSPARENT = auto()  # not torch's: its body can be recorded instead
    WRITING = auto()  # ordinary, but may write to a buffer of the module
    ORDINARY = auto()


@cached("what the recorder does with a function, by function")
def kind_of(func: Callable[..., Any]) -> Kind:
    if func in CONTROL_FLOW or getattr(func, "__module__", None) == internals.CONTROL_FLOW:
        return Kind.CONTROL_FLOW
    name = name_of(func)
    if func.__name__ == "__get__":
        attribute = name
        if attribute == "shape":
            return Kind.SHAPE
        if attribute == "grad_fn":
            return Kind.NODE
        if attribute in _PLACES:
            return Kind.PLACE
        return (
            Kind.HARMLESS
            if attribute == "data"
            else (Kind.ORDINARY if attribute in _TENSOR_ATTRIBUTES else Kind.PASSIVE)
        )
    if func.__name__ in _NUMBERS:
        return Kind.PASSIVE
    if name in _SIZES:
        return Kind.SIZE
    if func in _BACKWARDS:
        return Kind.BACKWARD
    if not is_own(func) and checks_overrides(func):
        return Kind.TRANSPARENT
    if func in _HOOKS:
        return Kind.HOOK
    if name in _PLACES:
        return Kind.PLACE
    if func == Tensor.data.__set__:  # type: ignore[attr-defined]
        return Kind.SET_DATA
    if func.__name__ == "__set__" or name in _PASSIVE:
        return Kind.PASSIVE
    if name in _HARMLESS:
        return Kind.HARMLESS
    return Kind.WRITING if func in _UPDATING or writes_in_place(func) else Kind.ORDINARY
