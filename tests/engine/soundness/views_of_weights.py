"""Class 6: writes to derived weights, and through views of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.engine.soundness.judge import Cases

__all__ = ["CASES"]

CASES = Cases()


@CASES.exact()
def weight_column_scaled(m: Any, x: Tensor) -> Tensor:
    w = m.w.clone()
    w[:, 1].mul_(3)
    return F.linear(x, w)


@CASES.exact()
def weight_scaled_under_a_view(m: Any, x: Tensor) -> Tensor:
    w = m.w.clone()
    v = w[0]
    w.mul_(2)
    return F.linear(x, w) + v


@CASES.exact()
def weight_shifted_through_a_transpose(m: Any, x: Tensor) -> Tensor:
    w = m.w * 1
    w.T.add_(1)
    return F.linear(x, w)


@CASES.exact()
def weight_row_cleared(m: Any, x: Tensor) -> Tensor:
    w = m.w * 1
    w[0] = 0
    return F.linear(x, w)


@CASES.exact()
def weight_row_from_another_weight(m: Any, x: Tensor) -> Tensor:
    w = m.w.clone()
    w[0] = m.a.weight[0]
    return F.linear(x, w)


@CASES.exact()
def weight_scaled_through_a_flat_view(m: Any, x: Tensor) -> Tensor:
    w = m.w.clone()
    v = w.view(-1)
    v[::2].mul_(2)
    return F.linear(x, w)


@CASES.exact()
def weight_view_from_before(m: Any, x: Tensor) -> Tensor:
    w = m.w.clone()
    v = w.T
    w.mul_(2)
    return x @ v


@CASES.exact()
def weight_data_scaled(m: Any, x: Tensor) -> Tensor:
    w = m.w.clone()
    w.data.mul_(2)
    return F.linear(x, w)


@CASES.exact()
def weight_scaled_through_detach(m: Any, x: Tensor) -> Tensor:
    w = m.w.clone()
    w.detach().mul_(2)
    return F.linear(x, w)


@CASES.exact()
def weight_row_into_a_buffer(m: Any, x: Tensor) -> Tensor:
    buf = torch.zeros(3, 3)
    buf[0] = m.w[0]
    return F.linear(x, buf)


@CASES.refused()
def weight_into_a_view_of_a_buffer(m: Any, x: Tensor) -> Tensor:
    buf = torch.zeros(2, 3, 3)
    v = buf[1]
    v.copy_(m.w)
    return F.linear(x, buf.sum(0))


@CASES.exact()
def view_of_a_view(m: Any, x: Tensor) -> Tensor:
    w = m.w.clone()
    v = w[1:]
    u = v[0]
    u.mul_(2)
    v.add_(1)
    return F.linear(x, w) + u


@CASES.exact()
def stale_view_of_a_view(m: Any, x: Tensor) -> Tensor:
    w = m.w * 1
    v = w.view(-1)
    u = v[3:6]
    w.mul_(2)
    return F.linear(x, w) + u + v[:3]


@CASES.exact()
def diagonal_cleared(m: Any, x: Tensor) -> Tensor:
    w = m.w.clone()
    w.diagonal().zero_()
    return F.linear(x, w)


@CASES.exact()
def row_of_a_transpose_cleared(m: Any, x: Tensor) -> Tensor:
    w = m.w.clone()
    t = w.T
    t[0] = 0
    return F.linear(x, w) + x @ t


@CASES.exact()
def views_written_from_weights(m: Any, x: Tensor) -> Tensor:
    w = m.w.clone()
    w[0] += m.a.weight[1]
    w[:, 2].copy_(m.b.bias)
    return F.linear(x, w)


@CASES.exact()
def stale_view_after_another_weight(m: Any, x: Tensor) -> Tensor:
    w = m.w.clone()
    v = w[0]
    w.mul_(2)
    return F.linear(x, m.a.weight, v)


@CASES.exact()
def stale_views_among_weights(m: Any, x: Tensor) -> Tensor:
    w = m.w.clone()
    u, v = w[0], w[1]
    w.mul_(2)
    return x @ torch.stack([m.a.bias, u, v])


@CASES.exact()
def view_of_a_constant_before_a_weight_is_written_into_it(m: Any, x: Tensor) -> Tensor:
    buffer = torch.zeros(3, 3)
    row = buffer[0]
    buffer.add_(m.w)
    return m.a(x) * row


@CASES.exact()
def flat_view_of_a_constant_before_a_weight_is_copied_into_it(m: Any, x: Tensor) -> Tensor:
    buffer = torch.zeros(3, 3)
    flat = buffer.view(-1)
    buffer.copy_(m.w)
    return m.a(x) * flat[:3]


@CASES.exact()
def row_of_a_constant_before_it_is_assigned(m: Any, x: Tensor) -> Tensor:
    buffer = torch.zeros(3, 3)
    row = buffer[0]
    buffer[0] = m.a.bias
    return m.b(x) * row


@CASES.exact()
def view_of_a_view_before_two_writes(m: Any, x: Tensor) -> Tensor:
    buffer = torch.zeros(3, 3)
    part = buffer[0][1:]
    buffer.copy_(m.w)
    buffer.mul_(2)
    return m.a(x)[:, :2] * part


@CASES.exact()
def detached_constant_stays_constant(m: Any, x: Tensor) -> Tensor:
    buffer = torch.zeros(3)
    apart = buffer.detach()
    buffer.copy_(m.a.bias)
    return m.b(x) * (buffer + apart)


@CASES.exact()
def weight_transposed_in_place(m: Any, x: Tensor) -> Tensor:
    w = m.w * 1
    row, column = w[0], w[:, 1]
    w.t_()
    w.mul_(2)
    w.unsqueeze_(0).squeeze_(0)
    return F.linear(x, w) + row + column


@CASES.exact()
def view_of_a_weight_transposed_in_place(m: Any, x: Tensor) -> Tensor:
    w = m.w * 1
    rows = w[1:]
    rows.transpose_(0, 1).mul_(2)
    w.add_(1)
    return F.linear(x, w) + rows.sum(1)


@CASES.refused()
def weight_cut_in_place(m: Any, x: Tensor) -> Tensor:
    w = m.w * 1
    w.as_strided_((3,), (3,))
    return m.a(x) * w


@CASES.refused()
def weight_transposed_without_gradients(m: Any, x: Tensor) -> Tensor:
    w = m.w * 1
    with torch.no_grad():
        w.t_()
    return F.linear(x, w)


@CASES.exact()
def weight_detached_in_place(m: Any, x: Tensor) -> Tensor:
    w = m.w * 1
    row = w[0]
    w.detach_()
    return F.linear(m.a(x), w) + row


@CASES.exact()
def weight_detached_and_written(m: Any, x: Tensor) -> Tensor:
    w = m.w * 1
    w.detach_().add_(m.b.weight)
    return F.linear(m.a(x), w)


@CASES.exact()
def rows_written_twice_without_gradients(m: Any, x: Tensor) -> Tensor:
    w, h = m.w * 1, m.a(x) * 1
    with torch.no_grad():
        m.b.weight[1:].mul_(2).mul_(0.5)
        for t in (w, h):
            t[1:].mul_(2).clamp_(-1, 1)
            t[:, 1:].mul_(2)[:, 0].add_(1)
    return m.b(F.linear(h, w))
