"""Computes the per-sample gradient of a convolution's kernel by the cheaper of two exact algorithms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.factors.base import ALL, Dense, Factor
from pergrad.factors.choosing import chooser_of
from pergrad.factors.products import OuterProduct
from pergrad.kernels import all_launchers, have_kernels
from pergrad.runtime.precision import wide

__all__ = ["Convolution"]


@dataclass(eq=False)
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

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.grad_output.shape[0], *self.kernel)

    @property
    def dtype(self) -> torch.dtype:
        return self.grad_output.dtype

    @property
    def geometry(self) -> tuple[object, ...]:
        """Returns all fields except the tensors."""
        return (self.kernel, self.stride, self.padding, self.dilation, self.groups)

    @property
    def positions(self) -> int:
        """Counts the output positions of one sample."""
        return self.grad_output.shape[1] * prod(self._out_shape)

    @property
    def scratch(self) -> int:
        if self._way() != "windows":
            return 0
        return self.groups * prod(self.kernel[1:]) * self.positions

    @property
    def channels_last_is_cheaper(self) -> bool:
        """Whether windows copied in the order of `channels_last` have fewer and longer pieces."""
        if self._way() != "windows":
            return False
        sizes = self.kernel[1], self._out_shape[-1]
        return chooser_of(self.input).pick("order of windows", sizes) == "channels last"

    def materialize(self, dtype: torch.dtype | None = None) -> Tensor:
        way = self._way()
        if way == "kernel":
            found: Tensor = all_launchers().depthwise_gradients(*self.in_two_dimensions())
            return found.view(self.shape).to(dtype or self.dtype)
        if way == "samples as groups":
            return self.by_samples_as_groups(dtype)
        return self.by_windows(dtype)

    def part(self, samples: slice, rows: slice = ALL) -> Factor:
        some = replace(self, grad_output=self.grad_output[samples], input=self.input[samples])
        if rows == ALL:
            return some
        # An output channel reads the input channels of its group only: keep the groups of these rows.
        each, channels = self.kernel[0] // self.groups, self.kernel[1]
        start, stop, _ = rows.indices(self.kernel[0])
        first, last = start // each, -(-stop // each)
        some = replace(some, input=some.input[:, :, first * channels : last * channels])
        if last - first > 1 and (start % each or stop % each):
            groups = some._of_channels(slice(first * each, last * each), last - first)
            whole = groups.materialize(wide(self.dtype))
            return Dense(whole[:, start - first * each : stop - first * each])
        return some._of_channels(rows, last - first)

    def _of_channels(self, rows: slice, groups: int) -> Convolution:
        g = self.grad_output[:, :, rows]
        return replace(self, grad_output=g, kernel=(g.shape[2], *self.kernel[1:]), groups=groups)

    def _way(self) -> str:
        """Returns the cheapest way to the gradients."""
        channels, taps, positions = self.kernel[1], prod(self.kernel[2:]), prod(self._out_shape)
        sizes = channels, taps, positions, self.groups, self.has_depthwise_kernel
        return chooser_of(self.input).pick("gradient of a kernel", sizes)

    @property
    def has_one_tap(self) -> bool:
        """Whether every output reads a single position of all channels."""
        is_padded = any(before or after for before, after in self.padding)
        return self.groups == 1 and prod(self.kernel[2:]) == 1 and not is_padded

    @property
    def has_depthwise_kernel(self) -> bool:
        """Whether each output reads one channel of its own, and a Triton kernel computes the gradients."""
        if self.kernel[1] != 1 or self.groups == 1 or len(self.stride) > 2:
            return False
        return have_kernels((self.grad_output, self.input))

    @property
    def _out_shape(self) -> tuple[int, ...]:
        return tuple(self.grad_output.shape[3:])

    @property
    def _seen(self) -> list[int]:
        """Returns the extent of the padded input that the kernel reads, for each spatial dimension."""
        return [
            stride * (size - 1) + dilation * (taps - 1) + 1
            for size, taps, stride, dilation in zip(
                self._out_shape, self.kernel[2:], self.stride, self.dilation, strict=True
            )
        ]

    def _sees_less(self) -> bool:
        """Whether a convolution of the padded input would have more positions than the gradient.

        This happens for transposed convolutions.
        """
        padded = [s + sum(p) for s, p in zip(self.input.shape[3:], self.padding, strict=True)]
        return any(
            size >= seen + stride
            for size, seen, stride in zip(padded, self._seen, self.stride, strict=True)
        )

    def padded_input(self) -> Tensor:
        x = self.input
        if any(before or after for before, after in self.padding):
            x = F.pad(x, [side for pair in reversed(self.padding) for side in pair])
        return x

    def in_two_dimensions(
        self,
    ) -> tuple[Tensor, Tensor, list[int], list[int], list[int], list[int], int]:
        """Returns g, x, taps, stride, leading padding, dilation and groups, with two spatial dimensions."""
        missing = 2 - len(self.stride)
        g, x = self.grad_output, self.input
        for _ in range(missing):
            g, x = g.unsqueeze(3), x.unsqueeze(3)
        ones = [1] * missing
        padding = [0] * missing + [before for before, _ in self.padding]
        taps, stride, dilation = (
            [*ones, *sizes] for sizes in (self.kernel[2:], self.stride, self.dilation)
        )
        return g, x, taps, stride, padding, dilation, self.groups

    def by_samples_as_groups(self, dtype: torch.dtype | None = None) -> Tensor:
        """Computes one weight gradient of a convolution with a group for every group of every sample."""
        n = self.grad_output.shape[0]
        shape = (n * self.kernel[0], *self.kernel[1:])
        gradient = self._kernel_gradient(
            self.grad_output.transpose(0, 1).flatten(1, 2),
            lambda x: x.transpose(0, 1).flatten(1, 2),
            shape,
            n * self.groups,
            dtype or self.dtype,
        )
        return gradient.view(n, *self.kernel)

    def summed(self, dtype: torch.dtype) -> Tensor:
        """Σ_n G_n, the ordinary gradient of the kernel."""
        return self._kernel_gradient(
            self.grad_output.flatten(0, 1),
            lambda x: x.flatten(0, 1),
            self.kernel,
            self.groups,
            dtype,
        )

    def _kernel_gradient(
        self,
        grad_output: Tensor,
        arranged: Callable[[Tensor], Tensor],
        shape: tuple[int, ...],
        groups: int,
        dtype: torch.dtype,
    ) -> Tensor:
        x, padding = self._input_and_padding()
        g = grad_output.to(dtype)
        _, gradient, _ = torch.ops.aten.convolution_backward(
            g,
            arranged(x.to(dtype)),
            g.new_empty(shape),  # only its shape is read; an expanded number would be copied to it
            None,
            self.stride,
            padding,
            self.dilation,
            False,
            [0] * len(padding),
            groups,
            [False, True, False],
        )
        return gradient

    def _input_and_padding(self) -> tuple[Tensor, list[int]]:
        """Returns what an ordinary convolution with as many positions as the gradient reads."""
        if all(before == after for before, after in self.padding) and not self._sees_less():
            return self.input, [before for before, _ in self.padding]
        x = self.padded_input()
        for dim, size in enumerate(self._seen, 3):
            x = x.narrow(dim, 0, size)
        return x, [0] * len(self.padding)

    def windows_times(self, matrix: Tensor) -> Tensor:  # (c·k, b) -> (n, b, r·p)
        """Multiplies all windows by a matrix: one convolution with b kernels. Needs groups of 1."""
        x, padding = self._input_and_padding()
        products = torch.convolution(
            x.flatten(0, 1).to(matrix.dtype),
            matrix.T.reshape(-1, *self.kernel[1:]),
            None,
            self.stride,
            padding,
            self.dilation,
            False,
            [0] * len(padding),
            1,
        )
        return products.unflatten(0, x.shape[:2]).transpose(1, 2).flatten(2)

    def by_windows(self, dtype: torch.dtype | None = None) -> Tensor:
        """Copies every window that the kernel reads and multiplies it with the output gradient."""
        product, columns = self.as_outer_product(), prod(self.kernel[1:])
        sizes = self.kernel[0] // self.groups, columns, self.dtype.itemsize == 2
        if chooser_of(self.input).pick("product of windows", sizes) == "as it is":
            return product.materialize(dtype).view(self.shape)
        return product.transposed().materialize(dtype).mT.contiguous().view(self.shape)

    def windows(self) -> Tensor:
        """Returns the window of each position as a view, (n, g, r, *out, *taps, c)."""
        out, taps = self._out_shape, self.kernel[2:]
        x = self._padded_channels_last()
        strides = x.stride()  # of (n, r, g, *space, c)
        steps = [s * step for s, step in zip(strides[3:-1], self.stride, strict=True)]
        reach = [s * step for s, step in zip(strides[3:-1], self.dilation, strict=True)]
        shape = (*x.shape[:3], *out, *taps, x.shape[-1])
        return x.as_strided(shape, (*strides[:3], *steps, *reach, 1)).transpose(1, 2)

    def _padded_channels_last(self) -> Tensor:
        """Pads the input and permutes it to (n, r, g, *space, c) in one copy."""
        x = self.input.unflatten(2, (self.groups, -1)).movedim(3, -1)
        if not any(before or after for before, after in self.padding):
            return x.contiguous()
        sizes = [s + sum(p) for s, p in zip(x.shape[3:-1], self.padding, strict=True)]
        padded = x.new_zeros(*x.shape[:3], *sizes, x.shape[-1])
        inner = padded
        for dim, (before, _) in enumerate(self.padding, 3):
            inner = inner.narrow(dim, before, x.shape[dim])
        inner.copy_(x)
        return padded

    def channels_last(self) -> OuterProduct:
        """Returns `as_outer_product` with columns ordered by tap, then channel."""
        n, positions, columns = self.grad_output.shape[0], self.positions, prod(self.kernel[1:])
        windows = self.windows().reshape(n * self.groups, positions, columns)
        return OuterProduct(self.by_position(), windows)

    def as_outer_product(self) -> OuterProduct:
        """Rewrites the factor with windows as input: n · groups samples, r·p positions, o / groups by c·k."""
        n, positions = self.grad_output.shape[0], self.positions
        columns = self.columns().reshape(n * self.groups, prod(self.kernel[1:]), positions)
        return OuterProduct(self.by_position(), columns.mT)

    def columns(self) -> Tensor:
        """Returns what each entry of a kernel's row meets as a view, (n, g, c, *taps, r, *out)."""
        out, taps = self._out_shape, self.kernel[2:]
        x = self.padded_input().unflatten(2, (self.groups, -1))  # (n, r, g, c, *space)
        strides = x.stride()
        steps = [s * step for s, step in zip(strides[4:], self.stride, strict=True)]
        reach = [s * step for s, step in zip(strides[4:], self.dilation, strict=True)]
        windows = x.as_strided((*x.shape[:4], *taps, *out), (*strides[:4], *reach, *steps))
        return windows.movedim(1, 3 + len(taps))

    def by_position(self) -> Tensor:
        """Returns the output gradient as (n · groups, r·p, o / groups)."""
        g = self.grad_output.unflatten(2, (self.groups, -1)).movedim(1, 3)
        return g.reshape(g.shape[0] * self.groups, -1, self.positions).mT
