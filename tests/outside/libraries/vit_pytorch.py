"""vit-pytorch: variants of the vision transformer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.outside.case import Library, Subject, images, noise, of

vit = Library("vit-pytorch")

_TINY = {"image_size": 16, "patch_size": 4, "num_classes": 5, "dim": 16, "depth": 2}
_HEADS = {"heads": 2, "dim_head": 8}
_BASE = {**_TINY, **_HEADS, "mlp_dim": 32}
_CLIP = {"image_size": 8, "frames": 4, "frame_patch_size": 2, "image_patch_size": 4}
_VIDEO = {**_CLIP, "num_classes": 5, "dim": 16, **_HEADS, "mlp_dim": 32}


def _first(model: Any, *inputs: Tensor) -> Any:
    """The first of what the model returns: logits, without losses over the batch."""
    return model(*inputs)[0]


def _model(path: str, batch: int, inputs: Tensor, call: Any = None, **config: Any) -> Subject:
    return of(vit(path)(**config), inputs, call=call)


def _add(path: str, name: str = "", call: Any = None, **config: Any) -> None:
    """A model of images of 16 pixels."""
    vit.add(
        name or path,
        lambda batch: _model(
            path, batch, images(batch, config.get("image_size", 16)), call, **config
        ),
    )


for path in (
    "vit.ViT deepvit.DeepViT learnable_memory_vit.ViT parallel_vit.ViT"
    " vit_for_small_dataset.ViT vit_with_keel_post_ln.ViT simple_flash_attn_vit.SimpleViT"
    " simple_vit.SimpleViT simple_vit_orthog_residual_update.SimpleViT simple_vit_with_qk_norm.SimpleViT"
    " simple_vit_with_value_residual.SimpleViT simple_vit_with_register_tokens.SimpleViT"
    " simple_vit_with_relative_proj_pos_bias.SimpleViT simple_vit_attn_residual.SimpleViTAttnResidual"
    " attn_residual_with_dca_simple_vit.SimpleViT jet_vit.JetViT vit_5.ViT vit_detpool.ViTDetPool"
    " simple_vit_with_patch_dropout.SimpleViT vit_with_patch_dropout.ViT rvt.RvT mp3.ViT"
).split():
    _add(path, **_BASE)
_add("vit.ViT", "vit.ViT, mean pooling", pool="mean", **_BASE)
_add("simple_uvit.SimpleUViT", **_BASE, num_register_tokens=2)
_add("simple_vit_with_hyper_connections.SimpleViT", **_BASE, num_residual_streams=2)
_add("simple_vit_with_specialized_cls.SimpleViT", **_BASE, specialize_qkv_depth=1)
_add("simple_vit_with_sparse_gating.SimpleViTWithSparseGating", **_BASE)
_add("vit_with_decorr.ViT", **_BASE, call=_first)
_add("simple_vit_with_fft.SimpleViT", **_BASE, freq_patch_size=4)
_add("vit_with_patch_merger.ViT", **_BASE, patch_merge_layer=1, patch_merge_num_tokens=4)
_add("cait.CaiT", **_BASE, cls_depth=1)
_add("xcit.XCiT", **_BASE, cls_depth=1)
_add("jumbo_vit.JumboViT", **_BASE, num_jumbo_cls=1, jumbo_cls_k=2)
_add("normalized_vit.nViT", **_BASE)
_add("t2t.T2TViT", image_size=16, num_classes=5, dim=16, depth=2, heads=2, mlp_dim=32, dim_head=8)
_add(
    "look_vit.LookViT",
    **_TINY,
    **_HEADS,
    highres_patch_size=2,
    cross_attn_heads=2,
    cross_attn_dim_head=8,
)
_add("pit.PiT", **{**_BASE, "depth": (1, 1), "heads": (2, 2)})
_add(
    "levit.LeViT",
    image_size=32,
    num_classes=5,
    stages=2,
    dim=(16, 32),
    depth=1,
    heads=(2, 2),
    mlp_mult=2,
    dim_key=8,
    dim_value=8,
)
_add(
    "cross_vit.CrossViT",
    image_size=16,
    num_classes=5,
    sm_dim=16,
    lg_dim=16,
    depth=1,
    sm_patch_size=4,
    sm_enc_depth=1,
    sm_enc_heads=2,
    sm_enc_mlp_dim=32,
    lg_patch_size=8,
    lg_enc_depth=1,
    lg_enc_heads=2,
    lg_enc_mlp_dim=32,
    cross_attn_heads=2,
)


def _sized(path: str, size: int, **config: Any) -> None:
    """A model that takes images of any size."""
    vit.add(path, lambda batch: of(vit(path)(**config), images(batch, size)))


_sized(
    "cvt.CvT",
    32,
    num_classes=5,
    **{f"s{k}_emb_dim": 8 * k for k in (1, 2, 3)},
    **{f"s{k}_{key}": 1 for k in (1, 2, 3) for key in ("heads", "depth", "mlp_mult")},
)
_sized(
    "twins_svt.TwinsSVT",
    32,
    num_classes=5,
    **{f"s{k}_emb_dim": 8 * k for k in (1, 2, 3, 4)},
    **{f"s{k}_patch_size": 2 for k in (1, 2, 3, 4)},
    **{f"s{k}_local_patch_size": 2 for k in (1, 2, 3)},
    **{f"s{k}_global_k": 2 for k in (1, 2, 3, 4)},
    **{f"s{k}_depth": 1 for k in (1, 2, 3, 4)},
)
_sized(
    "crossformer.CrossFormer",
    64,
    num_classes=5,
    dim=(32, 32, 32, 32),
    depth=1,
    global_window_size=(4, 2, 2, 1),
    local_window_size=2,
)
_sized("regionvit.RegionViT", 64, dim=(8, 8, 16, 16), depth=1, window_size=2, num_classes=5)
_sized(
    "scalable_vit.ScalableViT",
    64,
    num_classes=5,
    dim=8,
    depth=(1, 1, 1, 1),
    heads=(1, 1, 2, 2),
    reduction_factor=(4, 2, 2, 1),
    window_size=(4, 4, None, None),
)
_sized(
    "sep_vit.SepViT",
    112,
    num_classes=5,
    dim=8,
    depth=(1, 1, 1),
    heads=(1, 2, 2),
    window_size=7,
    dim_head=8,
)
for path in ("max_vit.MaxViT", "max_vit_with_registers.MaxViT"):
    _sized(path, 32, num_classes=5, dim_conv_stem=8, dim=8, dim_head=8, depth=(1, 1), window_size=4)
vit.add("nest.NesT", lambda batch: _nest(batch))
vit.add("mobile_vit.MobileViT", lambda batch: _mobile(batch))
vit.add("cct.CCT", lambda batch: _cct(batch))


def _nest(batch: int) -> Subject:
    config = {"heads": 2, "num_hierarchies": 2, "block_repeats": (1, 1), "dim_head": 8}
    model = vit("nest.NesT")(image_size=16, patch_size=4, dim=16, num_classes=5, **config)
    return of(model, images(batch, 16))


def _mobile(batch: int) -> Subject:
    channels = [8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 16]
    model = vit("mobile_vit.MobileViT")((64, 64), [8, 8, 16], channels, num_classes=5)
    return of(model, images(batch, 64))


def _cct(batch: int) -> Subject:
    model = vit("cct.CCT")(
        img_size=16,
        embedding_dim=16,
        n_conv_layers=1,
        num_layers=2,
        num_heads=2,
        mlp_ratio=2.0,
        num_classes=5,
        positional_embedding="learnable",
        stochastic_depth_rate=0.0,
    )
    return of(model, images(batch, 16))


def _clip(batch: int) -> Tensor:
    return noise(batch, 3, 4, 8, 8)


def _of_clips(path: str, name: str = "", **config: Any) -> None:
    vit.add(name or path, lambda batch: of(vit(path)(**{**_VIDEO, **config}), _clip(batch)))


_of_clips("vit_3d.ViT", depth=2)
_of_clips("simple_vit_3d.SimpleViT", depth=2)
_of_clips("simple_flash_attn_vit_3d.SimpleViT", depth=2)
for variant in ("factorized_encoder", "factorized_self_attention"):
    _of_clips(
        "vivit.ViViT", f"vivit.ViViT, {variant}", spatial_depth=1, temporal_depth=1, variant=variant
    )
for path in ("vit_1d.ViT", "simple_vit_1d.SimpleViT"):
    vit.add(path, lambda batch, path=path: _series(path, batch))


def _series(path: str, batch: int) -> Subject:
    config = {
        "seq_len": 32,
        "patch_size": 4,
        "num_classes": 5,
        "dim": 16,
        "depth": 2,
        "mlp_dim": 32,
    }
    return of(vit(path)(**config, **_HEADS), noise(batch, 3, 32))


def _masked(batch: int) -> Subject:
    """The latents that a masked autoencoder encodes, the loss of which is a mean over the batch."""
    encoder = vit("vit.ViT")(**_BASE)
    return of(
        encoder,
        images(batch, 16),
        call=lambda model, x: model.transformer(model.to_patch_embedding(x)),
    )


vit.add("vit.ViT, parts called by themselves", _masked)


def _large(batch: int) -> Subject:
    config = {
        "image_size": 96,
        "patch_size": 8,
        "num_classes": 10,
        "dim": 128,
        "depth": 6,
        "heads": 4,
    }
    return of(vit("vit.ViT")(**config, mlp_dim=512), images(batch, 96))


vit.add_timed("vit.ViT, 96 pixels", _large)
