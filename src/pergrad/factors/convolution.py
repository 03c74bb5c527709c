"""The per-sample gradient of a convolution's kernel, by the cheaper of two exact ways."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.factors.allocation import empty_result
from pergrad.factors.core import Factor

__all__ = ["Convolution"]


@dataclass(frozen=True, eq=False)
class Convolution(Factor):
    """G_n[o, i, k] = Σ_{r,p} g[n,r,o,p] x[n,r,i, stride·p + dilation·k - padding].

    Shapes: g (n, r, o, *out), x (n, r, c, *space), the kernel (o, c / groups, *taps).
    """

    grad_output: Tensor
    input: Tensor
    kernel: tuple[int, ...]  # its shape
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # before and after, each spatial dimension
    dilation: tuple[int, ...]
    groups: int

    def materialize(self) -> Tensor:
        if self._samples_as_groups_is_cheaper():
            return self.by_samples_as_groups()
        return self.by_windows()

    def scaled(self, scale: float) -> Convolution:
        return replace(self, grad_output=self.grad_output * scale)

    def _samples_as_groups_is_cheaper(self) -> bool:
        """Whether one grouped convolution beats copying the windows.

        The window copy costs k·c reads a position and its product runs at full speed; a grouped
        convolution copies nothing but is slow where the kernel outweighs the positions. The
        bounds are those of `benchmarks/conv_ways.py` on CPU and of an H200.
        """
        channels, taps, positions = self.kernel[1], prod(self.kernel[2:]), prod(self._out_shape)
        if taps == 1:
            return False
        if channels == 1:
            return self.groups > 1
        return channels >= 16 and positions >= (8 if self.input.is_cuda else 2) * channels

    @property
    def _out_shape(self) -> tuple[int, ...]:
        return tuple(self.grad_output.shape[3:])

    def _padded_input(self) -> Tensor:
        x = self.input.to(self.grad_output.dtype)
        if any(before or after for before, after in self.padding):
            x = F.pad(x, [side for pair in reversed(self.padding) for side in pair])
        return x

    def by_samples_as_groups(self) -> Tensor:
        """One weight gradient of a convolution that has a group for every group of every sample."""
        g, n = self.grad_output, self.grad_output.shape[0]
        if all(before == after for before, after in self.padding):
            x = self.input.to(g.dtype)
            padding = [before for before, _ in self.padding]
        else:
            x, padding = self._padded_input(), [0] * len(self.padding)
        shape = (n * self.kernel[0], *self.kernel[1:])
        _, gradient, _ = torch.ops.aten.convolution_backward(
            g.transpose(0, 1).flatten(1, 2),
            x.transpose(0, 1).flatten(1, 2),
            g.new_empty(()).expand(shape),  # only its shape is read
            None,
            self.stride,
            padding,
            self.dilation,
            False,
            [0] * len(padding),
            n * self.groups,
            [False, True, False],
        )
        return gradient.view(n, *self.kernel)

    def by_windows(self) -> Tensor:
        """A copy of every window that the kernel sees, times the gradient of the output."""
        n, rows, out = self.grad_output.shape[0], self.grad_output.shape[1], self._out_shape
        taps = self.kernel[2:]
        x = self._padded_input().unflatten(2, (self.groups, -1))  # (n, r, g, c, *space)
        strides = x.stride()
        steps = [s * step for s, step in zip(strides[4:], self.stride, strict=True)]
        reach = [s * step for s, step in zip(strides[4:], self.dilation, strict=True)]
        windows = x.as_strided((*x.shape[:4], *taps, *out), (*strides[:4], *reach, *steps))
        # (n, r, g, c, *k, *p) -> (n, g, c·k, r·p), and the gradient -> (n, g, o, r·p)
        columns = windows.movedim(1, 3 + len(taps)).reshape(
            n * self.groups, prod(self.kernel[1:]), rows * prod(out)
        )
        g = self.grad_output.unflatten(2, (self.groups, -1)).movedim(1, 3)
        g = g.reshape(n * self.groups, -1, rows * prod(out))
        product = empty_result((n * self.groups, g.shape[1], columns.shape[1]), g)
        return torch.bmm(g, columns.mT, out=product).view(n, *self.kernel)
