"""Entry points for one's own loop: `record` a with-block, or get the gradients in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from pergrad.engine.recording import LossReduction, Recording, check_options
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

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(3, 1)
    >>> with pergrad.record(model, pergrad.Grads()) as grads:
    ...     model(torch.ones(4, 3)).sum().backward()
    >>> grads.result["weight"].shape, model.weight.grad
    (torch.Size([4, 1, 3]), None)
    """
    check_options(module, batch_size, loss_reduction)
    if not quantities:
        raise PergradError(
            "nothing to compute: pass at least one quantity, such as pergrad.Grads()"
        )
    recording = Recording(
        module, quantities, loss_reduction=loss_reduction, batch_first=batch_first
    )

    def before_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recording.enter_forward(args, kwargs)

    def after_forward(*_: Any) -> None:
        recording.leave_forward()

    before = module.register_forward_pre_hook(before_forward, with_kwargs=True, prepend=True)
    after = module.register_forward_hook(after_forward, always_call=True)
    try:
        with recording.collecting(), recording.intercepting():
            if batch_size is not None:
                recording.begin(batch_size)
            yield quantities[0] if len(quantities) == 1 else quantities
            recording.check_complete()
    finally:
        before.remove()
        after.remove()
        recording.clean_up()


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
    with record(
        model,
        Grads(),
        batch_size=batch_size,
        loss_reduction=loss_reduction,
        batch_first=batch_first,
    ) as quantity:
        loss = loss_fn(model, *batch)
        if not isinstance(loss, Tensor) or loss.dim() > 1:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise PergradError(
                f"loss_fn must return the losses of the samples, (B,), or a scalar; got {got}"
            )
        if loss.dim() == 1:
            loss = loss.mean() if loss_reduction == "mean" else loss.sum()
        loss.backward()
    result: dict[str, Tensor] = quantity.result
    return result
