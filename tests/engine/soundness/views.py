"""Class 6: writes through views of samples and of buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.engine.soundness.judge import Cases

__all__ = ["CASES"]

CASES = Cases()


@CASES.exact()
def view_read_after_a_write(m: Any, x: Tensor) -> Tensor:
    buf = torch.zeros(4, 2, 3)
    v = buf[:, 0]
    buf[:, 0] = m.a(x)
    return x + m.b(v)


@CASES.exact()
def written_through_a_view(m: Any, x: Tensor) -> Tensor:
    buf = torch.zeros(4, 2, 3)
    v = buf[:, 0]
    v.copy_(m.a(x))
    return x + m.b(buf.sum(1))


@CASES.exact()
def added_through_a_view(m: Any, x: Tensor) -> Tensor:
    buf = torch.zeros(4, 2, 3)
    v = buf[:, 0]
    v += m.a(x)
    return x + m.b(buf[:, 0])


@CASES.exact()
def written_through_a_transpose(m: Any, x: Tensor) -> Tensor:
    buf = torch.zeros(3, 4)
    v = buf.T
    v.copy_(m.a(x))
    return x + m.b(buf.T)


@CASES.refused()
def rows_moved_through_a_view(m: Any, x: Tensor) -> Tensor:
    buf = torch.zeros(4, 3)
    v = buf[1:]
    v.copy_(m.a(x)[:-1])
    return x + m.b(buf)


@CASES.refused()
def row_copied_to_another(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h[0].copy_(h[1])
    return x + m.b(h)


@CASES.exact()
def row_scaled(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    v = h[0]
    v.mul_(2)
    return x + m.b(h)


@CASES.refused()
def flat_half_copied(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) * 1
    v = h.view(-1)
    v[:6] = v[6:].clone()
    return x + m.b(h)


@CASES.exact()
def row_adds_detached_row(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) * 1
    r = h.select(0, 1)
    r.add_(h.detach()[0])
    return x + m.b(h)


@CASES.exact()
def out_argument(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).detach()
    out = torch.empty(4, 3)
    torch.mul(h, 2, out=out)
    return x + m.b(out)


@CASES.refused()
def column_of_flipped_samples(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) * 1
    h[:, 0] = h[:, 1].flip(0)
    return m.b(h)


@CASES.exact()
def masked_by_data(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) * 1
    h[x > 0] = 0.5
    return m.b(h)


@CASES.refused()
def masked_from_other_samples(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) * 1
    mask = torch.tensor([True, True, False, False])
    h[mask] = m.b(x)[~mask]
    return m.b(h)


@CASES.refused()
def copy_of_flipped(m: Any, x: Tensor) -> Tensor:
    h = torch.empty(4, 3)
    h.copy_(m.a(x).flip(0))
    return x + m.b(h)


@CASES.exact()
def data_replaced(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) * 1
    h.data = h.data.flip(0)
    return x + m.b(h)


@CASES.exact()
def samples_transposed_in_place(m: Any, x: Tensor) -> Tensor:
    inputs, h = x.clone(), m.a(x) * 1
    column = h[:, 0]
    inputs.t_().unsqueeze_(0)
    h.t_()
    h.mul_(2)
    return m.b(inputs[0].T) + h.T + column[:, None]


@CASES.refused(size=3)
def samples_left_transposed_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) * 1
    h.t_()
    return x + h
