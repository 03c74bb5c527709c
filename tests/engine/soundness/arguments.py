"""Class 5: samples and weights in arguments that a handler may not look at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.engine.soundness.judge import Cases

__all__ = ["CASES"]

CASES = Cases()


@CASES.exact()
def grid_sample(m: Any, x: Tensor) -> Tensor:
    img = torch.randn(4, 1, 5, 5, generator=torch.Generator().manual_seed(0))
    g = torch.tanh(m.a(x))[:, :2].view(4, 1, 1, 2)
    return x + m.b(F.grid_sample(img, g, align_corners=False).view(4, 1).expand(4, 3))


@CASES.exact()
def grid_sample_of_one_image(m: Any, x: Tensor) -> Tensor:
    img = torch.randn(1, 1, 5, 5, generator=torch.Generator().manual_seed(0))
    g = torch.tanh(m.a(x))[:, :2].view(1, 4, 1, 2)
    return x + m.b(F.grid_sample(img, g, align_corners=False).view(4, 1).expand(4, 3))


@CASES.exact()
def linear_with_one_bias_for_all_outputs(m: Any, x: Tensor) -> Tensor:
    return F.linear(m.a(x), m.w, m.w[0, 0]) + F.linear(x, m.w, m.w[:1])


@CASES.exact(parts=lambda: {"one": nn.Parameter(torch.randn(1))})
def addmm_with_one_bias_for_all_outputs(m: Any, x: Tensor) -> Tensor:
    return torch.addmm(m.one, m.a(x), m.w) + F.linear(x, m.w, m.one)


@CASES.refused()
def kernels_of_samples(m: Any, x: Tensor) -> Tensor:
    img = torch.randn(4, 1, 6, generator=torch.Generator().manual_seed(0))
    k = m.a(x).view(4, 1, 3)
    return x + m.b(F.conv1d(img, k).mean((1, 2))[:, None].expand(4, 3))


@CASES.exact()
def kernels_of_samples_in_channels(m: Any, x: Tensor) -> Tensor:
    img = torch.randn(2, 1, 6, generator=torch.Generator().manual_seed(0))
    k = m.a(x).view(4, 1, 3)
    return x + m.b(F.conv1d(img, k).transpose(0, 1).flatten(1)[:, :3])


@CASES.refused()
def kernels_and_images_of_samples(m: Any, x: Tensor) -> Tensor:
    k = m.a(x).view(4, 1, 3)
    return x + m.b(F.conv1d(x.view(4, 1, 3).repeat(1, 1, 2), k).mean(2)[:, :3])


@CASES.refused()
def bias_of_samples(m: Any, x: Tensor) -> Tensor:
    return x + F.linear(
        torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), m.w, m.a(x)[:, 0][:3]
    )


@CASES.refused()
def bias_of_samples_and_data(m: Any, x: Tensor) -> Tensor:
    return x + F.linear(x, torch.ones(4, 3), m.a(x)[:, 0])[:, :3]


@CASES.refused()
def bias_and_input_of_samples(m: Any, x: Tensor) -> Tensor:
    return x + F.linear(m.a(x), torch.ones(4, 3), m.a(x)[:, 0])[:, :3]


@CASES.exact(parts=lambda: {"mask": nn.Parameter(torch.randn(4, 3, 3))})
def attention_mask_of_weights(m: Any, x: Tensor) -> Tensor:
    q = m.a(x).view(4, 1, 3, 1).expand(4, 4, 3, 1)
    mask = m.mask
    return x + F.scaled_dot_product_attention(q, q, q, attn_mask=mask).mean((1, 3))


@CASES.exact()
def attention_mask_of_samples(m: Any, x: Tensor) -> Tensor:
    q = torch.ones(1, 4, 3, 1) * torch.arange(3.0)[None, None, :, None]
    mask = m.a(x).view(4, 1, 3).expand(4, 3, 3)
    return x + F.scaled_dot_product_attention(q, q, q, attn_mask=mask)[0].mean(2)


@CASES.exact(parts=lambda: {"rows": nn.Parameter(torch.zeros(4, 3))})
def gather_from_rows_of_a_new_weight(m: Any, x: Tensor) -> Tensor:
    return m.a(x) + m.rows.gather(1, x.argsort(1))


@CASES.exact(parts=lambda: {"rows": nn.Parameter(torch.ones(4, 3))})
def scatter_of_rows_of_a_new_weight(m: Any, x: Tensor) -> Tensor:
    return m.a(x).scatter(1, x.argsort(1), m.rows) + m.a(x).slice_scatter(m.rows[:, :2], 1, 0, 2)


@CASES.exact()
def scatter_of_one_row_for_all_samples(m: Any, x: Tensor) -> Tensor:
    return m.a(x).scatter_add(1, x.argsort(1), m.w[:1].expand(4, 3))


@CASES.refused(parts=lambda: {"layer": nn.Conv1d(4, 4, 1)})
def samples_as_channels_of_a_layer(m: Any, x: Tensor) -> Tensor:
    return m.b(m.layer(m.a(x)[None])[0])


@CASES.refused()
def convolution_over_the_samples_as_time(m: Any, x: Tensor) -> Tensor:
    return torch.conv_tbc(m.a(x)[:, None], torch.ones(3, 3, 3), torch.zeros(3), 1)


@CASES.refused()
def layer_norm_bias_of_one_sample(m: Any, x: Tensor) -> Tensor:
    return x + F.layer_norm(
        torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), (3,), None, m.a(x)[0]
    )


@CASES.refused()
def layer_norm_bias_of_the_mean(m: Any, x: Tensor) -> Tensor:
    return x + F.layer_norm(m.b(x), (3,), None, m.a(x).mean(0))


@CASES.refused()
def table_of_samples(m: Any, x: Tensor) -> Tensor:
    return x + F.embedding(torch.tensor([1, 0, 3, 2]), m.a(x))


@CASES.refused()
def where(m: Any, x: Tensor) -> Tensor:
    return x + torch.where(m.a(x) > 0, m.b(x), m.b(x).flip(0))


@CASES.refused()
def prelu_slopes_of_one_sample(m: Any, x: Tensor) -> Tensor:
    return x + F.prelu(x.T[None], m.a(x)[0])[0].T


@CASES.refused()
def lerp_weight_of_other_samples(m: Any, x: Tensor) -> Tensor:
    return torch.lerp(x, m.b(x), m.a(x).flip(0))


@CASES.exact()
def one_image_of_weights_for_each_sample(m: Any, x: Tensor) -> Tensor:
    """No function takes one more sample here: the images would be too few."""
    images = m.w[None, None].expand(len(x), 1, 3, 3)
    grid = x.tanh()[:, None, None, :2]
    return m.a(x) * F.grid_sample(images, grid, align_corners=False).flatten(1)
