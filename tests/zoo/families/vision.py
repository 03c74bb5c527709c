"""Images and video."""

from __future__ import annotations

from tests.zoo.architecture import Architecture
from tests.zoo.batches import HEADS, HIDDEN, shuffled, tokens, videos
from tests.zoo.tiny import TEXT, VISION, image, pyramid, unlabelled, video

__all__ = ["VISION_MODELS"]

VISION_MODELS: dict[str, Architecture] = {
    "ViT": image("ViTForImageClassification"),
    "DeiT": image("DeiTForImageClassificationWithTeacher"),
    "ViT-MSN": image("ViTMSNForImageClassification"),
    "BEiT": image(
        "BeitForImageClassification", use_relative_position_bias=True, layer_scale_init_value=0.5
    ),
    "BEiT, shared": image(
        "BeitForImageClassification",
        use_shared_relative_position_bias=True,
        use_absolute_position_embeddings=True,
    ),
    "Data2Vec vision": image(
        "Data2VecVisionForImageClassification", use_relative_position_bias=True
    ),
    "Swin": pyramid(
        "SwinForImageClassification",
        side=16,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 4],
        window_size=2,
        patch_size=2,
    ),
    "SwinV2": pyramid(
        "Swinv2ForImageClassification",
        side=16,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 4],
        window_size=2,
        patch_size=2,
    ),
    "DINOv2": image("Dinov2ForImageClassification"),
    "DINOv2, registers": image("Dinov2WithRegistersForImageClassification", num_register_tokens=2),
    "DINOv3": image("DINOv3ViTModel", num_register_tokens=2),
    "DINOv3 ConvNeXt": pyramid(
        "DINOv3ConvNextModel", hidden_sizes=[4, 8, 8, 12], depths=[1, 1, 1, 1]
    ),
    "ConvNeXt": pyramid(
        "ConvNextForImageClassification", hidden_sizes=[4, 8, 8, 12], depths=[1, 1, 1, 1]
    ),
    "ConvNeXtV2": pyramid(
        "ConvNextV2ForImageClassification",
        hidden_sizes=[4, 8, 8, 12],
        depths=[1, 1, 1, 1],
    ),
    "ResNet": pyramid(
        "ResNetForImageClassification",
        embedding_size=4,
        hidden_sizes=[8, 8],
        depths=[1, 1],
    ),
    "RegNet": pyramid(
        "RegNetForImageClassification",
        embedding_size=4,
        hidden_sizes=[8, 8],
        depths=[1, 1],
        groups_width=4,
    ),
    "MobileNetV1": pyramid("MobileNetV1ForImageClassification", depth_multiplier=0.25),
    "MobileNetV2": pyramid("MobileNetV2ForImageClassification", depth_multiplier=0.25),
    "MobileViT": pyramid(
        "MobileViTForImageClassification",
        patch_size=2,
        hidden_sizes=[8, 8, 8],
        neck_hidden_sizes=[4, 4, 4, 4, 4, 4, 8],
    ),
    "MobileViTV2": pyramid(
        "MobileViTV2ForImageClassification",
        side=64,
        patch_size=2,
        width_multiplier=0.0625,
        n_attn_blocks=[1, 1, 1],
        base_attn_unit_dims=[8, 8, 8],
    ),
    "EfficientNet": pyramid(
        "EfficientNetForImageClassification",
        width_coefficient=0.1,
        depth_coefficient=0.1,
        hidden_dim=128,
        depth_divisor=4,
    ),
    "BiT": pyramid(
        "BitForImageClassification",
        embedding_size=8,
        hidden_sizes=[8, 8],
        depths=[1, 1],
        num_groups=2,
    ),
    "FocalNet": pyramid(
        "FocalNetForImageClassification",
        embed_dim=8,
        depths=[1, 1],
        hidden_sizes=[8, 16],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
    ),
    "Hiera": pyramid(
        "HieraForImageClassification",
        image_size=[32, 32],
        patch_size=[7, 7],
        embed_dim=8,
        depths=[1, 1],
        num_heads=[1, 2],
        masked_unit_size=[4, 4],
        num_query_pool=1,
    ),
    "PoolFormer": pyramid(
        "PoolFormerForImageClassification", hidden_sizes=[4, 8, 8, 8], depths=[1, 1, 1, 1]
    ),
    "PVT": pyramid(
        "PvtForImageClassification",
        hidden_sizes=[4, 8, 8, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
    ),
    "PVTv2": pyramid(
        "PvtV2ForImageClassification",
        hidden_sizes=[4, 8, 8, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
        mlp_ratios=[2, 2, 2, 2],
    ),
    "SegFormer": unlabelled(
        pyramid(
            "SegformerForSemanticSegmentation",
            hidden_sizes=[4, 8, 8, 16],
            depths=[1, 1, 1, 1],
            num_attention_heads=[1, 2, 2, 4],
            decoder_hidden_size=8,
        )
    ),
    "SwiftFormer": pyramid(
        "SwiftFormerForImageClassification",
        depths=[1, 1, 1, 1],
        embed_dims=[8, 8, 16, 16],
    ),
    "ViT-MAE": Architecture("ViTMAEModel", {**VISION, "mask_ratio": 0.5}, shuffled),
    "I-JEPA": image("IJepaForImageClassification"),
    "YOLOS": unlabelled(
        image("YolosForObjectDetection", image_size=[8, 8], num_detection_tokens=3)
    ),
    "ImageGPT": Architecture(
        "ImageGPTForCausalImageModeling",
        {**TEXT},
        tokens,
        is_maskable=True,
    ),
    "TimeSformer": Architecture(
        "TimesformerForVideoClassification",
        {**VISION, "num_frames": 4},
        videos,
        refusal="mixes the samples",  # the class tokens of a batch are rows of its first samples
    ),
    "VideoMAE": video("VideoMAEForVideoClassification"),
    "ViViT": video("VivitForVideoClassification", tubelet_size=[2, 4, 4]),
    "GLPN": unlabelled(
        pyramid(
            "GLPNForDepthEstimation",
            hidden_sizes=[4, 8, 8, 16],
            depths=[1, 1, 1, 1],
            num_attention_heads=[1, 2, 2, 4],
            decoder_hidden_size=8,
        )
    ),
    "DETR": unlabelled(
        pyramid(
            "DetrForObjectDetection",
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config={
                "model_type": "resnet",
                "embedding_size": 4,
                "hidden_sizes": [8, 8],
                "depths": [1, 1],
                "out_features": ["stage2"],
            },
            d_model=HIDDEN,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            num_queries=3,
        )
    ),
    "Swin2SR": unlabelled(
        pyramid(
            "Swin2SRForImageSuperResolution",
            side=8,
            embed_dim=8,
            depths=[1, 1],
            num_heads=[2, 2],
            window_size=2,
            patch_size=1,
            upscale=2,
        )
    ),
    "ViTDet": image(
        "VitDetModel",
        window_size=2,
        window_block_indices=[0],
        use_relative_position_embeddings=True,
    ),
    "SAM vision": pyramid(
        "SamVisionModel",
        side=16,
        patch_size=4,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        output_channels=8,
        window_size=2,
        global_attn_indexes=[1],
        mlp_dim=32,
    ),
    "MLCD": image("MLCDVisionModel"),
    "HGNetV2": pyramid(
        "HGNetV2ForImageClassification",
        depths=[1, 1, 1, 1],
        hidden_sizes=[4, 8, 8, 16],
        stem_channels=[3, 4, 4],
        embedding_size=4,
        stage_in_channels=[4, 4, 8, 8],
        stage_mid_channels=[4, 4, 4, 4],
        stage_out_channels=[4, 8, 8, 16],
        stage_num_blocks=[1, 1, 1, 1],
    ),
    "TextNet": pyramid("TextNetForImageClassification"),
}
