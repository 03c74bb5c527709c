"""Propagates layouts through functions of torch.nn that treat the batch dimension row by row."""

from __future__ import annotations

from torch import Tensor

from pergrad.engine.samples.layouts import Layout, Owners, Samples
from pergrad.engine.samples.propagation.elementwise import aligned
from pergrad.engine.samples.propagation.table import Call, moves_samples
from pergrad.engine.samples.propagation.totals import origin_of

__all__: list[str] = []

_SPATIAL = """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d lp_pool1d lp_pool2d lp_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d fractional_max_pool2d fractional_max_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_unpool1d max_unpool2d max_unpool3d
    max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
    adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices
    fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices boolean_dispatch fn
    interpolate upsample upsample_nearest upsample_bilinear pixel_shuffle pixel_unshuffle channel_shuffle
    native_channel_shuffle affine_grid grid_sample fold
"""


@moves_samples(*_SPATIAL.split())
def _spatial(call: Call) -> Layout | None:
    """Keeps the layout: the batch is the first dimension, and each row is computed independently."""
    t = call.argument(0, "input", "theta")
    layout = call.layout(t)
    if isinstance(layout, Samples) and layout.dim == 1 and call.name.startswith("conv"):
        return _grouped(call, layout)
    if isinstance(layout, Samples | Owners) and (layout.dim != 0 or _is_unbatched(call, t)):
        return call.mixed()
    return layout


def _grouped(call: Call, layout: Samples) -> Layout:
    """Handles a convolution with one kernel per sample, in which the groups separate the samples."""
    kernel = call.layout(call.argument(1, "weight"))
    groups = call.argument(6, "groups", default=1)
    count = call.scope.count
    is_own = isinstance(kernel, Samples) and kernel.dim == 0 and kernel.pre == layout.pre == 1
    if not is_own or groups % count:
        return call.mixed()
    return call.scope.samples(1, 1, call.output.shape[1] // count)


def _is_unbatched(call: Call, t: Tensor) -> bool:
    """Whether a convolution treats the first dimension of its input as channels."""
    return (
        call.name.startswith("conv") and call.name[-1] == "d" and t.dim() == int(call.name[-2]) + 1
    )


@moves_samples("pad", "constant_pad_nd")
def _pad(call: Call) -> Layout | None:
    t = call.argument(0, "input")
    layout = call.layout(t)
    if isinstance(layout, Samples | Owners):
        amounts = call.argument(1, "pad")
        last = 2 * (t.dim() - 1 - layout.dim)
        if any(amounts[last : last + 2]):
            return call.lost("pads the sample dimension")
    return layout


@moves_samples("layer_norm", "rms_norm")
def _trailing_norm(call: Call) -> Layout:
    t, shape = call.argument(0, "input"), call.argument(1, "normalized_shape")
    layout = call.layout(t)
    if isinstance(layout, Samples | Owners) and layout.dim >= t.dim() - len(shape):
        return call.mixed()
    return layout


@moves_samples("group_norm", "instance_norm", "local_response_norm")
def _batch_first_norm(call: Call) -> Layout | None:
    return _spatial(call)


@moves_samples("prelu")
def _slope_of_each_channel(call: Call) -> Layout | None:
    layout = call.layout(call.argument(0, "input"))
    has_slopes = call.argument(1, "weight").numel() > 1
    if has_slopes and isinstance(layout, Samples | Owners) and layout.dim == 1:
        return call.lost("treats the sample dimension as channels")
    return layout


@moves_samples("batch_norm")
def _batch_norm(call: Call) -> Layout | None:
    if call.argument(5, "training", default=False):
        return call.mixed(
            "(BatchNorm in training mode) normalises over the batch (call .eval(), or use nn.GroupNorm)"
        )
    return _spatial(call)


@moves_samples("embedding", "one_hot")
def _lookup(call: Call) -> Layout | None:
    """Returns the layout of the indices: each index gives one row of a table that all samples share."""
    first = call.argument(0, "input", "weight", "tensor")
    layout = call.layout(first)
    if isinstance(layout, Samples | Owners):
        return layout
    second = call.layout(call.argument(1, "indices", "weight"))
    is_aten = isinstance(second, Samples | Owners) and not first.dtype.is_floating_point
    return None if is_aten else second


@moves_samples("embedding_bag")
def _bags(call: Call) -> Layout | None:
    layout = call.layout(call.argument(0, "input"))
    if not isinstance(layout, Samples | Owners) or layout.dim != 0:
        return None
    seen = [la for _, la in call.with_samples]
    return call.agreed(seen) if all(la.dim == 0 for la in seen) else None


_ELEMENTWISE_LOSSES = """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
    kl_div poisson_nll_loss soft_margin_loss gaussian_nll_loss hinge_embedding_loss margin_ranking_loss
"""


@moves_samples(*_ELEMENTWISE_LOSSES.split())
def _elementwise_loss(call: Call) -> Layout | None:
    if call.output.dim():
        return aligned(call)
    rank = max(t.dim() for t, _ in call.with_samples)
    common = call.agreed(
        [
            la.at(rank - t.dim() + la.dim)
            for t, la in call.with_samples
            if not _is_of_classes(call, t, rank)
        ]
    )
    return call.total(origin_of(call)) if common.has_samples else common


def _is_of_classes(call: Call, t: Tensor, rank: int) -> bool:
    """Whether an argument has a number for each class, of which there may be as many as samples."""
    return t is call.kwargs.get("pos_weight") and t.dim() < rank and not t.requires_grad


@moves_samples("ctc_loss")
def _alignment_loss(call: Call) -> Layout | None:
    """Takes the samples of the scores, (T, B, C): targets may be one after another in one vector."""
    scores: Tensor = call.argument(0, "log_probs")
    layout = call.layout(scores)
    if not isinstance(layout, Samples) or (layout.dim, layout.pre, layout.post) != (1, 1, 1):
        return None
    return layout.at(0) if call.output.dim() else call.total(origin_of(call))


@moves_samples("cross_entropy", "nll_loss")
def _class_loss(call: Call) -> Layout | None:
    """Removes the class dimension: (N, C, ...) scores and (N, ...) targets."""
    scores: Tensor = call.argument(0, "input")
    layout = call.layout(scores)
    classes = 1 if scores.dim() > 1 else 0
    if isinstance(layout, Samples | Owners) and layout.dim == classes:
        return call.mixed("takes the samples for classes")
    if not call.output.dim():
        target = call.layout(call.argument(1, "target"))
        both = [la for la in (layout, target) if isinstance(la, Samples | Owners)]
        if any(la.dim for la in both):
            return None  # positions, or classes of targets that are probabilities
        common = call.agreed(both) if both else layout
        return call.total(origin_of(call)) if common.has_samples or not both else common
    if not isinstance(layout, Samples | Owners):
        return None
    place = layout.at(layout.dim - (layout.dim > classes))
    target = call.layout(call.argument(1, "target"))
    if isinstance(target, Samples | Owners) and target.dim != place.dim:
        return None
    return call.agreed([place, target] if isinstance(target, Samples | Owners) else [place])
