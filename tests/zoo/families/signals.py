"""Audio and time series."""

from __future__ import annotations

from dataclasses import replace

from tests.zoo.architecture import Architecture
from tests.zoo.batches import (
    HEADS,
    HIDDEN,
    features,
    forecast,
    heard,
    mono,
    moonlit,
    played,
    series,
    spectrograms,
    spoken,
)
from tests.zoo.tiny import PAIR, TEXT, VISION, wave

__all__ = ["SIGNALS"]

SIGNALS: dict[str, Architecture] = {
    "Wav2Vec2": wave("Wav2Vec2ForCTC"),
    "Wav2Vec2, stable": wave(
        "Wav2Vec2ForSequenceClassification", do_stable_layer_norm=True, feat_extract_norm="layer"
    ),
    "Wav2Vec2-Conformer": wave("Wav2Vec2ConformerForCTC"),
    "HuBERT": wave("HubertForCTC"),
    "WavLM": replace(wave("WavLMForCTC"), reentrant="endless"),
    "SEW": wave("SEWForCTC", squeeze_factor=2),
    "UniSpeech": wave("UniSpeechForCTC"),
    "UniSpeechSat": wave("UniSpeechSatForCTC"),
    "Data2Vec audio": wave("Data2VecAudioForCTC", num_conv_pos_embeddings=3),
    "AST": Architecture(
        "ASTForAudioClassification",
        {**VISION, "num_mel_bins": 8, "max_length": 12, "frequency_stride": 4, "time_stride": 4},
        spectrograms,
    ),
    "Whisper": Architecture(
        "WhisperForConditionalGeneration",
        {**PAIR, "num_mel_bins": 8, "max_source_positions": 6, "max_target_positions": 16},
        heard,
    ),
    "Speech2Text": Architecture(
        "Speech2TextForConditionalGeneration",
        {
            **PAIR,
            "input_feat_per_channel": 12,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "conv_channels": 8,
        },
        heard,
    ),
    "PatchTST": Architecture(
        "PatchTSTForRegression",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "ffn_dim": 32,
            "num_targets": 3,
            "loss": "mse",
        },
        series,
    ),
    "SEW-D": wave("SEWDForCTC", squeeze_factor=2, position_buckets=4, max_position_embeddings=16),
    "Wav2Vec2-BERT": Architecture(
        "Wav2Vec2BertForCTC",
        {
            **TEXT,
            "feature_projection_input_dim": 8,
            "left_max_position_embeddings": 4,
            "right_max_position_embeddings": 2,
        },
        features,
        takes_labels=False,
    ),
    "PatchTSMixer": Architecture(
        "PatchTSMixerForRegression",
        {
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "num_input_channels": 2,
            "d_model": HIDDEN,
            "num_layers": 2,
            "num_targets": 3,
            "norm_mlp": "LayerNorm",
        },
        series,
    ),
    "Encodec": Architecture(
        "EncodecModel",
        {
            "num_filters": 4,
            "upsampling_ratios": [2, 2],
            "hidden_size": 8,
            "codebook_size": 8,
            "codebook_dim": 8,
            "num_lstm_layers": 1,
            "target_bandwidths": [24.0],
        },
        mono,
        ("audio_values",),
    ),
    "SpeechT5": Architecture(
        "SpeechT5ForSpeechToText",
        {
            **PAIR,
            **TEXT,
            "conv_dim": (8, 8),
            "conv_stride": (5, 2),
            "conv_kernel": (10, 3),
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "max_text_positions": 16,
            "max_speech_positions": 64,
        },
        spoken,
    ),
    "Moonshine": Architecture(
        "MoonshineForConditionalGeneration",
        {
            **TEXT,
            "encoder_num_hidden_layers": 1,
            "decoder_num_hidden_layers": 1,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "encoder_num_key_value_heads": 4,
            "decoder_num_key_value_heads": 4,
            "decoder_start_token_id": 1,
        },
        moonlit,
    ),
    "Decision Transformer": Architecture(
        "DecisionTransformerModel",
        {
            "state_dim": 3,
            "act_dim": 2,
            "hidden_size": HIDDEN,
            "n_layer": 2,
            "n_head": HEADS,
            "max_ep_len": 16,
        },
        played,
    ),
    "TimeSeriesTransformer": Architecture(
        "TimeSeriesTransformerModel",
        {
            "prediction_length": 3,
            "context_length": 8,
            "lags_sequence": [1, 2],
            "d_model": HIDDEN,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "num_time_features": 2,
            "scaling": None,
        },
        forecast,
    ),
    "Informer": Architecture(
        "InformerModel",
        {
            "prediction_length": 3,
            "context_length": 8,
            "lags_sequence": [1, 2],
            "d_model": HIDDEN,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "num_time_features": 2,
            "scaling": None,
            "attention_type": "full",
        },
        forecast,
    ),
}
