"""Defines the entry points `record`, for a with-block, and `grads` and `norms`, for one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pergrad.engine.checking.certification import certified, certified_run
from pergrad.engine.checking.step_check import verified
from pergrad.engine.collecting.blocks import EarlierBlocks
from pergrad.engine.looping.fallback import Fallback, Runner
from pergrad.engine.recording.loss_units import UnitsOfLoss
from pergrad.engine.recording.micro_batches import MicroBatches
from pergrad.engine.recording.options import (
    DEFAULT,
    Calls,
    LossReduction,
    Options,
    Owners,
    Params,
)
from pergrad.engine.recording.recording import check_quantities, recorded
from pergrad.errors import PergradError
from pergrad.quantities import Grads, Norms, Quantity
from pergrad.runtime.eagerness import refused_in_compiled_code, uncompiled

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pergrad.engine.recording.options import RecordOptions

__all__ = ["grads", "norms", "record"]


@refused_in_compiled_code
@contextmanager
def record(
    module: nn.Module,
    *quantities: Quantity,
    batch_size: int | None = None,
    loss_reduction: LossReduction = "auto",
    batch_first: bool = True,
    params: Params | None = None,
    sample_weights: Tensor | None = None,
    max_bytes: int | None = None,
    offload: bool = False,
    keep_grad: bool = False,
    loss_scale: float | Tensor | None = None,
    verify: bool = False,
    certify: bool = False,
    owners: Owners | None = None,
    calls: Calls | None = None,
) -> Iterator[Any]:
    """Computes quantities of the per-sample gradients of the backward inside the block.

    The module is not changed, and its parameters get no `.grad`, unless `keep_grad` is set. The quantities
    have their results when the block ends. The block's value is the quantity, or a tuple of several, which
    share their work. An empty batch gives empty rows, and sums of zeros.

    Args:
        module: the module whose trainable parameters are recorded.
        quantities: what to compute: `Grads`, `Norms`, `Sum`, `ClippedSum`, `SecondMoment`, `Variance`,
            `Dots`, `Gram`, `Projection`, `NoiseScale`, or one of your own.
        batch_size: the number of samples; by default inferred from the module's first call.
        loss_reduction: whether the loss is the "sum" or the "mean" of the samples' losses. "auto" detects
            which: all terms must be sums over the samples, or all of them means, and a mean is undone. A
            factor on one term is part of the loss; a factor on the whole loss is an error. So is a loss that
            is neither, such as a mean over valid positions if samples have different numbers of them.
        batch_first: whether the samples are in the first dimension of the inputs or in the second.
        params: the parameters to record: a pattern of names such as "head.*", a parameter, or several of
            either. The others are treated as frozen within the block.
        sample_weights: (B,), factors for the gradients of the samples.
        max_bytes: the memory that a reduction may use for pieces of gradients, in addition to its result,
            and on a GPU the memory that queued work may hold. By default a sixteenth of the free memory,
            at most 1 GB; a compiled step takes at least a 128th of a GPU's memory. The result does not
            depend on it.
        offload: move the results of each parameter to CPU memory as soon as they are computed.
        loss_scale: a factor on the whole loss, to undo: 1 / 4 for a loss divided by four steps of
            accumulation. The factor of a `torch.amp.GradScaler`, or of Accelerate, is found by itself.
        calls: what several calls of the module in the block are, if they are backpropagated apart: "same",
            the same samples, whose gradients add up; or "more", further samples, whose rows are appended.
            Calls that meet in one loss are the same samples.
        keep_grad: let the backward fill `.grad` too, as it would without the block: log norms while
            training. It costs what ordinary weight gradients cost.
        verify: compare a few samples with the module run on each alone, and raise an error if they
            differ; for the first step of a job. It holds full gradients, and needs exactly one call of a
            module without dropout.
        certify: prove this step when the block ends, or raise an error: one ordinary step with random
            weights of the samples certifies all of them, and a few forward passes find samples that mix;
            see `pergrad.certify`. The module must return tensors whose samples can be told apart, and
            the loss must use no parameter outside of it. The loss itself is not certified.
        owners: for samples of several rows: the sample of each row, a vector of integers 0 … B - 1 in any
            order. Arguments with as many rows have their samples there, those of B rows one row each. A
            sequence of vectors, one for each argument, or a mapping from names or positions of arguments
            (keys of dictionaries, too) to vectors tells arguments of different lengths apart; None marks
            one that all samples share. A function of the arguments may return any of these. A batch of
            graphs of torch_geometric needs no owners.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(3, 1)
    >>> with pergrad.record(model, pergrad.Grads(), pergrad.Norms()) as (grads, norms):
    ...     model(torch.ones(4, 3)).sum().backward()
    >>> grads.result["weight"].shape, norms.result, model.weight.grad
    (torch.Size([4, 1, 3]), tensor([2., 2., 2., 2.]), None)
    """
    is_default = (
        batch_size is None
        and loss_reduction == "auto"
        and batch_first is True
        and params is None
        and sample_weights is None
        and max_bytes is None
        and offload is False
        and keep_grad is False
        and owners is None
        and loss_scale is None
        and calls is None
    )
    options = (
        DEFAULT
        if is_default
        else Options(
            batch_size=batch_size,
            loss_reduction=loss_reduction,
            batch_first=batch_first,
            params=params,
            sample_weights=sample_weights,
            max_bytes=max_bytes,
            offload=offload,
            keep_grad=keep_grad,
            owners=owners,
            loss_scale=loss_scale,
            calls=calls,
        )
    )
    is_again = check_quantities(quantities)
    if verify and certify:
        raise PergradError(
            "verify=True and certify=True: pass only certify=True, which checks more"
        )
    if calls is not None and (verify or certify):
        raise PergradError(
            "verify=True and certify=True check one batch, and calls= records several: pass only one of them"
        )
    if verify and owners is not None:
        raise PergradError(
            "verify=True runs single rows, but with owners= a sample may have several: pass certify=True"
        )
    recording = certified if certify else recorded
    if calls == "more":
        recording = partial(recorded, kind=MicroBatches)
    if verify:
        recording = _recorded_and_verified
    earlier = EarlierBlocks(quantities) if is_again else None
    try:
        with recording(module, quantities, options):
            yield quantities[0] if len(quantities) == 1 else quantities
    except BaseException:
        if earlier is not None:
            earlier.restore()
        raise
    if earlier is not None:
        earlier.join()


@contextmanager
def _recorded_and_verified(
    module: nn.Module, quantities: Sequence[Quantity], options: Options
) -> Iterator[None]:
    check, told = Grads(), UnitsOfLoss()
    with (
        verified(module, check, told, options.batch_first),
        recorded(module, [*quantities, check, told], options),
    ):
        yield


@uncompiled
def grads(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *batch: Any,
    certify: bool = False,
    fallback: Fallback | None = None,
    **options: Unpack[RecordOptions],
) -> dict[str, Tensor]:
    """Returns the gradient of every sample's loss: for each trainable parameter a tensor (B, *shape).

    Args:
        model: any module; neither it nor `.grad` is changed.
        loss_fn: called as loss_fn(model, *batch); returns the (B,) losses of the samples, or their sum
            or mean, as `loss_reduction` says.
        batch: the arguments of loss_fn after the model.
        certify: prove the result as `pergrad.certify` does, or raise an error; loss_fn must return (B,).
        fallback: "loop" computes what is refused sample by sample, one forward and one backward pass each,
            with a `FallbackWarning` that says why and what it cost. Each sample's loss alone must be its
            loss in the batch; otherwise samples meet in the model, and the refusal stands. A model that
            draws random numbers keeps those of the batch: the (B,) losses are pulled back one by one.
        options: the options of `pergrad.record` except `verify`; `loss_reduction` applies to a scalar loss.

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
    _run(model, loss_fn, batch, quantity, Options.from_call("grads", options), certify, fallback)
    return quantity.result


@uncompiled
def norms(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *batch: Any,
    certify: bool = False,
    fallback: Fallback | None = None,
    **options: Unpack[RecordOptions],
) -> Tensor:
    """Returns the L2 norm of the gradient of every sample's loss over all trainable parameters, (B,).

    Takes the arguments of `pergrad.grads`. Never holds the gradients of all samples.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> x = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    >>> pergrad.norms(model, lambda model, x: model(x).sum(1), x)
    tensor([5., 1.])
    """
    quantity = Norms()
    _run(model, loss_fn, batch, quantity, Options.from_call("norms", options), certify, fallback)
    return quantity.result


def _run(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: tuple[Any, ...],
    quantity: Quantity,
    options: Options,
    certify: bool,
    fallback: Fallback | None,
) -> None:
    runner = Runner(fallback)
    if certify:
        _, report = certified_run(model, loss_fn, batch, [quantity], options, runner=runner)
        report.check()
    else:
        runner.run(model, loss_fn, batch, [quantity], options)
