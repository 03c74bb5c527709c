"""x-transformers: one transformer, and the variations of it that papers have proposed."""

from __future__ import annotations

from typing import Any

from tests.outside.case import Library, Subject, images, noise, of, words

x_transformers = Library("x-transformers")

_LAYERS = {"dim": 16, "depth": 2, "heads": 2, "attn_dim_head": 8}
_LENGTH = 8


def _language(kind: str, batch: int, around: dict[str, Any], **options: Any) -> Subject:
    model = x_transformers("TransformerWrapper")(
        num_tokens=32,
        max_seq_len=_LENGTH,
        attn_layers=x_transformers(kind)(**{**_LAYERS, **options}),
        **around,
    )
    return of(model, words(batch, _LENGTH))


def _variant(kind: str, name: str, around: dict[str, Any] | None = None, **options: Any) -> None:
    x_transformers.add(
        f"{kind}, {name}", lambda batch: _language(kind, batch, around or {}, **options)
    )


_variant("Encoder", "plain")
_variant("Decoder", "plain")
for option in (
    "use_rmsnorm use_scalenorm use_simple_rmsnorm use_dynamic_tanh use_derf ff_glu ff_swish"
    " ff_relu_squared attn_pre_talking_heads attn_post_talking_heads attn_head_scale attn_flash"
    " attn_gate_values attn_one_kv_head attn_qk_norm rotary_pos_emb rotary_xpos alibi_pos_bias"
    " rel_pos_bias dynamic_pos_bias macaron sandwich_norm gate_residual scale_residual"
    " residual_attn shift_tokens attn_num_mem_kv attn_swiglu_values ff_post_act_ln attn_on_attn"
    " add_value_residual attn_hybrid_learned_mix attn_data_dependent_alibi use_layerscale"
    " softclamp_output attn_softclamp_logits attn_selective attn_cog_signed attn_laser"
).split():
    value: Any = {"attn_num_mem_kv": 2, "shift_tokens": 1}.get(option, True)
    _variant("Decoder", option, **{option: value})
_variant("Encoder", "sparse attention", attn_sparse_topk=3)
_variant("Encoder", "depth of sandwiches", sandwich_coef=1, depth=3)
_variant("Decoder", "grouped keys", attn_kv_heads=1)
_variant("Decoder", "hyper-connections", num_residual_streams=2)
_variant("Decoder", "tied embedding", {"tie_embedding": True})
_variant("Decoder", "memory tokens", {"num_memory_tokens": 2})
_variant("Decoder", "embedding of another width", {"emb_dim": 12})
_variant("Decoder", "scaled sinusoids", {"scaled_sinu_pos_emb": True})
_variant("Decoder", "norm after embedding", {"post_emb_norm": True})
_variant("Decoder", "no positions", {"use_abs_pos_emb": False})
_variant("Decoder", "squeezed logits", {"num_output_heads": 2})


def _image(batch: int) -> Subject:
    layers = x_transformers("Encoder")(**_LAYERS)
    model = x_transformers("ViTransformerWrapper")(
        image_size=16, patch_size=4, num_classes=5, attn_layers=layers
    )
    return of(model, images(batch, 16))


def _pair(batch: int) -> Subject:
    sizes = {"num_tokens": 32, "depth": 1, "heads": 2, "max_seq_len": _LENGTH}
    config = {f"{side}_{key}": value for side in ("enc", "dec") for key, value in sizes.items()}
    model = x_transformers("XTransformer")(dim=16, **config)

    def call(model: Any, source: Any, target: Any) -> Any:
        return model.decoder.net(target, context=model.encoder(source, return_embeddings=True))

    return of(model, words(batch, _LENGTH), words(batch, 6), call=call)


def _continuous(batch: int) -> Subject:
    layers = x_transformers("Decoder")(**_LAYERS)
    model = x_transformers("ContinuousTransformerWrapper")(
        dim_in=6, dim_out=5, max_seq_len=_LENGTH, attn_layers=layers
    )
    return of(model, noise(batch, _LENGTH, 6))


def _with_numbers(batch: int) -> Subject:
    layers = x_transformers("Decoder")(**_LAYERS)
    model = x_transformers("XValTransformerWrapper")(
        num_tokens=32, numerical_token_id=31, max_seq_len=_LENGTH, attn_layers=layers
    )
    return of(model, words(batch, _LENGTH), noise(batch, _LENGTH))


def _next_words(batch: int) -> Subject:
    """The logits of the wrapper, whose own loss averages over all sequences."""
    layers = x_transformers("Decoder")(**_LAYERS)
    net = x_transformers("TransformerWrapper")(
        num_tokens=32, max_seq_len=_LENGTH, attn_layers=layers
    )
    model = x_transformers("AutoregressiveWrapper")(net)
    return of(
        model, words(batch, _LENGTH), call=lambda model, x: model(x, return_outputs=True)[1][0]
    )


def _pooled(batch: int) -> Subject:
    return of(
        x_transformers("AttentionPool")(dim=16, num_pooled_tokens=2, heads=2, dim_head=8),
        noise(batch, _LENGTH, 16),
    )


def _padded(batch: int) -> Subject:
    layers = x_transformers("Encoder")(**_LAYERS, rotary_pos_emb=True)
    model = x_transformers("TransformerWrapper")(
        num_tokens=32, max_seq_len=_LENGTH, attn_layers=layers
    )
    lengths = _LENGTH - 1 - noise(batch).abs().long() % 3
    mask = noise(_LENGTH).argsort().argsort()[None] < lengths[:, None]
    return of(model, words(batch, _LENGTH), mask=mask)


x_transformers.add("ViTransformerWrapper", _image)
x_transformers.add("XTransformer", _pair)
x_transformers.add("ContinuousTransformerWrapper", _continuous)
x_transformers.add("XValTransformerWrapper", _with_numbers)
x_transformers.add("AutoregressiveWrapper", _next_words)
x_transformers.add("AttentionPool", _pooled)
x_transformers.add("Encoder, padded", _padded)


def _large(batch: int, **options: Any) -> Subject:
    layers = x_transformers("Decoder")(dim=128, depth=4, heads=4, attn_dim_head=32, **options)
    model = x_transformers("TransformerWrapper")(
        num_tokens=512, max_seq_len=128, attn_layers=layers
    )
    return of(model, words(batch, 128, 512))


x_transformers.add_timed("Decoder, 128 tokens", _large)
x_transformers.add_timed(
    "Decoder, 128 tokens, rotary, RMSNorm, GLU",
    lambda batch: _large(batch, rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True),
)
x_transformers.add_timed(
    "Decoder, 128 tokens, ALiBi, SDPA",
    lambda batch: _large(batch, alibi_pos_bias=True, attn_flash=True),
)
