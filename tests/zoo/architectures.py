"""The zoo: every architecture by name, and the few that stand for the rest."""

from __future__ import annotations

from tests.zoo.architecture import Architecture
from tests.zoo.families.decoders import DECODERS
from tests.zoo.families.encoders import ENCODERS
from tests.zoo.families.experts import EXPERTS
from tests.zoo.families.multimodal import MULTIMODAL
from tests.zoo.families.pairs import PAIRS
from tests.zoo.families.signals import SIGNALS
from tests.zoo.families.vision import VISION_MODELS

__all__ = ["ARCHITECTURES", "FAMILIES", "REPRESENTATIVE"]

FAMILIES: dict[str, dict[str, Architecture]] = {
    "Decoders": DECODERS,
    "Mixtures of experts": EXPERTS,
    "Encoders": ENCODERS,
    "Encoder-decoders": PAIRS,
    "Vision": VISION_MODELS,
    "Images and text": MULTIMODAL,
    "Audio and time series": SIGNALS,
}
ARCHITECTURES: dict[str, Architecture] = {
    name: architecture for family in FAMILIES.values() for name, architecture in family.items()
}

# One for each thing that only some models do.
REPRESENTATIVE = (
    "GPT-2",  # transposed weights, a tied head, position embeddings without samples
    "Llama",  # rotary positions, fewer keys than queries
    "Bloom",  # heads folded into the samples' dimension
    "Mamba2",  # a scan over chunks
    "Mixtral",  # tokens picked by value and put back
    "DeepSeek-V3",  # grouped routing, latent attention
    "BERT",
    "DeBERTa-v2",  # relative positions gathered
    "XLNet",  # samples in the second dimension
    "Longformer",  # overlapping windows
    "T5",  # relative position buckets
    "BART",  # a decoder that attends to an encoder
    "ViT",  # a class token expanded to the batch
    "Swin",  # windows, rolls
    "ConvNeXt",
    "Wav2Vec2",  # weight norm
)
