"""monai: networks for medical images."""

from __future__ import annotations

from typing import Any

import torch

from tests.outside.case import Library, Subject, images, noise, of

monai = Library("monai")


def _net(name: str, batch: int, inputs: Any, config: dict[str, Any], **more: Any) -> Subject:
    return of(monai(f"networks.nets.{name}")(**config), *inputs(batch), **more)


def _add(name: str, inputs: Any, label: str = "", **config: Any) -> None:
    monai.add(label or name, lambda batch: _net(name, batch, inputs, config))


def _plane(size: int = 32, channels: int = 1) -> Any:
    return lambda batch: (images(batch, size, channels),)


def _volume(size: int = 16, channels: int = 1) -> Any:
    return lambda batch: (images(batch, size, channels, dims=3),)


_D2 = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
_D3 = {**_D2, "spatial_dims": 3}
_add("UNet", _plane(16), **_D2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1)
_add("UNet", _volume(8), "UNet, volumes", **_D3, channels=(4, 8), strides=(2,), num_res_units=0)
_add("UNet", _plane(16), "UNet, batch norm", **_D2, channels=(4, 8), strides=(2,), norm="batch")
_add("AttentionUnet", _plane(16), **_D2, channels=(4, 8, 16), strides=(2, 2))
_add("BasicUNet", _plane(32), **_D2, features=(4, 4, 8, 8, 8, 4))
_add("BasicUNetPlusPlus", _plane(32), **_D2, features=(4, 4, 8, 8, 8, 4))
_add(
    "DynUNet",
    _plane(16),
    **_D2,
    kernel_size=(3, 3, 3),
    strides=(1, 2, 2),
    upsample_kernel_size=(2, 2),
    filters=(4, 8, 8),
)
_add("SegResNet", _plane(16), **_D2, init_filters=8, blocks_down=(1, 1), blocks_up=(1,))
_add(
    "SegResNet",
    _plane(16),
    "SegResNet, batch norm",
    **_D2,
    init_filters=8,
    blocks_down=(1, 1),
    blocks_up=(1,),
    norm="batch",
)
_add(
    "HighResNet",
    _plane(16),
    **_D2,
    layer_params=(
        {"name": "conv_0", "n_features": 4, "kernel_size": 3},
        {"name": "res_1", "n_features": 4, "kernels": (3, 3), "repeat": 1},
        {"name": "conv_1", "n_features": 8, "kernel_size": 1},
        {"name": "conv_2", "kernel_size": 1},
    ),
)
_add(
    "SwinUNETR",
    _plane(64),
    in_channels=1,
    out_channels=2,
    feature_size=12,
    depths=(1, 1, 1, 1),
    num_heads=(1, 1, 2, 2),
    spatial_dims=2,
)
_add(
    "SwinUNETR",
    _plane(64),
    "SwinUNETR, v2",
    in_channels=1,
    out_channels=2,
    feature_size=12,
    depths=(1, 1, 1, 1),
    num_heads=(1, 1, 2, 2),
    spatial_dims=2,
    use_v2=True,
)
_add(
    "ViT",
    _plane(16),
    in_channels=1,
    img_size=(16, 16),
    patch_size=(4, 4),
    hidden_size=16,
    mlp_dim=32,
    num_layers=2,
    num_heads=2,
    spatial_dims=2,
    classification=True,
)
_add(
    "ViTAutoEnc",
    _plane(16),
    in_channels=1,
    img_size=(16, 16),
    patch_size=(4, 4),
    hidden_size=16,
    mlp_dim=32,
    num_layers=2,
    num_heads=2,
    spatial_dims=2,
    deconv_chns=4,
)
_add("DenseNet", _plane(32), **_D2, init_features=8, growth_rate=4, block_config=(2, 2))
_add(
    "ResNet",
    _plane(32),
    block="basic",
    layers=[1, 1, 1, 1],
    block_inplanes=[4, 8, 8, 8],
    spatial_dims=2,
    n_input_channels=1,
    num_classes=3,
)
_add(
    "ResNet",
    _plane(32),
    "ResNet, bottlenecks",
    block="bottleneck",
    layers=[1, 1, 1, 1],
    block_inplanes=[4, 8, 8, 8],
    spatial_dims=2,
    n_input_channels=1,
    num_classes=3,
)
_add("AutoEncoder", _plane(16), **{**_D2, "out_channels": 1}, channels=(4, 8), strides=(2, 2))
_add("Classifier", _plane(16), in_shape=(1, 16, 16), classes=3, channels=(4, 8), strides=(2, 2))
_add("Regressor", _plane(16), in_shape=(1, 16, 16), out_shape=(2,), channels=(4, 8), strides=(2, 2))
_add("Discriminator", _plane(16), in_shape=(1, 16, 16), channels=(4, 8), strides=(2, 2))
_add("Critic", _plane(16), in_shape=(1, 16, 16), channels=(4, 8), strides=(2, 2))
_add(
    "Generator",
    lambda b: (noise(b, 8),),
    latent_shape=(8,),
    start_shape=(4, 4, 4),
    channels=(4, 1),
    strides=(2, 2),
)
_add(
    "FullyConnectedNet",
    lambda b: (noise(b, 8),),
    in_channels=8,
    out_channels=3,
    hidden_channels=(8, 8),
)
_add(
    "MedNeXt",
    _plane(32),
    spatial_dims=2,
    init_filters=4,
    in_channels=1,
    out_channels=2,
    blocks_down=(1, 1, 1, 1),
    blocks_up=(1, 1, 1, 1),
)
_add(
    "restormer.Restormer",
    _plane(16),
    spatial_dims=2,
    in_channels=1,
    out_channels=1,
    dim=8,
    num_blocks=(1, 1),
    heads=(1, 2),
    num_refinement_blocks=1,
)
_add(
    "VQVAE",
    _plane(16),
    spatial_dims=2,
    in_channels=1,
    out_channels=1,
    channels=(8, 8),
    num_res_layers=1,
    num_res_channels=(8, 8),
    num_embeddings=8,
    embedding_dim=4,
    downsample_parameters=((2, 4, 1, 1),) * 2,
    upsample_parameters=((2, 4, 1, 1, 0),) * 2,
)
_add(
    "PatchDiscriminator",
    _plane(32),
    spatial_dims=2,
    channels=4,
    in_channels=1,
    out_channels=1,
    num_layers_d=2,
)
_add(
    "RegUNet",
    _plane(16),
    spatial_dims=2,
    in_channels=1,
    num_channel_initial=4,
    depth=2,
    out_channels=2,
)
_add(
    "SPADENet",
    lambda b: (noise(b, 2, 16, 16), noise(b, 1, 16, 16)),
    spatial_dims=2,
    in_channels=1,
    out_channels=1,
    label_nc=2,
    input_shape=[16, 16],
    channels=[4, 8],
    z_dim=4,
    is_vae=False,
)

_DIFFUSION = {
    "spatial_dims": 2,
    "in_channels": 1,
    "out_channels": 1,
    "channels": (8, 8),
    "attention_levels": (False, True),
    "norm_num_groups": 4,
    "num_res_blocks": 1,
    "num_head_channels": 4,
}
_add("DiffusionModelUNet", lambda b: (images(b, 8, 1), torch.arange(b)), **_DIFFUSION)
_add(
    "DiffusionModelUNet",
    lambda b: (images(b, 8, 1), torch.arange(b), noise(b, 2, 6)),
    "DiffusionModelUNet, conditioned",
    **_DIFFUSION,
    with_conditioning=True,
    cross_attention_dim=6,
)


def _autoencoder(batch: int) -> Subject:
    """Without the draw of its latents."""
    config = {
        "spatial_dims": 2,
        "in_channels": 1,
        "out_channels": 1,
        "channels": (8, 8),
        "latent_channels": 2,
    }
    more = {"num_res_blocks": (1, 1), "norm_num_groups": 4, "attention_levels": (False, False)}
    model = monai("networks.nets.AutoencoderKL")(**config, **more)
    return of(model, images(batch, 16, 1), call=lambda model, x: model.decode(model.encode(x)[0]))


monai.add("AutoencoderKL", _autoencoder)
monai.add(
    "SegResNet, batch norm, training mode",
    lambda b: _net(
        "SegResNet",
        b,
        _plane(16),
        {**_D2, "init_filters": 8, "blocks_down": (1, 1), "blocks_up": (1,), "norm": "batch"},
        train=True,
    ),
    meets="batch norm",
)
monai.add_timed(
    "UNet, 64 pixels",
    lambda b: _net(
        "UNet",
        b,
        _plane(64),
        {**_D2, "channels": (16, 32, 64), "strides": (2, 2), "num_res_units": 2},
    ),
)
monai.add_timed(
    "SegResNet, volumes",
    lambda b: _net(
        "SegResNet",
        b,
        _volume(16),
        {**_D3, "init_filters": 8, "blocks_down": (1, 1), "blocks_up": (1,)},
    ),
)
