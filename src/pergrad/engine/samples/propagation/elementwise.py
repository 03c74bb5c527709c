"""Propagates layouts through elementwise functions, with broadcasting."""

from __future__ import annotations

from torch import Tensor

from pergrad.engine.samples.layouts import Counted, Layout, Owners, Samples
from pergrad.engine.samples.propagation.table import Call, moves_samples
from pergrad.engine.samples.shares import AVERAGED, metadata_of
from pergrad.engine.samples.sizes import BatchSize

__all__ = ["ELEMENTWISE", "aligned"]

_QUOTIENTS = frozenset("div divide truediv true_divide".split())

ELEMENTWISE = frozenset(
    """
    add sub mul div truediv floordiv true_divide floor_divide divide multiply subtract rsub mod fmod
    remainder pow float_power neg negative pos positive abs absolute sign sgn
    exp exp2 expm1 log log2 log10 log1p logaddexp logaddexp2 sqrt rsqrt square reciprocal
    sin cos tan asin acos atan atan2 arctan2 sinh cosh tanh asinh acosh atanh sinc erf erfc erfinv lgamma
    digamma sigmoid logsigmoid logit relu relu6 elu selu celu gelu silu mish hardswish hardsigmoid
    hardtanh hardshrink softshrink tanhshrink softsign softplus leaky_relu rrelu threshold
    clamp clip clamp_min clamp_max maximum minimum fmax fmin nan_to_num round floor ceil trunc fix frac
    lerp addcmul addcdiv masked_fill heaviside copysign hypot ldexp xlogy
    eq ne lt le gt ge isnan isinf isfinite isposinf isneginf isclose isreal
    logical_and logical_or logical_xor logical_not and or xor invert bitwise_and bitwise_or bitwise_xor
    bitwise_not bitwise_left_shift bitwise_right_shift lshift rshift
    dropout feature_dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d
    bernoulli normal uniform exponential zero fill random
    clone detach contiguous to type type_as float double half bfloat16 int long short bool byte char cpu
    cuda requires_grad data real imag conj resolve_conj resolve_neg
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like
    expand broadcast_to expand_as alias copy bucketize
""".split()
)


@moves_samples(*ELEMENTWISE)
def aligned(call: Call) -> Layout | None:
    """Aligns arguments at their last dimensions, as broadcasting does; their samples must coincide."""
    out = call.output
    if call.name in _QUOTIENTS and call.flows and out.grad_fn is not None:
        other = call.argument(1, "other")
        by = call.layout(other) if isinstance(other, Tensor) else other
        if isinstance(by, Counted | BatchSize):
            call.reads_values = True  # nothing remembers the note
            metadata_of(out.grad_fn)[AVERAGED] = by
    seen: list[Samples | Owners] = []
    for t, layout in call.with_samples:
        if out.dim() < t.dim():
            return None
        here = layout.at(out.dim() - t.dim() + layout.dim)
        if t.shape[layout.dim] != out.shape[here.dim]:
            if call.scope.count > 1:
                return None
            here = call.scope.samples(here.dim, 1, out.shape[here.dim])
        seen.append(here)
    return call.agreed(seen)
