"""Builds inputs for the models of the zoo, for a given number of samples."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "HEADS",
    "HIDDEN",
    "LENGTH",
    "VOCABULARY",
    "Inputs",
    "boxes",
    "captioned",
    "described",
    "features",
    "forecast",
    "heard",
    "illustrated",
    "images",
    "mono",
    "moonlit",
    "pairs",
    "played",
    "queried",
    "series",
    "shuffled",
    "spectrograms",
    "spoken",
    "tokens",
    "unnamed",
    "videos",
    "waves",
]

LENGTH = 5  # of the token sequences
HEADS = 4
HIDDEN = 16
VOCABULARY = 40

Inputs = dict[str, Tensor]


def _words(*shape: int) -> Tensor:
    """None of them special: padding and the ends of a sequence come first in the vocabulary."""
    return torch.randint(3, VOCABULARY, shape)


def tokens(batch: int) -> Inputs:
    return {"input_ids": _words(batch, LENGTH)}


def pairs(batch: int) -> Inputs:
    """A source and a shorter target."""
    return {**tokens(batch), "decoder_input_ids": _words(batch, LENGTH - 2)}


def boxes(batch: int) -> Inputs:
    """Words with their places on the page: left, top, right, bottom."""
    left_top = torch.randint(0, 8, (batch, LENGTH, 2))
    return {**tokens(batch), "bbox": torch.cat((left_top, left_top + 7), dim=2)}


def images(batch: int, side: int = 8) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, side, side)}


def videos(batch: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 4, 3, 8, 8)}


def captioned(batch: int) -> Inputs:
    return {**tokens(batch), **images(batch)}


def waves(batch: int) -> Inputs:
    return {"input_values": torch.randn(batch, 200)}


def spectrograms(batch: int) -> Inputs:
    return {"input_values": torch.randn(batch, 12, 8)}


def heard(batch: int) -> Inputs:
    """A spectrogram, and the words said."""
    return {
        "input_features": torch.randn(batch, 8, 12),
        "decoder_input_ids": _words(batch, LENGTH),
    }


def series(batch: int) -> Inputs:
    return {"past_values": torch.randn(batch, 16, 2)}


def unnamed(batch: int) -> Inputs:
    return {"inputs": _words(batch, LENGTH)}


def shuffled(batch: int) -> Inputs:
    """Images, and the numbers that say which of their patches are left out."""
    return {**images(batch), "noise": torch.rand(batch, 4)}


def illustrated(batch: int, patches: int = 4) -> Inputs:
    """Text with the image's patches in the place of some of its tokens."""
    place = torch.full((batch, patches), VOCABULARY - 1)
    words = torch.randint(3, VOCABULARY - 1, (batch, LENGTH))
    return {"input_ids": torch.cat((words[:, :1], place, words[:, 1:]), dim=1), **images(batch)}


def queried(batch: int) -> Inputs:
    return illustrated(batch, patches=3)


def described(batch: int) -> Inputs:
    return {**images(batch), "decoder_input_ids": _words(batch, LENGTH)}


def features(batch: int) -> Inputs:
    return {"input_features": torch.randn(batch, 12, 8)}


def mono(batch: int) -> Inputs:
    return {"input_values": torch.randn(batch, 1, 32)}


def spoken(batch: int) -> Inputs:
    return {**waves(batch), "decoder_input_ids": _words(batch, LENGTH)}


def moonlit(batch: int) -> Inputs:
    return {"input_values": torch.randn(batch, 1200), "decoder_input_ids": _words(batch, LENGTH)}


def played(batch: int) -> Inputs:
    return {
        "states": torch.randn(batch, LENGTH, 3),
        "actions": torch.randn(batch, LENGTH, 2),
        "rewards": torch.randn(batch, LENGTH, 1),
        "returns_to_go": torch.randn(batch, LENGTH, 1),
        "timesteps": torch.randint(0, 16, (batch, LENGTH)),
        "attention_mask": torch.ones(batch, LENGTH),
    }


def forecast(batch: int) -> Inputs:
    return {
        "past_values": torch.randn(batch, 10),
        "past_time_features": torch.randn(batch, 10, 2),
        "past_observed_mask": torch.ones(batch, 10),
        "future_values": torch.randn(batch, 3),
        "future_time_features": torch.randn(batch, 3, 2),
    }
