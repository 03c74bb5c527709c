"""diffusers: denoisers and autoencoders."""

from __future__ import annotations

from typing import Any

import torch

from tests.outside.case import Library, Subject, images, noise, of

diffusers = Library("diffusers")


def _times(batch: int) -> torch.Tensor:
    return torch.arange(batch) * 10 + 1


def _add(name: str, inputs: Any, label: str = "", call: Any = None, **config: Any) -> None:
    def build(batch: int) -> Subject:
        args, kwargs = inputs(batch)
        return of(diffusers(name)(**config), *args, call=call, **kwargs)

    diffusers.add(label or name, build)


_PLANE = {"sample_size": 8, "in_channels": 4, "out_channels": 4}
_WIDTHS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}


def _denoised(batch: int) -> Any:
    return (images(batch, 8, 4), _times(batch)), {}


def _conditioned(batch: int) -> Any:
    return (images(batch, 8, 4), _times(batch), noise(batch, 3, 8)), {}


_add(
    "UNet2DModel",
    _denoised,
    **_PLANE,
    **_WIDTHS,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    attention_head_dim=4,
)
_add(
    "UNet2DConditionModel",
    _conditioned,
    **_PLANE,
    **_WIDTHS,
    cross_attention_dim=8,
    attention_head_dim=4,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
)
_add(
    "UNet2DConditionModel",
    _conditioned,
    "UNet2DConditionModel, linear projections",
    **_PLANE,
    **_WIDTHS,
    cross_attention_dim=8,
    attention_head_dim=4,
    use_linear_projection=True,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
)
_add(
    "UNet3DConditionModel",
    lambda b: ((noise(b, 4, 2, 8, 8), _times(b), noise(b, 3, 8)), {}),
    **_PLANE,
    **_WIDTHS,
    cross_attention_dim=8,
    attention_head_dim=4,
    down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
    up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
)

_DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 2,
    "in_channels": 4,
    "sample_size": 8,
    "patch_size": 2,
}
_add(
    "DiTTransformer2DModel",
    lambda b: ((images(b, 8, 4),), {"timestep": _times(b), "class_labels": torch.arange(b)}),
    **_DIT,
    out_channels=4,
    num_embeds_ada_norm=10,
    norm_num_groups=4,
)
_add(
    "PixArtTransformer2DModel",
    lambda b: (
        (images(b, 8, 4), noise(b, 3, 16)),
        {"timestep": _times(b), "added_cond_kwargs": {"aspect_ratio": None, "resolution": None}},
    ),
    **_DIT,
    out_channels=4,
    cross_attention_dim=16,
    caption_channels=16,
    norm_num_groups=4,
    use_additional_conditions=False,
)
_add(
    "SD3Transformer2DModel",
    lambda b: ((images(b, 8, 4), noise(b, 3, 8), noise(b, 16), _times(b)), {}),
    **_DIT,
    out_channels=4,
    joint_attention_dim=8,
    caption_projection_dim=16,
    pooled_projection_dim=16,
    pos_embed_max_size=8,
)
_add(
    "SD3Transformer2DModel",
    lambda b: ((images(b, 8, 4), noise(b, 3, 8), noise(b, 16), _times(b)), {}),
    "SD3Transformer2DModel, 3.5",
    **_DIT,
    out_channels=4,
    joint_attention_dim=8,
    caption_projection_dim=16,
    pooled_projection_dim=16,
    pos_embed_max_size=8,
    qk_norm="rms_norm",
    dual_attention_layers=(0,),
)
_add(
    "FluxTransformer2DModel",
    lambda b: (
        (noise(b, 6, 4), noise(b, 5, 8), noise(b, 8), torch.rand(b)),
        {"img_ids": noise(6, 3), "txt_ids": noise(5, 3)},
    ),
    patch_size=1,
    in_channels=4,
    num_layers=1,
    num_single_layers=1,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=8,
    pooled_projection_dim=8,
    axes_dims_rope=[4, 4, 8],
)
_add(
    "AuraFlowTransformer2DModel",
    lambda b: ((images(b, 8, 4), noise(b, 3, 8), _times(b)), {}),
    sample_size=8,
    patch_size=2,
    in_channels=4,
    num_mmdit_layers=1,
    num_single_dit_layers=1,
    attention_head_dim=8,
    num_attention_heads=2,
    joint_attention_dim=8,
    caption_projection_dim=16,
    out_channels=4,
    pos_embed_max_size=16,
)
_add(
    "CogVideoXTransformer3DModel",
    lambda b: ((noise(b, 2, 4, 8, 8), noise(b, 3, 8), _times(b)), {}),
    num_attention_heads=2,
    attention_head_dim=8,
    in_channels=4,
    out_channels=4,
    time_embed_dim=8,
    text_embed_dim=8,
    num_layers=1,
    sample_width=8,
    sample_height=8,
    sample_frames=5,
    patch_size=2,
    temporal_compression_ratio=4,
    max_text_seq_length=3,
)
_add(
    "LTXVideoTransformer3DModel",
    lambda b: (
        (noise(b, 8, 4), noise(b, 3, 8), _times(b)),
        {"encoder_attention_mask": torch.ones(b, 3), "num_frames": 2, "height": 2, "width": 2},
    ),
    in_channels=4,
    out_channels=4,
    num_attention_heads=2,
    attention_head_dim=8,
    cross_attention_dim=16,
    num_layers=1,
    caption_channels=8,
)
_add(
    "WanTransformer3DModel",
    lambda b: ((noise(b, 4, 1, 8, 8), _times(b), noise(b, 3, 8)), {}),
    patch_size=(1, 2, 2),
    num_attention_heads=2,
    attention_head_dim=12,
    in_channels=4,
    out_channels=4,
    text_dim=8,
    freq_dim=16,
    ffn_dim=32,
    num_layers=1,
    cross_attn_norm=True,
    qk_norm="rms_norm_across_heads",
    rope_max_seq_len=32,
)
_add(
    "MochiTransformer3DModel",
    lambda b: ((noise(b, 4, 2, 4, 4), noise(b, 3, 8), _times(b), torch.ones(b, 3).bool()), {}),
    patch_size=2,
    num_attention_heads=2,
    attention_head_dim=8,
    num_layers=2,
    pooled_projection_dim=16,
    in_channels=4,
    text_embed_dim=8,
    time_embed_dim=4,
    activation_fn="swiglu",
    max_sequence_length=16,
)
_add(
    "SanaTransformer2DModel",
    lambda b: ((images(b, 8, 4), noise(b, 3, 8), _times(b)), {}),
    patch_size=1,
    in_channels=4,
    out_channels=4,
    num_layers=1,
    attention_head_dim=8,
    num_attention_heads=2,
    num_cross_attention_heads=2,
    cross_attention_head_dim=8,
    cross_attention_dim=16,
    caption_channels=8,
    sample_size=8,
)
_add(
    "PriorTransformer",
    lambda b: ((noise(b, 8), _times(b), noise(b, 8), noise(b, 3, 8)), {}),
    num_attention_heads=2,
    attention_head_dim=4,
    num_layers=2,
    embedding_dim=8,
    num_embeddings=3,
    additional_embeddings=4,
)
_add(
    "Transformer2DModel",
    lambda b: ((images(b, 8, 4),), {"encoder_hidden_states": noise(b, 3, 8)}),
    num_attention_heads=2,
    attention_head_dim=4,
    in_channels=4,
    norm_num_groups=4,
    cross_attention_dim=8,
)
_add(
    "StableAudioDiTModel",
    lambda b: (
        (noise(b, 4, 6), _times(b).to(torch.get_default_dtype()), noise(b, 3, 8), noise(b, 1, 8)),
        {},
    ),
    sample_size=6,
    in_channels=4,
    out_channels=4,
    num_layers=1,
    attention_head_dim=8,
    num_attention_heads=2,
    num_key_value_attention_heads=1,
    cross_attention_dim=8,
    cross_attention_input_dim=8,
    time_proj_dim=8,
    global_states_input_dim=8,
)


def _coded(model: Any, x: torch.Tensor) -> Any:
    """Encoded and decoded again, without the draw of the latents."""
    return model(x, sample_posterior=False).sample


_CODER = {
    "in_channels": 3,
    "out_channels": 3,
    "block_out_channels": (8, 8),
    "layers_per_block": 1,
    "latent_channels": 2,
    "norm_num_groups": 4,
}
_TWO = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
_add("AutoencoderKL", lambda b: ((images(b, 16),), {}), call=_coded, **_CODER, **_TWO)
_add(
    "AsymmetricAutoencoderKL",
    lambda b: ((images(b, 16),), {}),
    call=_coded,
    in_channels=3,
    out_channels=3,
    down_block_types=("DownEncoderBlock2D",) * 2,
    down_block_out_channels=(8, 8),
    layers_per_down_block=1,
    up_block_types=("UpDecoderBlock2D",) * 2,
    up_block_out_channels=(8, 8),
    layers_per_up_block=1,
    latent_channels=2,
    norm_num_groups=4,
)
_add(
    "AutoencoderTiny",
    lambda b: ((images(b, 16),), {}),
    in_channels=3,
    out_channels=3,
    encoder_block_out_channels=(8, 8),
    decoder_block_out_channels=(8, 8),
    num_encoder_blocks=(1, 1),
    num_decoder_blocks=(1, 1),
    latent_channels=2,
)
_add(
    "VQModel",
    lambda b: ((images(b, 16),), {}),
    call=lambda model, x: model(x).sample,
    in_channels=3,
    out_channels=3,
    block_out_channels=(8, 8),
    layers_per_block=1,
    latent_channels=2,
    norm_num_groups=4,
    num_vq_embeddings=8,
    **_TWO,
)
_add(
    "AutoencoderOobleck",
    lambda b: ((noise(b, 2, 32),), {}),
    call=_coded,
    encoder_hidden_size=8,
    downsampling_ratios=[2, 2],
    channel_multiples=[1, 2],
    decoder_channels=8,
    decoder_input_channels=4,
    audio_channels=2,
)
_add(
    "AutoencoderDC",
    lambda b: ((images(b, 16),), {}),
    in_channels=3,
    latent_channels=4,
    attention_head_dim=4,
    encoder_block_types="ResBlock",
    decoder_block_types="ResBlock",
    encoder_block_out_channels=(8, 8),
    decoder_block_out_channels=(8, 8),
    encoder_layers_per_block=(1, 1),
    decoder_layers_per_block=(1, 1),
    encoder_qkv_multiscales=((), ()),
    decoder_qkv_multiscales=((), ()),
)
_add(
    "ControlNetModel",
    lambda b: ((images(b, 8, 4), _times(b), noise(b, 3, 8), images(b, 16)), {}),
    in_channels=4,
    **_WIDTHS,
    cross_attention_dim=8,
    attention_head_dim=4,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    conditioning_embedding_out_channels=(8, 8),
)


def _large(batch: int) -> Subject:
    config = {"num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 4, "in_channels": 4}
    model = diffusers("DiTTransformer2DModel")(
        **config, sample_size=16, patch_size=2, out_channels=4, num_embeds_ada_norm=1000
    )
    return of(model, images(batch, 16, 4), timestep=_times(batch), class_labels=torch.arange(batch))


def _large_unet(batch: int) -> Subject:
    blocks = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    model = diffusers("UNet2DModel")(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
        **blocks,
    )
    return of(model, images(batch, 16), _times(batch))


diffusers.add_timed("DiTTransformer2DModel, 64 patches", _large)
diffusers.add_timed("UNet2DModel, 16 pixels", _large_unet)
