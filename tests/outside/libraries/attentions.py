"""Packages of one idea each: other attentions and mixers."""

from __future__ import annotations

from tests.outside.case import Library, images, noise, of, words
from tests.outside.sequences import LANGUAGE, TINY, on_rows, on_words

performer = Library("performer-pytorch")
for facts in (
    {"name": "plain"},
    {"name": "rezero", "use_rezero": True},
    {"name": "ScaleNorm", "use_scalenorm": True},
    {"name": "ReLU kernel", "generalized_attention": True},
    {"name": "local heads", "local_attn_heads": 1, "local_window_size": 8},
    {"name": "GLU", "ff_glu": True, "shift_tokens": True},
):
    options = {key: value for key, value in facts.items() if key != "name"}
    on_rows(performer, "Performer", f"Performer, {facts['name']}", **TINY, dim_head=8, **options)
on_words(performer, "PerformerLM", **LANGUAGE, heads=2, dim_head=8, max_seq_len=16)
on_words(
    performer,
    "PerformerLM",
    "PerformerLM, tied",
    **LANGUAGE,
    heads=2,
    dim_head=8,
    max_seq_len=16,
    tie_embed=True,
)

linear_attention = Library("linear-attention-transformer")
for causal in (False, True):
    on_words(
        linear_attention,
        "LinearAttentionTransformerLM",
        f"LinearAttentionTransformerLM, {'causal' if causal else 'bidirectional'}",
        **LANGUAGE,
        max_seq_len=16,
        heads=2,
        causal=causal,
        blindspot_size=1,
    )

linformer = Library("linformer")
on_rows(linformer, "Linformer", dim=16, seq_len=16, depth=2, k=4, heads=2)
on_rows(
    linformer,
    "Linformer",
    "Linformer, shared keys",
    dim=16,
    seq_len=16,
    depth=2,
    k=4,
    heads=2,
    share_kv=True,
)
on_words(linformer, "LinformerLM", **LANGUAGE, seq_len=16, heads=2, k=4)
on_rows(linformer, "LinformerSelfAttention", dim=16, seq_len=16, k=4, heads=2)

reformer = Library("reformer-pytorch")
on_rows(
    reformer,
    "LSHSelfAttention",
    "LSHSelfAttention, full attention",
    dim=16,
    heads=2,
    bucket_size=4,
    use_full_attn=True,
)

local_attention = Library("local-attention")
for facts in (
    {"name": "plain"},
    {"name": "xPos", "use_xpos": True},
    {"name": "dynamic bias", "use_dynamic_pos_bias": True},
    {"name": "hyper-connections", "num_residual_streams": 2},
):
    options = {key: value for key, value in facts.items() if key != "name"}
    on_words(
        local_attention,
        "LocalTransformer",
        f"LocalTransformer, {facts['name']}",
        **LANGUAGE,
        max_seq_len=16,
        heads=2,
        dim_head=8,
        local_attn_window_size=8,
        **options,
    )

routing = Library("routing-transformer")
on_words(
    routing,
    "RoutingTransformerLM",
    **LANGUAGE,
    heads=2,
    max_seq_len=16,
    window_size=8,
    n_local_attn_heads=2,
    local_attn_window_size=8,
)

sinkhorn = Library("sinkhorn-transformer")
on_words(
    sinkhorn,
    "SinkhornTransformerLM",
    **LANGUAGE,
    heads=2,
    bucket_size=4,
    max_seq_len=16,
    n_local_attn_heads=2,
)
on_words(
    sinkhorn,
    "SinkhornTransformerLM",
    "SinkhornTransformerLM, causal",
    **LANGUAGE,
    heads=2,
    bucket_size=4,
    max_seq_len=16,
    causal=True,
    n_local_attn_heads=2,
)

nystrom = Library("nystrom-attention")
on_rows(nystrom, "NystromAttention", dim=16, heads=2, dim_head=8, num_landmarks=4)
on_rows(nystrom, "Nystromformer", **TINY, dim_head=8, num_landmarks=4)

axial = Library("axial-attention")
axial.add(
    "AxialAttention",
    lambda b: of(
        axial("AxialAttention")(dim=8, dim_index=1, heads=2, num_dimensions=2), noise(b, 8, 6, 5)
    ),
)
axial.add(
    "AxialAttention, sum",
    lambda b: of(
        axial("AxialAttention")(dim=8, dim_index=1, heads=2, num_dimensions=2, sum_axial_out=True),
        noise(b, 8, 6, 5),
    ),
)
axial.add(
    "AxialImageTransformer",
    lambda b: of(
        axial("AxialImageTransformer")(dim=8, depth=1, heads=2, dim_index=1, reversible=False),
        noise(b, 8, 4, 4),
    ),
)

g_mlp = Library("g-mlp-pytorch")
on_words(g_mlp, "gMLP", **LANGUAGE, seq_len=16)
on_words(
    g_mlp,
    "gMLP",
    "gMLP, causal, circulant",
    **LANGUAGE,
    seq_len=16,
    causal=True,
    circulant_matrix=True,
)
on_words(g_mlp, "gMLP", "gMLP, with attention", **LANGUAGE, seq_len=16, attn_dim=8)
g_mlp.add(
    "gMLPVision",
    lambda b: of(
        g_mlp("gMLPVision")(image_size=16, patch_size=4, num_classes=5, dim=16, depth=2),
        images(b, 16),
    ),
)

mixer = Library("mlp-mixer-pytorch")
mixer.add(
    "MLPMixer",
    lambda b: of(
        mixer("MLPMixer")(image_size=16, channels=3, patch_size=4, dim=16, depth=2, num_classes=5),
        images(b, 16),
    ),
)
mixer.add(
    "MLPMixer3D",
    lambda b: of(
        mixer("MLPMixer3D")(
            image_size=8,
            time_size=4,
            time_patch_size=2,
            channels=3,
            patch_size=4,
            dim=16,
            depth=2,
            num_classes=5,
        ),
        noise(b, 3, 4, 8, 8),
    ),
)
mixer.add(
    "Permutator",
    lambda b: of(
        mixer("Permutator")(
            image_size=16, patch_size=4, dim=16, depth=2, segments=4, num_classes=5
        ),
        images(b, 16),
    ),
)
mixer.add_timed(
    "MLPMixer, 96 pixels",
    lambda b: of(
        mixer("MLPMixer")(
            image_size=96, channels=3, patch_size=8, dim=256, depth=6, num_classes=10
        ),
        images(b, 96),
    ),
)

perceiver = Library("perceiver-pytorch")
_PERCEIVER = {
    "num_freq_bands": 3,
    "max_freq": 10.0,
    "depth": 2,
    "num_latents": 4,
    "latent_dim": 16,
    "cross_heads": 1,
    "latent_heads": 2,
    "cross_dim_head": 8,
    "latent_dim_head": 8,
    "num_classes": 5,
}
for path in ("Perceiver", "gated.Perceiver", "mixed_latents.Perceiver"):
    perceiver.add(
        path,
        lambda b, path=path: of(
            perceiver(path)(**_PERCEIVER, input_channels=3, input_axis=2), noise(b, 6, 6, 3)
        ),
    )
perceiver.add(
    "Perceiver, tied layers",
    lambda b: of(
        perceiver("Perceiver")(
            **_PERCEIVER, input_channels=3, input_axis=2, weight_tie_layers=True
        ),
        noise(b, 6, 6, 3),
    ),
)
perceiver.add(
    "PerceiverIO",
    lambda b: of(
        perceiver("PerceiverIO")(
            dim=8, queries_dim=8, logits_dim=5, depth=2, num_latents=4, latent_dim=16
        ),
        noise(b, 10, 8),
        queries=noise(b, 6, 8),
    ),
)
perceiver.add(
    "PerceiverIO, common queries",
    lambda b: of(
        perceiver("PerceiverIO")(
            dim=8, queries_dim=8, logits_dim=5, depth=2, num_latents=4, latent_dim=16
        ),
        noise(b, 10, 8),
        queries=noise(6, 8),
    ),
)

performer.add_timed(
    "Performer, 128 rows",
    lambda b: of(
        performer("Performer")(dim=128, depth=4, heads=4, dim_head=32), noise(b, 128, 128)
    ),
)
g_mlp.add_timed(
    "gMLP, 128 tokens",
    lambda b: of(g_mlp("gMLP")(num_tokens=512, dim=128, depth=4, seq_len=128), words(b, 128, 512)),
)
perceiver.add_timed(
    "Perceiver, 24 pixels",
    lambda b: of(
        perceiver("Perceiver")(
            **{**_PERCEIVER, "num_latents": 32, "latent_dim": 128}, input_channels=3, input_axis=2
        ),
        noise(b, 24, 24, 3),
    ),
)
axial.add_timed(
    "AxialAttention, 32 pixels",
    lambda b: of(
        axial("AxialAttention")(dim=64, dim_index=1, heads=4, num_dimensions=2),
        noise(b, 64, 32, 32),
    ),
)
