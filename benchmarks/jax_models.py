"""Implements the models of ``benchmarks.models`` in plain jax.numpy, for one sample, with torch's weights.

Structure (heads, strides, groups) and names of weights come from the torch model, so that results are
compared with the same loop as for all methods. Import this only if JAX is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from torch import nn

from benchmarks.models import MLP, Block, Recurrent, Residual, ResNet18, Transformer, ViT

Array = Any  # jax.Array: types are checked without JAX
EPS = 1e-5  # default of torch's norm modules


@dataclass(frozen=True)
class Net:
    """Weights by their torch names; products are computed in the dtype `compute`."""

    weights: dict[str, Array]
    compute: Any

    def linear(self, name: str, x: Array) -> Array:  # (..., i) -> (..., o)
        y = x.astype(self.compute) @ self.weights[f"{name}.weight"].T.astype(self.compute)
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias.astype(self.compute)

    def conv(self, name: str, x: Array, *, stride: int, padding: int) -> Array:
        """(c, h, w) -> (o, h, w)."""
        y = jax.lax.conv_general_dilated(
            x[None].astype(self.compute),
            self.weights[f"{name}.weight"].astype(self.compute),
            (stride, stride),
            [(padding, padding)] * 2,
        )[0]
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias.astype(self.compute)[:, None, None]

    def layer_norm(self, name: str, x: Array) -> Array:  # (..., i)
        return self._normal(x, -1) * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def group_norm(self, name: str, x: Array, groups: int) -> Array:  # (c, h, w)
        normal = self._normal(x.reshape(groups, -1), -1).reshape(x.shape)
        scale, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return normal * scale[:, None, None] + bias[:, None, None]

    def _normal(self, x: Array, axis: int) -> Array:
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        centred = x - x.mean(axis, keepdims=True)
        return centred / jnp.sqrt((centred**2).mean(axis, keepdims=True) + EPS)


Forward = Callable[[Net, Array], Array]


def _block(net: Net, name: str, x: Array, block: Block) -> Array:  # (t, i) -> (t, i)
    h = net.layer_norm(f"{name}.norm1", x)
    q, k, v = (
        net.linear(f"{name}.{part}", h).reshape(len(h), block.heads, -1)
        for part in ("query", "key", "value")
    )
    scores = jnp.einsum("thi,shi->hts", q, k) / jnp.sqrt(q.shape[-1]).astype(q.dtype)
    if block.causal:
        scores = jnp.where(jnp.tri(len(h), dtype=bool), scores, -jnp.inf)
    wide = jnp.promote_types(scores.dtype, jnp.float32)
    mixing = jax.nn.softmax(scores.astype(wide)).astype(v.dtype)
    mixed = jnp.einsum("hts,shi->thi", mixing, v).reshape(len(h), -1)
    x = x + net.linear(f"{name}.out", mixed)
    h = net.linear(f"{name}.up", net.layer_norm(f"{name}.norm2", x))
    return x + net.linear(f"{name}.down", jax.nn.gelu(h, approximate=False))


def _blocks(net: Net, x: Array, blocks: nn.ModuleList) -> Array:
    for number, block in enumerate(blocks):
        assert isinstance(block, Block)
        x = _block(net, f"blocks.{number}", x, block)
    return net.layer_norm("norm", x)


def _transformer(model: Transformer) -> Forward:
    def forward(net: Net, x: Array) -> Array:  # (t,) -> (t, vocabulary)
        h = net.weights["tokens.weight"][x] + net.weights["positions.weight"][: len(x)]
        return net.linear("head", _blocks(net, h, model.blocks))

    return forward


def _vit(model: ViT) -> Forward:
    def forward(net: Net, x: Array) -> Array:  # (3, h, w) -> (classes,)
        patches = net.conv("patches", x, stride=model.patches.stride[0], padding=0)
        h = patches.reshape(len(patches), -1).T + net.weights["positions.weight"]
        return net.linear("head", _blocks(net, h, model.blocks).mean(0))

    return forward


def _residual(net: Net, name: str, x: Array, block: Residual) -> Array:
    stride, groups = block.conv1.stride[0], block.norm1.num_groups
    h = net.conv(f"{name}.conv1", x, stride=stride, padding=1)
    h = jax.nn.relu(net.group_norm(f"{name}.norm1", h, groups))
    h = net.conv(f"{name}.conv2", h, stride=1, padding=1)
    h = net.group_norm(f"{name}.norm2", h, groups)
    if not isinstance(block.shortcut, nn.Identity):
        x = net.conv(f"{name}.shortcut.0", x, stride=stride, padding=0)
        x = net.group_norm(f"{name}.shortcut.1", x, groups)
    return jax.nn.relu(h + x)


def _resnet(model: ResNet18) -> Forward:
    def forward(net: Net, x: Array) -> Array:  # (3, h, w) -> (classes,)
        h = net.conv("stem", x, stride=1, padding=1)
        h = jax.nn.relu(net.group_norm("norm", h, model.norm.num_groups))
        for number, block in enumerate(model.blocks):
            assert isinstance(block, Residual)
            h = _residual(net, f"blocks.{number}", h, block)
        return net.linear("head", h.mean((-2, -1)))

    return forward


def _mlp(model: MLP) -> Forward:
    def forward(net: Net, x: Array) -> Array:  # (i,) -> (classes,)
        for number in range(len(model.layers)):
            x = jax.nn.relu(net.linear(f"layers.{number}", x))
        return net.linear("head", x)

    return forward


def _lstm_layer(net: Net, x: Array, level: int) -> Array:  # (t, i) -> (t, i)
    inner, outer = net.weights[f"lstm.weight_hh_l{level}"], net.weights[f"lstm.weight_ih_l{level}"]
    bias = net.weights[f"lstm.bias_ih_l{level}"] + net.weights[f"lstm.bias_hh_l{level}"]
    compute = net.compute

    def step(state: tuple[Array, Array], drive: Array) -> tuple[tuple[Array, Array], Array]:
        h, c = state
        i, f, g, o = jnp.split(drive + inner.astype(compute) @ h, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    drives = x.astype(compute) @ outer.T.astype(compute) + bias.astype(compute)
    zero = jnp.zeros(inner.shape[1], compute)
    return jax.lax.scan(step, (zero, zero), drives)[1]


def _recurrent(model: Recurrent) -> Forward:
    def forward(net: Net, x: Array) -> Array:  # (t,) -> (classes,)
        h = net.weights["tokens.weight"][x]
        for level in range(model.lstm.num_layers):
            h = _lstm_layer(net, h, level)
        return net.linear("head", h[-1])

    return forward


FORWARDS: dict[type[nn.Module], Callable[[Any], Forward]] = {
    Transformer: _transformer,
    ViT: _vit,
    ResNet18: _resnet,
    MLP: _mlp,
    Recurrent: _recurrent,
}


def forward_of(model: nn.Module) -> Forward:
    """Returns the model's forward for one sample, in JAX."""
    if type(model) not in FORWARDS:
        known = ", ".join(kind.__name__ for kind in FORWARDS)
        raise NotImplementedError(
            f"{type(model).__name__} has no JAX version; the models with one are {known}"
        )
    return FORWARDS[type(model)](model)
