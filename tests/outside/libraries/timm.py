"""timm, and segmentation-models-pytorch on top of it: image models, shrunk by their own arguments."""

from __future__ import annotations

from typing import Any

from tests.outside.case import Library, Subject, images, of

timm = Library("timm")


def _named(
    name: str, batch: int, size: int, options: dict[str, Any], train: bool = False
) -> Subject:
    model = timm("create_model")(name, pretrained=False, num_classes=5, **options)
    return of(model, images(batch, size), train=train)


def _add(name: str, size: int = 32, label: str = "", **options: Any) -> None:
    timm.add(label or name, lambda batch: _named(name, batch, size, options))


# The library's own tiny models.
for name in (
    "test_vit test_vit2 test_vit3 test_vit4 test_byobnet test_convnext test_convnext2 test_convnext3"
    " test_efficientnet test_efficientnet_evos test_efficientnet_gn test_efficientnet_ln test_mambaout"
    " test_nfnet test_resnet"
).split():
    _add(name, 64, **({"img_size": 64} if name.startswith("test_vit") else {}))

# Transformers: an image of 32 pixels, patches of 8, two blocks.
_VIT: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
}
for name in (
    "vit_tiny_patch16_224 deit_tiny_patch16_224 deit_tiny_distilled_patch16_224 deit3_small_patch16_224"
    " cait_xxs24_224 xcit_nano_12_p16_224 beit_base_patch16_224 beitv2_base_patch16_224"
    " eva02_tiny_patch14_224 vit_relpos_small_patch16_224 vit_srelpos_small_patch16_224"
    " vit_small_patch14_reg4_dinov2 vit_medium_patch16_gap_240 vit_base_patch16_siglip_224"
    " convit_tiny vit_base_patch16_clip_224 vit_small_patch16_dinov3"
).split():
    _add(name, **_VIT)
for name in ("swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"):
    _add(
        name,
        32,
        img_size=32,
        patch_size=4,
        window_size=4,
        embed_dim=8,
        depths=(2, 2),
        num_heads=(1, 2),
    )
_add(
    "swinv2_cr_tiny_224",
    32,
    img_size=32,
    window_size=4,
    embed_dim=8,
    depths=(2, 2),
    num_heads=(1, 2),
)
_add("pvt_v2_b0", 32, depths=(1, 1, 1, 1), embed_dims=(8, 8, 16, 16), num_heads=(1, 1, 2, 2))
_add(
    "twins_pcpvt_small",
    32,
    img_size=32,
    embed_dims=(8, 8, 16, 16),
    num_heads=(1, 1, 2, 2),
    depths=(1, 1, 1, 1),
)
_add(
    "twins_svt_small",
    64,
    img_size=64,
    embed_dims=(8, 8, 16, 16),
    num_heads=(1, 1, 2, 2),
    depths=(1, 1, 1, 1),
    wss=(4, 4, 4, 2),
)
_add("pit_ti_224", 32, img_size=32, base_dims=(8, 8, 8), depth=(1, 1, 1), heads=(1, 2, 2))
_add(
    "levit_128s",
    64,
    img_size=64,
    embed_dim=(16, 16, 16),
    num_heads=(2, 2, 2),
    depth=(1, 1, 1),
    key_dim=8,
)
_add(
    "crossvit_tiny_240",
    32,
    img_size=32,
    patch_size=(8, 16),
    embed_dim=(8, 16),
    num_heads=(1, 2),
    depth=((1, 2, 0), (1, 2, 0)),
)
_add("hiera_tiny_224", 64, img_size=(64, 64), embed_dim=8, stages=(1, 1, 1, 1), num_heads=1)
_add(
    "tnt_s_patch16_224",
    32,
    img_size=32,
    patch_size=16,
    embed_dim=16,
    inner_dim=8,
    depth=2,
    num_heads_outer=2,
    num_heads_inner=2,
)
_add("visformer_tiny", 32, img_size=32, init_channels=8, embed_dim=16, depth=2, num_heads=2)
_add("naflexvit_base_patch16_gap", 32, embed_dim=16, depth=2, num_heads=2)

# MLPs and token mixers.
_MLP = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "num_blocks": 2, "num_classes": 5}
for block, options in {
    "MixerBlock": {},
    "SpatialGatingBlock": {"mlp_ratio": 2, "mlp_layer": "GatedMlp"},
    "ResBlock": {"mlp_ratio": 2, "norm_layer": "Affine"},
}.items():
    timm.add(
        f"MlpMixer, {block}", lambda b, block=block, options=options: _mixer(b, block, options)
    )


def _mixer(batch: int, block: str, options: dict[str, Any]) -> Subject:
    mixers = timm("models.mlp_mixer")
    parts = {
        key: getattr(mixers, value) if isinstance(value, str) else value
        for key, value in options.items()
    }
    return of(mixers.MlpMixer(**_MLP, block_layer=getattr(mixers, block), **parts), images(batch))


def _class(path: str, size: int = 32, *args: Any, **options: Any) -> None:
    """A class of the library, whose named models do not let themselves be shrunk."""
    timm.add(
        path.rpartition(".")[2],
        lambda b: of(timm(f"models.{path}")(*args, num_classes=5, **options), images(b, size)),
    )


_class(
    "volo.VOLO",
    32,
    (1, 1, 1, 1),
    img_size=32,
    embed_dims=(16, 16, 16, 16),
    num_heads=(2, 2, 2, 2),
    mlp_ratio=2.0,
    downsamples=(True, False, False, False),
    outlook_attention=(True, False, False, False),
)
_class(
    "nest.Nest",
    32,
    img_size=32,
    patch_size=2,
    num_levels=2,
    embed_dims=(8, 16),
    num_heads=(1, 2),
    depths=(1, 1),
)
_class("convmixer.ConvMixer", 32, 16, 2, kernel_size=3, patch_size=4)
_class("focalnet.FocalNet", 32, embed_dim=8, depths=(1, 1, 1, 1))
_class("metaformer.MetaFormer", 32, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))
_class(
    "pvt_v2.PyramidVisionTransformerV2",
    32,
    depths=(1, 1),
    embed_dims=(8, 16),
    num_heads=(1, 2),
    sr_ratios=(2, 1),
    mlp_ratios=(2, 2),
    linear=True,
)
_class("davit.DaVit", 32, depths=(1, 1), embed_dims=(8, 16), num_heads=(1, 2), window_size=4)
_class("repvit.RepVit", 32, embed_dim=(8, 16), depth=(1, 1), mlp_ratio=2)
_class("fasternet.FasterNet", 32, embed_dim=8, depths=(1, 1, 1, 1))
_class("xcit.Xcit", 32, img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, eta=1.0)
_class("tresnet.TResNet", 32, (1, 1, 1, 1), width_factor=0.25)
_class("dla.DLA", 32, (1, 1, 1, 1, 1, 1), (8, 8, 8, 16, 16, 16))
_class(
    "dpn.DPN",
    32,
    num_init_features=8,
    k_r=8,
    groups=2,
    k_sec=(1, 1, 1, 1),
    inc_sec=(4, 4, 4, 4),
    small=True,
)
_class("inception_next.MetaNeXt", 32, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))
_class(
    "edgenext.EdgeNeXt",
    32,
    depths=(1, 1, 1, 1),
    dims=(8, 8, 16, 16),
    global_block_counts=(0, 0, 1, 1),
    heads=(2, 2, 2, 2),
)
_add(
    "sequencer2d_s",
    32,
    img_size=32,
    layers=(1, 1, 1, 1),
    embed_dims=(8, 8, 8, 8),
    hidden_sizes=(4, 4, 4, 4),
)

# Convolutional networks.
for name in ("convnext_atto", "convnextv2_atto", "convnext_atto_ols", "convnext_atto_rms"):
    _add(name, 32, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))
_add(
    "edgenext_xx_small",
    32,
    depths=(1, 1, 1, 1),
    dims=(8, 8, 16, 16),
    global_block_counts=(0, 1, 1, 1),
    heads=(2, 2, 2, 2),
)
_add("davit_tiny", 32, embed_dims=(8, 8, 16, 16), num_heads=(1, 1, 2, 2), depths=(1, 1, 1, 1))
for name in (
    "resnet18",
    "seresnet18",
    "resnet18d",
    "resnetblur18",
    "skresnet18",
    "ecaresnet26t",
    "resnet10t",
):
    _add(name, 32, channels=(8, 8, 16, 16), layers=(1, 1, 1, 1))
_add("resnetv2_50", 32, layers=(1, 1, 1, 1), channels=(16, 16, 32, 32), stem_chs=8)
_add("densenet121", 32, growth_rate=4, block_config=(2, 2, 2, 2))
_add("mobilenetv2_035", 32)
_add("mobilenetv3_small_050", 32)
_add("lcnet_035", 32)
_add("tinynet_e", 32)
_add("ghostnet_050", 32)
_add("regnetx_002", 32)
_add("semnasnet_050", 32)
_add("mnasnet_050", 32)
_add("repghostnet_050", 32)
_add("starnet_s050", 32)
_add("mobilevit_xxs", 64)
_add("efficientvit_m0", 64, img_size=64)
_add("efficientvit_b0", 64)
_add("efficientformerv2_s0", 64, img_size=64)
_add("mambaout_femto", 32, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))

timm.add(
    "resnet18, training mode",
    lambda batch: _named(
        "resnet18", batch, 32, {"channels": (8, 8, 16, 16), "layers": (1, 1, 1, 1)}, train=True
    ),
    meets="batch norm",
)
timm.add(
    "test_efficientnet, training mode",
    lambda batch: _named("test_efficientnet", batch, 64, {}, train=True),
    meets="batch norm",
)


def _timed(name: str, size: int, **options: Any) -> None:
    timm.add_timed(f"{name}, {size} pixels", lambda batch: _named(name, batch, size, options))


_timed("resnet10t", 64)
_timed("vit_tiny_patch16_224", 96, img_size=96, depth=6)
_timed("convnext_atto", 64)
_timed("mobilenetv3_small_050", 96)
_timed(
    "swin_tiny_patch4_window7_224",
    64,
    img_size=64,
    window_size=4,
    embed_dim=48,
    depths=(2, 2, 2),
    num_heads=(2, 4, 8),
)
_timed("efficientvit_b0", 96)
_timed("poolformer_s12", 64)

smp = Library("segmentation-models-pytorch")


def _decoder(
    name: str, batch: int, encoder: str, size: int, config: dict[str, Any], train: bool = False
) -> Subject:
    model = smp(name)(
        encoder_name=encoder, encoder_weights=None, in_channels=3, classes=2, **config
    )
    return of(model, images(batch, size), train=train)


def _over(
    name: str,
    encoder: str = "timm-mobilenetv3_small_minimal_100",
    size: int = 64,
    label: str = "",
    **config: Any,
) -> None:
    smp.add(label or name, lambda batch: _decoder(name, batch, encoder, size, config))


_THIN = (16, 8, 8, 8, 4)
_over("Unet", decoder_channels=_THIN)
_over(
    "Unet",
    label="Unet, attention",
    decoder_channels=(32, 16, 16, 16, 16),
    decoder_attention_type="scse",
)
_over("UnetPlusPlus", decoder_channels=_THIN)
_over("MAnet", decoder_channels=_THIN, decoder_pab_channels=8)
_over("Linknet")
_over("FPN", decoder_pyramid_channels=32, decoder_segmentation_channels=32)
_over("PSPNet", psp_out_channels=16)
_over("PAN", decoder_channels=8, size=128)
_over("DeepLabV3", decoder_channels=8)
_over("DeepLabV3Plus", decoder_channels=8)
_over("UPerNet", decoder_channels=8)
_over("Segformer", decoder_segmentation_channels=8)
_over("Unet", "mit_b0", label="Unet, mit_b0", decoder_channels=_THIN)
smp.add(
    "Unet, training mode",
    lambda b: _decoder(
        "Unet", b, "timm-mobilenetv3_small_minimal_100", 64, {"decoder_channels": _THIN}, train=True
    ),
    meets="batch norm",
)
smp.add_timed(
    "Unet, 128 pixels",
    lambda b: _decoder(
        "Unet",
        b,
        "timm-mobilenetv3_small_minimal_100",
        128,
        {"decoder_channels": (64, 32, 16, 16, 8)},
    ),
)
