"""Reinforcement learning, retrieval, contrastive learning, diffusion, chemistry, genomes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.outside.case import Library, Subject, images, noise, of, words
from tests.outside.libraries.peft import transformers

torchrl = Library("torchrl")
torchrl.add(
    "MLP",
    lambda b: of(
        torchrl("modules.MLP")(in_features=4, out_features=3, num_cells=[8, 8]), noise(b, 4)
    ),
)
torchrl.add(
    "MLP, layer norm",
    lambda b: of(
        torchrl("modules.MLP")(
            in_features=4,
            out_features=3,
            num_cells=[8, 8],
            norm_class=nn.LayerNorm,
            norm_kwargs={"normalized_shape": 8},
        ),
        noise(b, 4),
    ),
)
torchrl.add(
    "ConvNet",
    lambda b: of(
        torchrl("modules.ConvNet")(in_features=3, num_cells=[4, 8], kernel_sizes=3), images(b, 16)
    ),
)
torchrl.add(
    "DdpgMlpActor",
    lambda b: of(
        torchrl("modules.DdpgMlpActor")(
            2, mlp_net_kwargs={"in_features": 4, "num_cells": [8], "depth": 1}
        ),
        noise(b, 4),
    ),
)
torchrl.add(
    "DdpgMlpQNet",
    lambda b: of(
        torchrl("modules.DdpgMlpQNet")(
            mlp_net_kwargs_net1={"in_features": 4, "num_cells": [8], "depth": 1, "out_features": 8},
            mlp_net_kwargs_net2={"in_features": 10, "num_cells": [8], "depth": 1},
        ),
        noise(b, 4),
        noise(b, 2),
    ),
)
torchrl.add("NoisyLinear", lambda b: of(torchrl("modules.NoisyLinear")(4, 3), noise(b, 4)))
torchrl.add("LSTM", lambda b: of(torchrl("modules.LSTM")(4, 8, batch_first=True), noise(b, 6, 4)))
torchrl.add("GRU", lambda b: of(torchrl("modules.GRU")(4, 8, batch_first=True), noise(b, 6, 4)))
torchrl.add(
    "MultiAgentMLP",
    lambda b: of(
        torchrl("modules.MultiAgentMLP")(
            n_agent_inputs=4,
            n_agent_outputs=3,
            n_agents=2,
            centralized=False,
            share_params=False,
            num_cells=8,
            depth=1,
        ),
        noise(b, 2, 4),
    ),
)
torchrl.add(
    "MultiAgentMLP, shared",
    lambda b: of(
        torchrl("modules.MultiAgentMLP")(
            n_agent_inputs=4,
            n_agent_outputs=3,
            n_agents=2,
            centralized=True,
            share_params=True,
            num_cells=8,
            depth=1,
        ),
        noise(b, 2, 4),
    ),
)
torchrl.add(
    "QMixer",
    lambda b: of(
        torchrl("modules.QMixer")(state_shape=(6,), mixing_embed_dim=8, n_agents=2, device="cpu"),
        noise(b, 2, 1),
        noise(b, 6),
    ),
)
torchrl.add(
    "DTActor",
    lambda b: of(
        torchrl("modules.DTActor")(
            4,
            2,
            transformer_config={
                "n_embd": 16,
                "n_layer": 1,
                "n_head": 2,
                "n_inner": 16,
                "n_positions": 32,
                "resid_pdrop": 0.0,
                "attn_pdrop": 0.0,
                "activation": "relu",
            },
        ),
        noise(b, 5, 4),
        noise(b, 5, 2),
        noise(b, 5, 1),
    ),
)

clip = Library("open_clip_torch", "open_clip")


def _clip(batch: int, call: Any, **options: Any) -> Subject:
    vision = {"image_size": 16, "layers": 2, "width": 16, "head_width": 8, "patch_size": 4}
    text = {"context_length": 8, "vocab_size": 32, "width": 16, "heads": 2, "layers": 2}
    model = clip("CLIP")(8, vision_cfg=vision, text_cfg=text, **options)
    return of(model, images(batch, 16), words(batch, 8), call=call)


def _agreement(model: nn.Module, image: Tensor, text: Tensor) -> Tensor:
    image, text, scale = model(image, text)
    return scale * (image * text).sum(-1)


def _contrast(model: nn.Module, image: Tensor, text: Tensor) -> Tensor:
    image, text, scale = model(image, text)
    logits = scale * image @ text.mT
    return nn.functional.cross_entropy(logits, torch.arange(len(logits)), reduction="none")


clip.add("CLIP, agreement of each pair", lambda b: _clip(b, _agreement))
clip.add(
    "CLIP, images only", lambda b: _clip(b, lambda model, image, text: model.encode_image(image))
)
clip.add(
    "CLIP, contrastive loss",
    lambda b: _clip(b, _contrast),
    meets="each image is compared with all texts",
)
clip.add(
    "CoCa's text tower",
    lambda b: of(
        clip("transformer.TextTransformer")(
            context_length=8,
            vocab_size=32,
            width=16,
            heads=2,
            layers=2,
            output_dim=8,
            embed_cls=True,
            pad_id=0,
        ),
        words(b, 8),
    ),
)
clip.add(
    "VisionTransformer, attentional pooling",
    lambda b: of(
        clip("transformer.VisionTransformer")(
            image_size=16,
            patch_size=4,
            width=16,
            layers=2,
            heads=2,
            mlp_ratio=2.0,
            output_dim=8,
            attentional_pool=True,
            attn_pooler_queries=4,
            attn_pooler_heads=2,
        ),
        images(b, 16),
    ),
)
clip.add(
    "ModifiedResNet",
    lambda b: of(
        clip("modified_resnet.ModifiedResNet")((1, 1, 1, 1), 16, 4, image_size=64, width=8),
        images(b, 64),
    ),
)

sentences = Library("sentence-transformers")


def _bert() -> nn.Module:
    config = transformers("BertConfig")(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    return transformers("BertModel")(config, add_pooling_layer=False)


class _Encoder(nn.Module):
    """The modules of the library after a tiny BERT, in the way that SentenceTransformer chains them."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.bert, self.chain = _bert(), nn.ModuleList(modules)

    def forward(self, ids: Tensor) -> Tensor:
        mask = torch.ones_like(ids)
        features = {
            "token_embeddings": self.bert(ids, attention_mask=mask).last_hidden_state,
            "attention_mask": mask,
            "input_ids": ids,
        }
        for module in self.chain:
            features = module(features)
        return features["sentence_embedding"]


def _pooling(mode: str) -> nn.Module:
    return sentences("models.Pooling")(16, pooling_mode=mode)


for mode in ("mean", "cls", "max", "weightedmean", "lasttoken"):
    sentences.add(f"Pooling, {mode}", lambda b, mode=mode: of(_Encoder(_pooling(mode)), words(b)))
sentences.add(
    "Dense and Normalize",
    lambda b: of(
        _Encoder(
            _pooling("mean"), sentences("models.Dense")(16, 8), sentences("models.Normalize")()
        ),
        words(b),
    ),
)
sentences.add(
    "LayerNorm",
    lambda b: of(_Encoder(_pooling("mean"), sentences("models.LayerNorm")(16)), words(b)),
)
sentences.add(
    "CNN",
    lambda b: of(
        _Encoder(sentences("models.CNN")(16, out_channels=8), sentences("models.Pooling")(24)),
        words(b),
    ),
)

kornia = Library("kornia")
kornia.add(
    "HardNet", lambda b: of(kornia("feature.HardNet")(pretrained=False), noise(b, 1, 32, 32))
)
kornia.add("HyNet", lambda b: of(kornia("feature.HyNet")(pretrained=False), noise(b, 1, 32, 32)))
kornia.add("TFeat", lambda b: of(kornia("feature.TFeat")(pretrained=False), noise(b, 1, 32, 32)))
kornia.add("SOSNet", lambda b: of(kornia("feature.SOSNet")(pretrained=False), noise(b, 1, 32, 32)))
kornia.add("OriNet", lambda b: of(kornia("feature.OriNet")(pretrained=False), noise(b, 1, 32, 32)))
kornia.add(
    "LAFAffNetShapeEstimator's net",
    lambda b: of(
        kornia("feature.LAFAffNetShapeEstimator")(pretrained=False).features, noise(b, 1, 32, 32)
    ),
)

lightly = Library("lightly")
for name in (
    "SimCLRProjectionHead",
    "BYOLProjectionHead",
    "BarlowTwinsProjectionHead",
    "MoCoProjectionHead",
    "SwaVProjectionHead",
    "VICRegProjectionHead",
    "NNCLRProjectionHead",
    "SimSiamPredictionHead",
):
    lightly.add(
        name,
        lambda b, name=name: of(lightly(f"models.modules.heads.{name}")(16, 8, 4), noise(b, 16)),
    )
lightly.add(
    "DINOProjectionHead",
    lambda b: of(lightly("models.modules.heads.DINOProjectionHead")(16, 8, 4, 6), noise(b, 16)),
)
lightly.add(
    "SwaVPrototypes",
    lambda b: of(lightly("models.modules.heads.SwaVPrototypes")(16, 6), noise(b, 16)),
)
lightly.add(
    "BarlowTwinsProjectionHead, training mode",
    lambda b: of(
        lightly("models.modules.heads.BarlowTwinsProjectionHead")(16, 8, 4),
        noise(b, 16),
        train=True,
    ),
    meets="batch norm",
)
lightly.add(
    "ResNetGenerator",
    lambda b: of(
        lightly("models.ResNetGenerator")("resnet-9", width=0.125, num_classes=5), images(b)
    ),
)

crf = Library("pytorch-crf", "torchcrf")


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emit, self.crf = nn.Linear(4, 3), crf("CRF")(3, batch_first=True)

    def forward(self, x: Tensor, tags: Tensor) -> Tensor:
        return self.crf(self.emit(x), tags, reduction="none")


crf.add("CRF", lambda b: of(_Tagger(), noise(b, 6, 4), torch.randint(0, 3, (b, 6))))

efficientnet = Library("efficientnet-pytorch")


def _efficientnet(batch: int, train: bool = False) -> Subject:
    utils = efficientnet("utils")
    blocks, options = utils.efficientnet(
        width_coefficient=0.25,
        depth_coefficient=0.1,
        dropout_rate=0.0,
        image_size=32,
        num_classes=5,
        drop_connect_rate=0.0,
    )
    return of(efficientnet("EfficientNet")(blocks, options), images(batch, 32), train=train)


efficientnet.add("EfficientNet", _efficientnet)

enformer = Library("enformer-pytorch")


def _enformer(batch: int) -> Subject:
    config = enformer("EnformerConfig")(
        dim=24,
        depth=1,
        heads=2,
        output_heads={"human": 5},
        target_length=4,
        num_downsamples=3,
        dim_divisible_by=2,
        attn_dim_key=8,
        dropout_rate=0.0,
        attn_dropout=0.0,
        pos_dropout=0.0,
        use_tf_gamma=False,
    )
    return of(enformer("Enformer")(config), torch.randint(0, 5, (batch, 64)))


enformer.add("Enformer", _enformer)

diffusion = Library("denoising-diffusion-pytorch")
diffusion.add(
    "Unet",
    lambda b: of(
        diffusion("Unet")(dim=8, dim_mults=(1, 2), flash_attn=False, attn_dim_head=4, attn_heads=2),
        images(b, 16),
        torch.arange(b),
    ),
)
diffusion.add(
    "Unet1D",
    lambda b: of(
        diffusion("Unet1D")(dim=8, dim_mults=(1, 2), channels=4), noise(b, 4, 16), torch.arange(b)
    ),
)
diffusion.add(
    "KarrasUnet",
    lambda b: of(
        diffusion("KarrasUnet")(
            image_size=16,
            dim=8,
            dim_max=16,
            num_downsamples=1,
            num_blocks_per_stage=1,
            attn_res=(8,),
            attn_dim_head=4,
            fourier_dim=8,
        ),
        images(b, 16, 4),
        torch.rand(b),
    ),
)
diffusion.add_timed(
    "Unet, 32 pixels",
    lambda b: of(
        diffusion("Unet")(dim=16, dim_mults=(1, 2, 4), flash_attn=False),
        images(b, 32),
        torch.arange(b),
    ),
)

colt5 = Library("CoLT5-attention", "colt5_attention")
colt5.add(
    "ConditionalRoutedFeedForward",
    lambda b: of(
        colt5("ConditionalRoutedFeedForward")(
            16, num_heavy_tokens=4, light_ff_mult=0.5, heavy_ff_mult=2
        ),
        noise(b, 16, 16),
    ),
)

chemprop = Library("chemprop")


class _Predictor(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.head = chemprop(f"nn.{kind}")(input_dim=8, hidden_dim=8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


for kind in ("RegressionFFN", "MveFFN", "BinaryClassificationFFN", "EvidentialFFN"):
    chemprop.add(kind, lambda b, kind=kind: of(_Predictor(kind), noise(b, 8)))


def _large_clip(batch: int) -> Subject:
    vision = {"image_size": 64, "layers": 4, "width": 128, "head_width": 32, "patch_size": 8}
    text = {"context_length": 32, "vocab_size": 512, "width": 128, "heads": 4, "layers": 4}
    model = clip("CLIP")(64, vision_cfg=vision, text_cfg=text)
    return of(model, images(batch, 64), words(batch, 32, 512), call=_agreement)


clip.add_timed("CLIP, 64 pixels and 32 tokens", _large_clip)
kornia.add_timed(
    "HardNet, patches",
    lambda b: of(kornia("feature.HardNet")(pretrained=False), noise(b, 1, 32, 32)),
)
torchrl.add_timed(
    "ConvNet, 84 pixels",
    lambda b: of(
        torchrl("modules.ConvNet")(
            in_features=4, num_cells=[32, 64, 64], kernel_sizes=[8, 4, 3], strides=[4, 2, 1]
        ),
        noise(b, 4, 84, 84),
    ),
)
