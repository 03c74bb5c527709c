"""Entry points for one's own loop: `record` a with-block, or get the gradients in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from pergrad.engine.recording import LossReduction
from pergrad.engine.scopes import recorded, reduced
from pergrad.engine.step_check import verified
from pergrad.errors import PergradError
from pergrad.quantities import Grads, Quantity

__all__ = ["grads", "record"]


@contextmanager
def record(
    module: nn.Module,
    *quantities: Quantity,
    batch_size: int | None = None,
    loss_reduction: LossReduction = "sum",
    batch_first: bool = True,
    verify: bool = False,
) -> Iterator[Any]:
    """Computes the quantities of the per-sample gradients of whatever backward runs inside the block.

    The module is used as it is and stays what it is; its parameters get no `.grad`. The results are
    in the quantities when the block ends. The block's value is the quantity, or a tuple of several.

    Args:
        module: the module whose trainable parameters are recorded.
        quantities: what to compute; see `pergrad.Grads`.
        batch_size: the number of samples; by default read off the module's first call.
        loss_reduction: whether the loss is the "sum" or the "mean" of the samples' losses.
        batch_first: whether the samples are in the first dimension of the inputs, or in the second.
        verify: compare a few samples with the module run on them alone, and raise if they differ; for
            the first step of a job. Needs full gradients and one call of a module without dropout.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(3, 1)
    >>> with pergrad.record(model, pergrad.Grads()) as grads:
    ...     model(torch.ones(4, 3)).sum().backward()
    >>> grads.result["weight"].shape, model.weight.grad
    (torch.Size([4, 1, 3]), None)
    """
    if not quantities:
        raise PergradError(
            "nothing to compute: pass at least one quantity, such as pergrad.Grads()"
        )
    check = Grads() if verify else None
    with (
        nullcontext() if check is None else verified(module, check, loss_reduction, batch_first),
        recorded(
            module,
            [*quantities, *([] if check is None else [check])],
            batch_size=batch_size,
            loss_reduction=loss_reduction,
            batch_first=batch_first,
        ),
    ):
        yield quantities[0] if len(quantities) == 1 else quantities


def grads(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *batch: Any,
    batch_size: int | None = None,
    loss_reduction: LossReduction = "sum",
    batch_first: bool = True,
) -> dict[str, Tensor]:
    """The gradient of every sample's loss: for each trainable parameter a tensor (B, *shape).

    Args:
        model: any module; it is not changed, and `.grad` is not touched.
        loss_fn: called as loss_fn(model, *batch); gives the (B,) losses of the samples, or their sum
            or mean, as `loss_reduction` says.
        batch: what loss_fn takes beside the model.
        batch_size: the number of samples; by default read off the model's first call.
        loss_reduction: what a scalar loss is, "sum" or "mean"; losses of shape (B,) are summed here.
        batch_first: whether the samples are in the first dimension of the model's inputs.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> x, y = torch.eye(2), torch.zeros(2, 1)
    >>> found = pergrad.grads(model, lambda model, x, y: (model(x) - y).sum(1), x, y)
    >>> found["weight"]
    tensor([[[1., 0.]],
    <BLANKLINE>
            [[0., 1.]]])
    """
    quantity = Grads()
    with recorded(
        model,
        [quantity],
        batch_size=batch_size,
        loss_reduction=loss_reduction,
        batch_first=batch_first,
    ):
        reduced(loss_fn(model, *batch), loss_reduction).backward()
    return quantity.result
