"""Packages of one idea each: mixtures of experts, recurrences, quantisation, memories."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.outside.case import Library, images, noise, of, words
from tests.outside.sequences import LANGUAGE, on_rows, on_words, rows

conformer = Library("conformer")
on_rows(conformer, "Conformer", dim=16, depth=2, dim_head=8, heads=2, conv_kernel_size=5)
on_rows(
    conformer, "ConformerBlock", dim=16, dim_head=8, heads=2, conv_kernel_size=5, conv_causal=True
)
conformer.add_timed(
    "Conformer, 128 frames",
    lambda b: of(
        conformer("Conformer")(dim=144, depth=4, dim_head=36, heads=4), noise(b, 128, 144)
    ),
)

soft_moe = Library("soft-moe-pytorch")
on_rows(soft_moe, "SoftMoE", dim=16, num_experts=4, seq_len=16)
on_rows(soft_moe, "SoftMoE", "SoftMoE, GEGLU", dim=16, num_experts=4, seq_len=16, geglu=True)
on_rows(soft_moe, "DynamicSlotsSoftMoE", dim=16, num_experts=4)

experts = Library("mixture-of-experts")
_WIDE = {"dim": 16, "hidden_dim": 16, "capacity_factor_eval": 8.0, "second_policy_eval": "all"}
on_rows(experts, "MoE", num_experts=4, **_WIDE)
on_rows(experts, "HeirarchicalMoE", num_experts=(2, 2), **_WIDE)

st_moe = Library("st-moe-pytorch")
on_rows(st_moe, "MoE", dim=16, num_experts=4, gating_top_n=2, capacity_factor_eval=8.0)

peer = Library("PEER-pytorch", "PEER_pytorch")
on_rows(peer, "PEER", dim=16, heads=2, num_experts=16, num_experts_per_head=4, dim_key=8)

keys = Library("product-key-memory")
on_rows(keys, "PKM", dim=16, heads=2, num_keys=8, topk=4, dim_head=8)

mingru = Library("minGRU-pytorch", "minGRU_pytorch")
on_rows(mingru, "minGRU", dim=16)
on_rows(mingru, "minGRU", "minGRU, wider", dim=16, expansion_factor=1.5)
on_rows(mingru, "minLSTM.minLSTM", dim=16)
on_words(mingru, "minLM.minLM", **LANGUAGE)
on_words(mingru, "minLM.minLM", "minLM, LSTM", **LANGUAGE, use_lstm=True)

megabyte = Library("MEGABYTE-pytorch", "MEGABYTE_pytorch")
on_words(
    megabyte,
    "MEGABYTE",
    num_tokens=32,
    dim=(16, 8),
    depth=(1, 1),
    max_seq_len=(4, 4),
    heads=2,
    dim_head=8,
)

rmt = Library("recurrent-memory-transformer-pytorch")
rmt.add(
    "RecurrentMemoryTransformer",
    lambda b: of(
        rmt("RecurrentMemoryTransformer")(
            num_tokens=32, dim=16, depth=2, num_memory_tokens=2, seq_len=16, heads=2, dim_head=8
        ),
        words(b, 16),
        call=lambda m, x: m(x)[0],
    ),
)

block_recurrent = Library("block-recurrent-transformer-pytorch")
block_recurrent.add(
    "BlockRecurrentTransformer",
    lambda b: of(
        block_recurrent("BlockRecurrentTransformer")(
            num_tokens=32,
            dim=16,
            depth=2,
            dim_head=8,
            heads=2,
            max_seq_len=16,
            block_width=8,
            num_state_vectors=4,
            recurrent_layers=(2,),
        ),
        words(b, 16),
        call=lambda m, x: m(x)[0],
    ),
)

hierarchical = Library("simple-hierarchical-transformer")
hierarchical.add(
    "HierarchicalTransformer",
    lambda b: of(
        hierarchical("HierarchicalTransformer")(
            num_tokens=32,
            dim=16,
            depth=2,
            seq_len=16,
            hierarchies=(1, 2),
            window_sizes=(8, None),
            dim_head=8,
            heads=2,
        ),
        words(b, 16),
    ),
)

taylor = Library("taylor-series-linear-attention")
on_rows(taylor, "TaylorSeriesLinearAttn", dim=16, dim_head=8, heads=2)
on_rows(
    taylor,
    "TaylorSeriesLinearAttn",
    "TaylorSeriesLinearAttn, gated",
    dim=16,
    dim_head=8,
    heads=2,
    gate_value_heads=True,
    prenorm=True,
    one_headed_kv=True,
)
taylor.add(
    "ViT",
    lambda b: of(
        taylor("vit.ViT")(
            image_size=16, patch_size=4, num_classes=5, dim=16, depth=2, heads=2, dim_head=8
        ),
        images(b, 16),
    ),
)

efficient = Library("memory-efficient-attention-pytorch")
on_rows(
    efficient,
    "Attention",
    "Attention, in buckets",
    dim=16,
    heads=2,
    dim_head=8,
    memory_efficient=True,
    q_bucket_size=4,
    k_bucket_size=4,
)
on_rows(efficient, "Attention", "Attention, causal", dim=16, heads=2, dim_head=8, causal=True)
on_rows(efficient, "FlashAttention", dim=16, heads=2, dim_head=8, q_bucket_size=4, k_bucket_size=4)
on_rows(efficient, "CosineSimAttention", dim=16, seq_len=16, heads=2, dim_head=8)

itransformer = Library("iTransformer")
_SERIES = {
    "num_variates": 5,
    "lookback_len": 16,
    "depth": 2,
    "dim": 16,
    "pred_length": (4, 8),
    "dim_head": 8,
    "heads": 2,
}
for name, more in {
    "iTransformer": {},
    "iTransformerFFT": {},
    "iTransformer2D": {"num_time_tokens": 4},
}.items():
    itransformer.add(
        name,
        lambda b, name=name, more=more: of(itransformer(name)(**_SERIES, **more), noise(b, 16, 5)),
    )
itransformer.add(
    "iTransformer, instance norm",
    lambda b: of(
        itransformer("iTransformer")(**_SERIES, use_reversible_instance_norm=True), noise(b, 16, 5)
    ),
)

gateloop = Library("gateloop-transformer")
on_words(gateloop, "Transformer", num_tokens=32, dim=16, depth=2, use_gate_looped_attn=True)
on_rows(gateloop, "SimpleGateLoopLayer", dim=16)

rotary = Library("rotary-embedding-torch")


class _Rotated(nn.Module):
    """Attention weights of queries and keys that the library rotates, with learned frequencies or not."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.project = nn.Linear(16, 32)
        self.rotary = rotary("RotaryEmbedding")(dim=16, **options)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.project(x).chunk(2, dim=-1)
        q, k = self.rotary.rotate_queries_or_keys(q), self.rotary.rotate_queries_or_keys(k)
        return (q @ k.mT).softmax(-1) @ x


rotary.add("RotaryEmbedding", lambda b: of(_Rotated(), rows(b)))
rotary.add("RotaryEmbedding, learned", lambda b: of(_Rotated(learned_freq=True), rows(b)))

hyper = Library("hyper-connections")


class _Streams(nn.Module):
    def __init__(self, path: str) -> None:
        super().__init__()
        init, self.expand, self.reduce = hyper(path)(4)
        self.first = init(dim=16, branch=nn.Linear(16, 16))
        self.second = init(dim=16, branch=nn.Sequential(nn.Linear(16, 16), nn.GELU()))

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.second(self.first(self.expand(x))))


hyper.add(
    "HyperConnections",
    lambda b: of(_Streams("get_init_and_expand_reduce_stream_functions"), rows(b)),
)
for name in ("GRUGatedResidual", "GatedResidual", "MVSplitResidualUpdate"):
    hyper.add(name, lambda b, name=name: of(hyper(f"residuals.{name}")(16), rows(b), rows(b)))

quantize = Library("vector-quantize-pytorch")


class _Quantized(nn.Module):
    """An autoencoder with the library's quantisation in the middle, in eval mode."""

    def __init__(self, name: str, dim: int, **options: Any) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(16, dim), nn.Linear(dim, 16)
        self.quantize = quantize(name)(dim=dim, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.quantize(self.encode(x))[0])


for name, options in {
    "VectorQuantize": {"codebook_size": 8},
    "VectorQuantize, rotation trick": {"codebook_size": 8, "rotation_trick": True},
    "VectorQuantize, cosine": {"codebook_size": 8, "use_cosine_sim": True},
    "VectorQuantize, heads": {"codebook_size": 8, "heads": 2, "separate_codebook_per_head": True},
    "ResidualVQ": {"codebook_size": 8, "num_quantizers": 2},
    "GroupedResidualVQ": {"codebook_size": 8, "num_quantizers": 2, "groups": 2},
    "FSQ": {"levels": [4, 4, 4]},
    "ResidualFSQ": {"levels": [4, 4], "num_quantizers": 2},
    "LFQ": {"codebook_size": 16},
    "ResidualLFQ": {"codebook_size": 16, "num_quantizers": 2},
    "SimVQ": {"codebook_size": 8},
    "ResidualSimVQ": {"codebook_size": 8, "num_quantizers": 2},
}.items():
    quantize.add(
        name,
        lambda b, name=name, options=options: of(
            _Quantized(name.split(",")[0], 8, **options), rows(b)
        ),
    )

titans = Library("titans-pytorch")
titans.add(
    "NeuralMemory",
    lambda b: of(titans("NeuralMemory")(dim=16, chunk_size=4), rows(b), call=lambda m, x: m(x)[0]),
)
titans.add(
    "MemoryAsContextTransformer",
    lambda b: of(
        titans("MemoryAsContextTransformer")(
            num_tokens=32,
            dim=16,
            depth=2,
            segment_len=8,
            num_persist_mem_tokens=2,
            num_longterm_mem_tokens=2,
            heads=2,
            dim_head=8,
        ),
        words(b, 16),
    ),
)
for name in ("MemoryMLP", "GatedResidualMemoryMLP", "MemorySwiGluMLP", "MemoryAttention"):
    titans.add(
        name,
        lambda b, name=name: of(
            titans(f"memory_models.{name}")(
                **({"dim": 16} if name == "MemoryAttention" else {"dim": 16, "depth": 2})
            ),
            rows(b),
        ),
    )
titans.add(
    "ImplicitMLPAttention",
    lambda b: of(
        titans("implicit_mlp_attention.ImplicitMLPAttention")(16, (8, 8), heads=2), rows(b)
    ),
)
titans.add(
    "NestedAttention",
    lambda b: of(titans("nested_attention.NestedAttention")(16, dim_head=8, heads=2), rows(b)),
)

mlps = Library("x-mlps-pytorch")
mlps.add("MLP", lambda b: of(mlps("mlp.MLP")(16, 8, 5), noise(b, 16)))
mlps.add("MLP, normed", lambda b: of(mlps("normed_mlp.MLP")(16, 8, 5), noise(b, 16)))
mlps.add("Feedforwards", lambda b: of(mlps("ff.Feedforwards")(16, 2), noise(b, 16)))
mlps.add("nFeedforwards", lambda b: of(mlps("nff.nFeedforwards")(16, 2), noise(b, 16)))
mlps.add(
    "GroupedFeedforwards",
    lambda b: of(mlps("grouped_ff.GroupedFeedforwards")(16, 2, groups=2), noise(b, 2, 16)),
)
mlps.add(
    "GroupedMLP", lambda b: of(mlps("grouped_mlp.GroupedMLP")(16, 8, 5, groups=2), noise(b, 2, 16))
)
mlps.add(
    "ResidualNormedMLP",
    lambda b: of(mlps("residual_normed_mlp.ResidualNormedMLP")(16, depth=4), noise(b, 16)),
)

soft_moe.add_timed(
    "SoftMoE, 64 rows",
    lambda b: of(soft_moe("SoftMoE")(dim=128, num_experts=8, seq_len=64), noise(b, 64, 128)),
)
itransformer.add_timed(
    "iTransformer, 64 variates",
    lambda b: of(
        itransformer("iTransformer")(
            num_variates=64, lookback_len=96, depth=4, dim=128, pred_length=24, heads=4, dim_head=32
        ),
        noise(b, 96, 64),
    ),
)
