"""torchvision and torchaudio: their model classes, made small; their compiled parts are not needed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.outside.case import Library, Subject, images, noise, of

vision = Library("torchvision")
_FIVE = {"num_classes": 5}


def _resnet(
    batch: int, block: str = "BasicBlock", train: bool = False, size: int = 32, **options: Any
) -> Subject:
    kind = vision(f"models.resnet.{block}")
    model = vision("models.resnet.ResNet")(kind, [1, 1, 1, 1], **_FIVE, **options)
    return of(_narrowed(model, block), images(batch, size), train=train)


def _narrowed(model: nn.Module, block: str) -> nn.Module:
    """The last two stages left out, which hold most of the parameters."""
    width = 128 if block == "BasicBlock" else 512
    model.layer3, model.layer4 = nn.Identity(), nn.Identity()
    model.fc = nn.Linear(width, 5)
    return model


vision.add("ResNet, basic blocks", _resnet)
vision.add("ResNet, bottlenecks", lambda b: _resnet(b, "Bottleneck"))
vision.add("ResNet, groups", lambda b: _resnet(b, "Bottleneck", groups=8, width_per_group=4))
vision.add(
    "ResNet, group norm",
    lambda b: _resnet(b, norm_layer=lambda width: nn.GroupNorm(8, width), train=True),
)
vision.add("ResNet, training mode", lambda b: _resnet(b, train=True), meets="batch norm")
vision.add(
    "MobileNetV2", lambda b: of(vision("models.MobileNetV2")(width_mult=0.25, **_FIVE), images(b))
)
vision.add(
    "MobileNetV2, training mode",
    lambda b: of(
        vision("models.MobileNetV2")(width_mult=0.25, dropout=0.0, **_FIVE),
        images(b, 64),
        train=True,
    ),
    meets="batch norm",
)
vision.add("MNASNet", lambda b: of(vision("models.MNASNet")(0.25, **_FIVE), images(b)))
vision.add(
    "ShuffleNetV2",
    lambda b: of(vision("models.ShuffleNetV2")([2, 2, 2], [8, 16, 16, 32, 64], **_FIVE), images(b)),
)
vision.add("SqueezeNet", lambda b: of(vision("models.SqueezeNet")("1_1", **_FIVE), images(b, 64)))
vision.add("DenseNet", lambda b: of(vision("models.DenseNet")(4, (2, 2), 8, **_FIVE), images(b)))
vision.add(
    "DenseNet, checkpointed",
    lambda b: of(
        vision("models.DenseNet")(4, (2, 2), 8, memory_efficient=True, **_FIVE), images(b)
    ),
)
vision.add("VGG, batch norm", lambda b: of(_vgg(True), images(b)))
vision.add("VGG", lambda b: of(_vgg(False), images(b)))


def _vgg(batch_norm: bool) -> nn.Module:
    features = vision("models.vgg.make_layers")([8, "M", 16, "M", 16, "M"], batch_norm=batch_norm)
    model = vision("models.VGG")(features, **_FIVE)
    model.classifier = nn.Sequential(nn.Linear(16 * 7 * 7, 16), nn.ReLU(), nn.Linear(16, 5))
    return model


def _mobile_v3(batch: int) -> Subject:
    block = partial(vision("models.mobilenetv3.InvertedResidualConfig"), width_mult=1.0)
    blocks = [block(8, 3, 16, 8, True, "RE", 2, 1), block(8, 5, 16, 16, True, "HS", 2, 1)]
    return of(vision("models.MobileNetV3")(blocks, 16, **_FIVE), images(batch))


def _efficient(batch: int) -> Subject:
    block = vision("models.efficientnet.MBConvConfig")
    fused = vision("models.efficientnet.FusedMBConvConfig")
    blocks = [fused(1, 3, 1, 8, 8, 1), block(2, 3, 2, 8, 16, 1), block(2, 5, 2, 16, 16, 1)]
    return of(
        vision("models.EfficientNet")(
            blocks, 0.0, stochastic_depth_prob=0.0, last_channel=32, **_FIVE
        ),
        images(batch),
    )


def _regnet(batch: int, se_ratio: float | None) -> Subject:
    params = vision("models.regnet.BlockParams")(
        [1, 1], [16, 16], [8, 8], [1.0, 1.0], [2, 2], se_ratio
    )
    return of(vision("models.RegNet")(params, stem_width=8, **_FIVE), images(batch))


def _convnext(batch: int) -> Subject:
    block = vision("models.convnext.CNBlockConfig")
    return of(
        vision("models.ConvNeXt")([block(8, 16, 1), block(16, None, 1)], **_FIVE), images(batch)
    )


def _swin(batch: int, version: int) -> Subject:
    config = {
        "patch_size": [4, 4],
        "embed_dim": 8,
        "depths": [2, 2],
        "num_heads": [1, 2],
        "window_size": [4, 4],
    }
    parts: dict[str, Any] = {}
    if version == 2:
        parts = {
            "block": vision("models.swin_transformer.SwinTransformerBlockV2"),
            "downsample_layer": vision("models.swin_transformer.PatchMergingV2"),
        }
    return of(
        vision("models.SwinTransformer")(**config, **parts, stochastic_depth_prob=0.0, **_FIVE),
        images(batch),
    )


def _vit(batch: int, size: int = 16, **options: Any) -> Subject:
    config = {
        "patch_size": 4,
        "num_layers": 2,
        "num_heads": 2,
        "hidden_dim": 16,
        "mlp_dim": 32,
        **options,
    }
    return of(
        vision("models.VisionTransformer")(image_size=size, **config, **_FIVE), images(batch, size)
    )


def _maxvit(batch: int) -> Subject:
    model = vision("models.MaxVit")(
        (64, 64), 8, 4, [8, 16], [1, 1], 8, 0.0, **_FIVE, squeeze_ratio=0.25, expansion_ratio=2
    )
    return of(model, images(batch, 64))


vision.add("MobileNetV3", _mobile_v3)
vision.add("EfficientNet", _efficient)
vision.add("RegNet", lambda b: _regnet(b, None))
vision.add("RegNet, squeeze and excite", lambda b: _regnet(b, 0.25))
vision.add("ConvNeXt", _convnext)
vision.add("SwinTransformer", lambda b: _swin(b, 1))
vision.add("SwinTransformerV2", lambda b: _swin(b, 2))
vision.add("VisionTransformer", _vit)
vision.add("MaxVit", _maxvit)


class _Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.ReLU())
        self.high = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU())

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        low = self.low(x)
        return {"low": low, "high": self.high(low), "out": self.high(low)}


vision.add(
    "FCN",
    lambda b: of(
        vision("models.segmentation.FCN")(
            _Features(), vision("models.segmentation.fcn.FCNHead")(16, 5)
        ),
        images(b),
    ),
)
vision.add(
    "LRASPP",
    lambda b: of(vision("models.segmentation.LRASPP")(_Features(), 8, 16, 5, 8), images(b)),
)
vision.add(
    "FeaturePyramidNetwork",
    lambda b: of(
        vision("ops.FeaturePyramidNetwork")([8, 16], 8),
        {"low": noise(b, 8, 8, 8), "high": noise(b, 16, 4, 4)},
    ),
)
vision.add(
    "RetinaNetHead",
    lambda b: of(
        vision("models.detection.retinanet.RetinaNetHead")(8, 2, 3),
        [noise(b, 8, 8, 8), noise(b, 8, 4, 4)],
    ),
)
vision.add(
    "FCOSHead",
    lambda b: of(
        vision("models.detection.fcos.FCOSHead")(32, 1, 3, 1),
        [noise(b, 32, 8, 8), noise(b, 32, 4, 4)],
    ),
)
vision.add(
    "RPNHead",
    lambda b: of(
        vision("models.detection.rpn.RPNHead")(8, 3), [noise(b, 8, 8, 8), noise(b, 8, 4, 4)]
    ),
)


def _video_swin(batch: int) -> Subject:
    model = vision("models.video.SwinTransformer3d")(
        [2, 4, 4], 8, [2, 2], [1, 2], [2, 4, 4], stochastic_depth_prob=0.0, **_FIVE
    )
    return of(model, noise(batch, 3, 4, 32, 32))


def _mvit(batch: int) -> Subject:
    block = vision("models.video.mvit.MSBlockConfig")
    kernel: dict[str, Any] = {"kernel_q": [3, 3, 3], "kernel_kv": [3, 3, 3], "stride_kv": [1, 2, 2]}
    blocks = [
        block(1, 8, 8, stride_q=[1, 1, 1], **kernel),
        block(2, 8, 16, stride_q=[1, 2, 2], **kernel),
    ]
    model = vision("models.video.MViT")(
        (16, 16),
        4,
        blocks,
        residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True,
        proj_after_attn=True,
        **_FIVE,
    )
    return of(model, noise(batch, 3, 4, 16, 16))


def _video_resnet(batch: int, conv: str) -> Subject:
    resnet = vision("models.video.resnet")
    kinds = [getattr(resnet, conv)] * 4
    model = resnet.VideoResNet(resnet.BasicBlock, kinds, [1, 1, 1, 1], resnet.BasicStem, **_FIVE)
    model.layer2 = model.layer3 = model.layer4 = nn.Identity()
    model.fc = nn.Linear(64, 5)
    return of(model, noise(batch, 3, 4, 16, 16))


vision.add("SwinTransformer3d", _video_swin)
vision.add("MViT", _mvit)
vision.add("VideoResNet", lambda b: _video_resnet(b, "Conv3DSimple"))
vision.add("VideoResNet, (2+1)D", lambda b: _video_resnet(b, "Conv2Plus1D"))
vision.add_timed("ResNet, 64 pixels", lambda b: _resnet(b, size=64))
vision.add_timed(
    "VisionTransformer, 64 pixels",
    lambda b: _vit(b, 64, patch_size=8, num_layers=6, num_heads=4, hidden_dim=128, mlp_dim=512),
)

audio = Library("torchaudio")


def _first(model: nn.Module, *inputs: Any) -> Any:
    return model(*inputs)[0]


audio.add(
    "Conformer",
    lambda b: of(
        audio("models.Conformer")(16, 2, 32, 2, 5),
        noise(b, 12, 16),
        torch.full((b,), 12),
        call=_first,
    ),
)
audio.add(
    "Conformer, group norm",
    lambda b: of(
        audio("models.Conformer")(16, 2, 32, 1, 5, use_group_norm=True),
        noise(b, 12, 16),
        torch.full((b,), 12),
        call=_first,
    ),
)
audio.add(
    "Emformer",
    lambda b: of(
        audio("models.Emformer")(16, 2, 32, 2, 4, right_context_length=1),
        noise(b, 9, 16),
        torch.full((b,), 9),
        call=_first,
    ),
)
audio.add(
    "DeepSpeech",
    lambda b: of(audio("models.DeepSpeech")(8, n_hidden=16, n_class=5), noise(b, 1, 10, 8)),
)
audio.add(
    "ConvTasNet",
    lambda b: of(
        audio("models.ConvTasNet")(
            num_sources=2,
            enc_kernel_size=8,
            enc_num_feats=8,
            msk_kernel_size=3,
            msk_num_feats=8,
            msk_num_hidden_feats=8,
            msk_num_layers=2,
            msk_num_stacks=1,
        ),
        noise(b, 1, 64),
    ),
)
audio.add(
    "WaveRNN",
    lambda b: of(
        audio("models.WaveRNN")(
            upsample_scales=[2, 2],
            n_classes=8,
            hop_length=4,
            n_res_block=1,
            n_rnn=16,
            n_fc=16,
            kernel_size=3,
            n_freq=8,
            n_hidden=8,
            n_output=8,
        ),
        noise(b, 1, 16),
        noise(b, 1, 8, 6),
    ),
)
audio.add("Wav2Vec2Model", lambda b: of(_wav2vec(), noise(b, 400), call=_first))
audio.add(
    "HDemucs",
    lambda b: of(
        audio("models.HDemucs")(sources=["a", "b"], audio_channels=1, channels=4, nfft=64, depth=3),
        noise(b, 1, 1024),
    ),
)


def _wav2vec() -> nn.Module:
    return audio("models.wav2vec2_model")(
        extractor_mode="group_norm",
        extractor_conv_layer_config=[(8, 10, 5), (8, 3, 2)],
        extractor_conv_bias=False,
        encoder_embed_dim=16,
        encoder_projection_dropout=0.0,
        encoder_pos_conv_kernel=4,
        encoder_pos_conv_groups=2,
        encoder_num_layers=2,
        encoder_num_heads=2,
        encoder_attention_dropout=0.0,
        encoder_ff_interm_features=32,
        encoder_ff_interm_dropout=0.0,
        encoder_dropout=0.0,
        encoder_layer_norm_first=False,
        encoder_layer_drop=0.0,
        aux_num_out=5,
    )


audio.add_timed(
    "Conformer, 100 frames",
    lambda b: of(
        audio("models.Conformer")(80, 4, 128, 4, 31),
        noise(b, 100, 80),
        torch.full((b,), 100),
        call=_first,
    ),
)
