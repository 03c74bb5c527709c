"""Entry points for one's own loop: `record` a with-block, or get the gradients in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pergrad.engine.checking.step_check import verified
from pergrad.engine.recording.options import LossReduction, Options, Params
from pergrad.engine.recording.recording import check_quantities, recorded
from pergrad.engine.recording.running import run_recorded
from pergrad.quantities import Grads, Norms, Quantity

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pergrad.engine.recording.options import RecordOptions

__all__ = ["grads", "norms", "record"]


@contextmanager
def record(
    module: nn.Module,
    *quantities: Quantity,
    batch_size: int | None = None,
    loss_reduction: LossReduction = "sum",
    batch_first: bool = True,
    params: Params | None = None,
    sample_weights: Tensor | None = None,
    max_bytes: int | None = None,
    offload: bool = False,
    verify: bool = False,
) -> Iterator[Any]:
    """Computes the quantities of the per-sample gradients of whatever backward runs inside the block.

    The module is used as it is and stays what it is; its parameters get no `.grad`. The results are
    in the quantities when the block ends. The block's value is the quantity, or a tuple of several, which
    share their work.

    Args:
        module: the module whose trainable parameters are recorded.
        quantities: what to compute: `Grads`, `Norms`, `ClippedSum`, `SecondMoment`, `Variance`, `Dots`,
            `Gram`, `Projection`, `NoiseScale`, or one of your own.
        batch_size: the number of samples; by default read off the module's first call.
        loss_reduction: whether the loss is the "sum" or the "mean" of the samples' losses.
        batch_first: whether the samples are in the first dimension of the inputs, or in the second.
        params: record some of the parameters only: a pattern of names such as "head.*", a parameter, or
            several of either. The others count as frozen within the block.
        sample_weights: (B,), what the gradient of each sample is multiplied by.
        max_bytes: how much memory a reduction may use for pieces of gradients, beside its result, and on a
            GPU for what waits to be reduced at once; by default a sixteenth of what is free, and no more
            than 1 GB. The result does not depend on it.
        offload: put the results into CPU memory, those of each parameter as soon as they are known.
        verify: compare a few samples with the module run on them alone, and raise if they differ; for
            the first step of a job. Needs full gradients and one call of a module without dropout.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(3, 1)
    >>> with pergrad.record(model, pergrad.Grads(), pergrad.Norms()) as (grads, norms):
    ...     model(torch.ones(4, 3)).sum().backward()
    >>> grads.result["weight"].shape, norms.result, model.weight.grad
    (torch.Size([4, 1, 3]), tensor([2., 2., 2., 2.]), None)
    """
    options = Options(
        batch_size, loss_reduction, batch_first, params, sample_weights, max_bytes, offload
    )
    check_quantities(quantities)
    check = Grads() if verify else None
    with (
        nullcontext() if check is None else verified(module, check, loss_reduction, batch_first),
        recorded(module, [*quantities, *([] if check is None else [check])], options),
    ):
        yield quantities[0] if len(quantities) == 1 else quantities


def grads(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *batch: Any,
    **options: Unpack[RecordOptions],
) -> dict[str, Tensor]:
    """The gradient of every sample's loss: for each trainable parameter a tensor (B, *shape).

    Args:
        model: any module; it is not changed, and `.grad` is not touched.
        loss_fn: called as loss_fn(model, *batch); gives the (B,) losses of the samples, or their sum
            or mean, as `loss_reduction` says.
        batch: what loss_fn takes beside the model.
        options: those of `pergrad.record` but `verify`; `loss_reduction` says what a scalar loss is.

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
    run_recorded(model, loss_fn, batch, [quantity], Options(**options))
    return quantity.result


def norms(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *batch: Any,
    **options: Unpack[RecordOptions],
) -> Tensor:
    """The L2 norm of the gradient of every sample's loss over all trainable parameters, (B,).

    The arguments are those of `pergrad.grads`. No gradient is ever held.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> x = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    >>> pergrad.norms(model, lambda model, x: model(x).sum(1), x)
    tensor([5., 1.])
    """
    quantity = Norms()
    run_recorded(model, loss_fn, batch, [quantity], Options(**options))
    return quantity.result
