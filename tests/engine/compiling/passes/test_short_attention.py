"""Attention that is spelled out computes what the kernel computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pergrad.engine.compiling.passes.short_attention import (
    _FEW_POSITIONS,
    attention,
    spell_out_short_attention,
)


def _traced(queries: int, keys: int, dtype: torch.dtype, **options: object):
    def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, **options)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), g))

    sizes = (queries, keys, keys, queries)
    values = [torch.randn(2, t, 3, 8, dtype=dtype).transpose(1, 2) for t in sizes]
    graph = make_fx(step)(*values)
    spell_out_short_attention(graph.graph)
    graph.recompile()
    is_changed = len(graph.graph.find_nodes(op="call_function", target=attention)) == 1
    return graph, step, values, is_changed


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (5, 7), (7, 5), (2, 2)])
def test_values_gradients_and_strides_are_those_of_the_kernel(
    queries: int, keys: int, is_causal: bool, scale: float | None
) -> None:
    graph, step, values, is_changed = _traced(
        queries, keys, torch.float64, is_causal=is_causal, scale=scale
    )
    assert is_changed
    for found, expected in zip(graph(*values), step(*values), strict=True):
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()


@pytest.mark.parametrize(
    ("length", "dtype", "options"),
    [
        (_FEW_POSITIONS + 1, torch.float32, {}),
        (5, torch.bfloat16, {}),
        (5, torch.float32, {"attn_mask": torch.zeros(5, 5)}),
    ],
    ids=["long", "bfloat16", "mask"],
)
def test_what_the_kernel_does_better_is_left_to_it(
    length: int, dtype: torch.dtype, options: dict[str, object]
) -> None:
    graph, step, values, is_changed = _traced(length, length, dtype, **options)
    assert not is_changed
    for found, expected in zip(graph(*values), step(*values), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("queries", "keys", "is_short"), [(128, 128, True), (129, 5, False), (5, 129, False)]
)
def test_attention_is_short_up_to_128_queries_and_keys(
    queries: int, keys: int, is_short: bool
) -> None:
    assert _traced(queries, keys, torch.float32)[-1] is is_short
