"""A model for every module of torch.nn that has parameters, with its options: the cases of test_modules."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.engine.exactness import Case, Formula, numbers, of

__all__ = ["CASES", "WORDS", "D", "T"]

# A batch of 4 has the size of every other dimension.
T = D = 4
WORDS = 7


def words(*shape: int, bound: int = WORDS) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda size: (torch.randint(bound, (size, *shape)),)


def warmed(build: Callable[[], nn.Module], *shape: int) -> Callable[[], nn.Module]:
    """A lazy module after its first call, in eval mode; statistics are no longer trivial."""

    def built() -> nn.Module:
        module = build().double()
        module(numbers(3, *shape))
        return module.eval()

    return built


def normalising(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A module in eval mode, its running statistics and weights no longer 0 and 1."""

    def built() -> nn.Module:
        module = build().double().eval()
        for t in module.state_dict().values():
            if t.is_floating_point():
                t.uniform_(0.5, 2.0)
        return module

    return built


CAUSAL = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)
BIAS = torch.linspace(-1, 1, T * T, dtype=torch.float64).view(T, T)


def padding(size: int) -> Tensor:
    """(B, T), True at the end of each sequence, which has 1 to T steps."""
    return torch.arange(T) > (torch.arange(size) % T).unsqueeze(1)


def attending(mask: Tensor | None = None, pad: bool = False, **options: Any) -> Callable[..., Any]:
    def call(model: nn.Module, x: Tensor, *rest: Tensor) -> Any:
        memory, *pads = rest if pad else (*rest, None)
        return model(x, memory, memory, attn_mask=mask, key_padding_mask=pads[0], **options)

    return call


def multihead(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(D, 2, **{"batch_first": True, **options})


PAIR, TRIPLE = of((T, D), (T, D)), of((T, D), (T, 3), (T, 5))


def padded(size: int) -> tuple[Tensor, ...]:
    return (*PAIR(size), padding(size))


def padded_one(size: int) -> tuple[Tensor, ...]:
    return numbers(size, T, D), padding(size)


def layer(cls: type[nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return lambda: cls(D, 2, 8, **{"dropout": 0.0, "batch_first": True, **options})


def encoder(depth: int = 2, training: bool = True, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoder(
        layer(nn.TransformerEncoderLayer, **options)(), depth, norm=nn.LayerNorm(D)
    ).train(training)


def masked_encoder(model: nn.Module, x: Tensor, pad: Tensor) -> Tensor:
    """Padded outputs are left out: the fast path gives zeros there."""
    return model(x, src_key_padding_mask=pad).masked_fill(pad.unsqueeze(-1), 0.0)


def packed(model: nn.Module, x: Tensor) -> Tensor:
    lengths = 1 + (x[:, 0, 0].abs() * 100).long() % T  # of the sample alone, as the loop sees it
    steps = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(model(steps)[0], batch_first=True, total_length=T)[0]


def over_time(m: Any, x: Tensor) -> list[Tensor]:
    states = [m.cell(x[:, 0])]
    for t in range(1, T):
        states.append(m.cell(x[:, t], states[-1]))
    return states


def recurrent(cls: type[nn.Module], **options: Any) -> Case:
    return Case(lambda: cls(3, D, batch_first=True, **options), of((T, 3)))


def flat_bags(model: nn.Module, index: Tensor, *weights: Tensor, last: int = 0) -> Tensor:
    """1-D indices with offsets, all bags of one length."""
    offsets = torch.arange(0, index.numel() + last, T)
    return model(index.flatten(), offsets, *(w.flatten() for w in weights))


last_bags = partial(flat_bags, last=1)


def bag(mode: str = "sum", **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.EmbeddingBag(WORDS, 3, mode=mode, **options)


def word_weights(size: int) -> tuple[Tensor, ...]:
    return (*words(T)(size), numbers(size, T))


def labelled(*shape: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda size: (numbers(size, D), torch.randint(WORDS, (size, *shape)))


def adaptive(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x, y).output


SIZES = [(5,), (5, 4), (4, 3, 3)]  # of images in one, two and three dimensions
CASES: dict[type[nn.Module], dict[str, Case]] = {
    nn.Linear: {
        "plain": Case(lambda: nn.Linear(D, 3), of((D,))),
        "no bias": Case(lambda: nn.Linear(D, D, bias=False), of((T, T, D))),
    },
    nn.LazyLinear: {
        "after its first call": Case(warmed(lambda: nn.LazyLinear(3), T, D), of((T, D)))
    },
    nn.Bilinear: {
        "plain": Case(lambda: nn.Bilinear(3, D, D), of((3,), (D,))),
        "no bias": Case(lambda: nn.Bilinear(3, D, 2, bias=False), of((T, 3), (T, D))),
    },
    nn.PReLU: {
        "one slope": Case(nn.PReLU, of((D,))),
        "a slope a channel": Case(lambda: nn.PReLU(D), of((D, T))),
        "a slope a feature": Case(lambda: nn.PReLU(D), of((D,))),
    },
    nn.Embedding: {
        "plain": Case(lambda: nn.Embedding(WORDS, D), words(T)),
        "padding": Case(lambda: nn.Embedding(WORDS, D, padding_idx=2), words(T, T)),
        "sparse": Case(lambda: nn.Embedding(WORDS, D, sparse=True), words(T)),
    },
    nn.EmbeddingBag: {
        "sum": Case(bag(), words(T)),
        "mean, padding": Case(bag("mean", padding_idx=2), words(T)),
        "max": Case(bag("max"), words(T)),
        "max, padding": Case(bag("max", padding_idx=2), words(T)),
        "sparse": Case(bag(sparse=True), words(T)),
        "weights": Case(bag(), word_weights, lambda m, i, w: m(i, per_sample_weights=w)),
        "weights, padding": Case(
            bag(padding_idx=2), word_weights, lambda m, i, w: m(i, per_sample_weights=w)
        ),
        "offsets": Case(bag("mean"), words(T), flat_bags, tell_size=True),
        "offsets, max": Case(bag("max"), words(T), flat_bags, tell_size=True),
        "offsets, weights": Case(bag(), word_weights, flat_bags, tell_size=True),
        "last offset": Case(
            bag("mean", include_last_offset=True, padding_idx=1),
            words(T),
            last_bags,
            tell_size=True,
        ),
    },
    nn.LayerNorm: {
        "plain": Case(normalising(lambda: nn.LayerNorm(D)), of((T, D))),
        "no bias": Case(normalising(lambda: nn.LayerNorm((T, D), bias=False)), of((T, T, D))),
    },
    nn.RMSNorm: {
        "plain": Case(normalising(lambda: nn.RMSNorm(D)), of((T, D))),
        "eps": Case(normalising(lambda: nn.RMSNorm((T, D), eps=0.1)), of((T, T, D))),
    },
    nn.GroupNorm: {"plain": Case(normalising(lambda: nn.GroupNorm(2, D)), of((D, T)))},
    nn.MultiheadAttention: {
        "plain": Case(multihead(), PAIR, attending()),
        "without weights": Case(multihead(), PAIR, attending(need_weights=False)),
        "weights of each head": Case(multihead(), PAIR, attending(average_attn_weights=False)),
        "causal": Case(
            multihead(), PAIR, attending(CAUSAL, is_causal=True, need_weights=False), tell_size=True
        ),
        "mask": Case(multihead(), PAIR, attending(CAUSAL), tell_size=True),
        "float mask": Case(multihead(), PAIR, attending(BIAS), tell_size=True),
        "padding": Case(multihead(), padded, attending(pad=True)),
        "no bias": Case(multihead(bias=False), PAIR, attending()),
        "bias of keys and values": Case(multihead(add_bias_kv=True), PAIR, attending()),
        "bias of keys and values, padding": Case(
            multihead(add_bias_kv=True), padded, attending(CAUSAL, pad=True), tell_size=True
        ),
        "zero attention": Case(multihead(add_zero_attn=True), PAIR, attending()),
        "sizes of keys and values": Case(
            multihead(kdim=3, vdim=5), TRIPLE, lambda model, *batch: model(*batch)
        ),
        "everything": Case(
            multihead(add_bias_kv=True, add_zero_attn=True),
            padded,
            attending(BIAS, pad=True),
            tell_size=True,
        ),
        "time first": Case(multihead(batch_first=False), PAIR, attending(), batch_dim=1),
        "time first, mask": Case(
            multihead(batch_first=False, add_bias_kv=True),
            PAIR,
            attending(CAUSAL),
            batch_dim=1,
            tell_size=True,
        ),
        "time first, padding": Case(
            multihead(batch_first=False),
            padded,
            lambda m, x, y, pad: m(x, y, y, key_padding_mask=pad.t()),
            batch_dim=1,
            tell_size=True,
        ),
        "eval": Case(lambda: multihead()().eval(), PAIR, attending(need_weights=False)),
        "eval, itself": Case(lambda: multihead()().eval(), of((T, D)), lambda m, x: m(x, x, x)),
    },
    nn.TransformerEncoderLayer: {
        "plain": Case(layer(nn.TransformerEncoderLayer), of((T, D))),
        "eval": Case(lambda: layer(nn.TransformerEncoderLayer)().eval(), of((T, D))),
        "norm first, gelu": Case(
            layer(nn.TransformerEncoderLayer, norm_first=True, activation="gelu"), of((T, D))
        ),
        "no bias": Case(layer(nn.TransformerEncoderLayer, bias=False), of((T, D))),
        "time first": Case(
            layer(nn.TransformerEncoderLayer, batch_first=False),
            of((T, D)),
            batch_dim=1,
        ),
    },
    nn.TransformerEncoder: {
        "train": Case(encoder(), of((T, D))),
        "train, padding": Case(encoder(), padded_one, masked_encoder),
        "eval": Case(encoder(training=False), of((T, D))),
        "eval, padding": Case(encoder(training=False), padded_one, masked_encoder),
        "eval, time first": Case(
            encoder(training=False, batch_first=False),
            of((T, D)),
            batch_dim=1,
        ),
        "causal": Case(
            encoder(), of((T, D)), lambda m, x: m(x, mask=CAUSAL, is_causal=True), tell_size=True
        ),
    },
    nn.TransformerDecoderLayer: {
        "plain": Case(layer(nn.TransformerDecoderLayer), of((T, D), (3, D))),
        "eval, norm first": Case(
            lambda: layer(nn.TransformerDecoderLayer, norm_first=True)().eval(), PAIR
        ),
    },
    nn.TransformerDecoder: {
        "causal": Case(
            lambda: nn.TransformerDecoder(layer(nn.TransformerDecoderLayer)(), 2),
            PAIR,
            lambda m, x, y: m(x, y, tgt_mask=CAUSAL, tgt_is_causal=True),
            tell_size=True,
        ),
    },
    nn.Transformer: {
        "causal": Case(
            lambda: nn.Transformer(D, 2, 1, 1, 8, dropout=0.0, batch_first=True),
            of((3, D), (T, D)),
            lambda m, x, y: m(x, y, tgt_mask=CAUSAL),
            tell_size=True,
        ),
        "time first": Case(
            lambda: nn.Transformer(D, 2, 1, 1, 8, dropout=0.0),
            of((3, D), (T, D)),
            batch_dim=1,
        ),
    },
    nn.RNN: {
        "plain": recurrent(nn.RNN),
        "relu, bidirectional": recurrent(nn.RNN, nonlinearity="relu", bidirectional=True),
        "packed": Case(lambda: nn.RNN(3, D, batch_first=True), of((T, 3)), packed),
    },
    nn.LSTM: {
        "plain": recurrent(nn.LSTM),
        "everything": recurrent(nn.LSTM, num_layers=2, bidirectional=True, proj_size=2),
        "packed": Case(lambda: nn.LSTM(3, D, 2, batch_first=True), of((T, 3)), packed),
        "time first": Case(
            lambda: nn.LSTM(3, D),
            of((T, 3)),
            batch_dim=1,
        ),
    },
    nn.GRU: {
        "plain": recurrent(nn.GRU),
        "no bias, layers": recurrent(nn.GRU, num_layers=2, bias=False),
        "packed": Case(
            lambda: nn.GRU(3, D, batch_first=True, bidirectional=True), of((T, 3)), packed
        ),
    },
    nn.RNNCell: {
        "plain": Case(lambda: nn.RNNCell(3, D), of((3,), (D,))),
        "relu": Case(lambda: nn.RNNCell(3, D, nonlinearity="relu", bias=False), of((3,))),
    },
    nn.LSTMCell: {
        "plain": Case(lambda: nn.LSTMCell(3, D), of((3,))),
        "states": Case(
            lambda: nn.LSTMCell(3, D), of((3,), (D,), (D,)), lambda m, x, h, c: m(x, (h, c))
        ),
    },
    nn.GRUCell: {
        "plain": Case(lambda: nn.GRUCell(3, D), of((3,), (D,))),
        "over time": Case(
            lambda: Formula(over_time, cell=nn.GRUCell(3, D, bias=False)), of((T, 3))
        ),
    },
    nn.AdaptiveLogSoftmaxWithLoss: {
        "plain": Case(
            lambda: nn.AdaptiveLogSoftmaxWithLoss(D, WORDS, [3, 5], div_value=2.0),
            labelled(),
            adaptive,
        ),
        "head bias": Case(
            lambda: nn.AdaptiveLogSoftmaxWithLoss(D, WORDS, [2], head_bias=True),
            labelled(),
            adaptive,
        ),
        "all probabilities": Case(
            lambda: Formula(
                lambda m, x: m.head.log_prob(x),
                head=nn.AdaptiveLogSoftmaxWithLoss(D, WORDS, [3, 5], div_value=2.0),
            ),
            of((D,)),
        ),
    },
}
if hasattr(nn, "LinearCrossEntropyLoss"):
    CASES[nn.LinearCrossEntropyLoss] = {
        "plain": Case(
            lambda: nn.LinearCrossEntropyLoss(D, WORDS, reduction="none", bias=True), labelled()
        ),
        "several dimensions": Case(
            lambda: nn.LinearCrossEntropyLoss(D, WORDS, out_features=(T,), reduction="none"),
            labelled(T),
        ),
    }
for dims, (*shape,) in enumerate(SIZES, start=1):
    conv, turned, norm, instance, lazy_norm, lazy_instance, lazy_conv, lazy_turned = (
        getattr(nn, f"{name}{dims}d")
        for name in (
            "Conv ConvTranspose BatchNorm InstanceNorm LazyBatchNorm LazyInstanceNorm LazyConv "
            "LazyConvTranspose"
        ).split()
    )
    image = of((4, *shape))
    CASES |= {
        conv: {
            "plain": Case(partial(conv, 4, 2, 3), image),
            "options": Case(partial(conv, 4, 6, 2, stride=2, padding=1, groups=2), image),
            "circular": Case(partial(conv, 4, 2, 2, padding=1, padding_mode="circular"), image),
        },
        turned: {
            "plain": Case(partial(turned, 4, 3, 2), image),
            "options": Case(
                partial(turned, 4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), image
            ),
            "depthwise, dilated": Case(partial(turned, 4, 4, 2, dilation=2, groups=4), image),
            "no bias, output size": Case(
                partial(turned, 4, 2, 2, stride=2, bias=False),
                image,
                lambda m, x: m(x, output_size=[2 * s + 1 for s in x.shape[2:]]),
            ),
        },
        norm: {"eval": Case(normalising(partial(norm, 4)), image)},
        instance: {
            "train": Case(
                lambda c=instance: normalising(partial(c, 4, affine=True))().train(), image
            ),
            "eval, running": Case(
                normalising(partial(instance, 4, affine=True, track_running_stats=True)), image
            ),
        },
        lazy_norm: {"eval": Case(warmed(lazy_norm, 4, *shape), image)},
        lazy_instance: {
            "eval": Case(warmed(partial(lazy_instance, affine=True), 4, *shape), image)
        },
        lazy_conv: {"plain": Case(warmed(partial(lazy_conv, 2, 2), 4, *shape), image)},
        lazy_turned: {"plain": Case(warmed(partial(lazy_turned, 2, 2), 4, *shape), image)},
    }
CASES[nn.SyncBatchNorm] = {"eval": Case(normalising(lambda: nn.SyncBatchNorm(4)), of((4, 5)))}
