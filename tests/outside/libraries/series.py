"""speechbrain, pytorch-forecasting, braindecode: models of speech, of time series and of EEG."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.outside.case import Library, Subject, noise, of

speechbrain = Library("speechbrain")
_LOBES = "lobes.models"
speechbrain.add(
    "ECAPA_TDNN",
    lambda b: of(
        speechbrain(f"{_LOBES}.ECAPA_TDNN.ECAPA_TDNN")(
            8,
            channels=[8, 8, 8, 8, 24],
            lin_neurons=8,
            attention_channels=4,
            res2net_scale=2,
            se_channels=4,
        ),
        noise(b, 20, 8),
    ),
)
speechbrain.add(
    "CRDNN",
    lambda b: of(
        speechbrain(f"{_LOBES}.CRDNN.CRDNN")(
            input_shape=[None, 20, 8],
            cnn_blocks=1,
            cnn_channels=[4],
            rnn_layers=1,
            rnn_neurons=8,
            dnn_blocks=1,
            dnn_neurons=8,
            dropout=0.0,
        ),
        noise(b, 20, 8),
    ),
)
speechbrain.add(
    "ConformerEncoder",
    lambda b: of(
        speechbrain(f"{_LOBES}.transformer.Conformer.ConformerEncoder")(
            1, 16, 32, 2, kernel_size=5
        ),
        noise(b, 10, 16),
        call=_with_positions,
    ),
)
speechbrain.add(
    "TransformerEncoder",
    lambda b: of(
        speechbrain(f"{_LOBES}.transformer.Transformer.TransformerEncoder")(2, 2, 32, d_model=16),
        noise(b, 10, 16),
        call=lambda m, x: m(x)[0],
    ),
)
speechbrain.add(
    "LiGRU",
    lambda b: of(
        speechbrain("nnet.RNN.LiGRU")(8, input_shape=[None, 10, 8], normalization="layernorm"),
        noise(b, 10, 8),
        call=lambda m, x: m(x)[0],
    ),
)


def _with_positions(model: nn.Module, x: Tensor) -> Tensor:
    return model(x, pos_embs=torch.zeros(1, 2 * x.shape[1] - 1, x.shape[2]) + 0.1)[0]


forecasting = Library("pytorch-forecasting")
_PARTS = "models.temporal_fusion_transformer.sub_modules"
for name, config, inputs in (
    ("GatedLinearUnit", {"input_size": 8}, (5, 8)),
    ("GateAddNorm", {"input_size": 8}, (5, 8)),
    (
        "GatedResidualNetwork",
        {"input_size": 8, "hidden_size": 8, "output_size": 8, "dropout": 0.0},
        (5, 8),
    ),
):

    def _build(b: int, name: str = name, config: Any = config, inputs: Any = inputs) -> Subject:
        args = [noise(b, *inputs)] * (2 if name == "GateAddNorm" else 1)
        return of(forecasting(f"{_PARTS}.{name}")(**config), *args)

    forecasting.add(name, _build)
forecasting.add(
    "InterpretableMultiHeadAttention",
    lambda b: of(
        forecasting(f"{_PARTS}.InterpretableMultiHeadAttention")(n_head=2, d_model=8, dropout=0.0),
        noise(b, 5, 8),
        call=lambda m, x: m(x, x, x)[0],
    ),
)
forecasting.add(
    "NBEATS, generic block",
    lambda b: of(
        forecasting("models.nbeats.sub_modules.NBEATSGenericBlock")(
            units=8, thetas_dim=4, num_block_layers=2, backcast_length=10, forecast_length=4
        ),
        noise(b, 10),
    ),
)
forecasting.add(
    "NBEATS, seasonal block",
    lambda b: of(
        forecasting("models.nbeats.sub_modules.NBEATSSeasonalBlock")(
            units=8, num_block_layers=2, backcast_length=10, forecast_length=4
        ),
        noise(b, 10),
    ),
)
forecasting.add(
    "NBEATS, trend block",
    lambda b: of(
        forecasting("models.nbeats.sub_modules.NBEATSTrendBlock")(
            units=8, thetas_dim=3, num_block_layers=2, backcast_length=10, forecast_length=4
        ),
        noise(b, 10),
    ),
)

braindecode = Library("braindecode")
_SIGNAL = {"n_chans": 4, "n_outputs": 3, "n_times": 256, "sfreq": 128}


def _add(name: str, label: str = "", train: bool = False, meets: str = "", **config: Any) -> None:
    given = {**_SIGNAL, **config}
    braindecode.add(
        label or name,
        lambda b: of(
            braindecode(f"models.{name}")(**given),
            noise(b, given["n_chans"], given["n_times"]),
            train=train,
        ),
        meets=meets,
    )


for name in (
    "ATCNet AttentionBaseNet ContraWR CTNet Deep4Net EEGConformer EEGInceptionERP EEGITNet"
    " EEGMiner EEGNet EEGNeX EEGSimpleConv EEGTCNet FBCNet FBLightConvNet FBMSNet IFNet MSVTNet"
    " PBT SCCNet ShallowFBCSPNet SignalJEPA_PostLocal SignalJEPA_PreLocal SincShallowNet SSTDPN"
    " SleepStagerChambon2018 SPARCNet SyncNet BDTCN TCFormer TIDNet TSception"
).split():
    _add(name)
_add(
    "ShallowFBCSPNet",
    "ShallowFBCSPNet, training mode",
    train=True,
    meets="batch norm",
    drop_prob=0.0,
)
braindecode.add_timed(
    "EEGNet, 22 channels",
    lambda b: of(
        braindecode("models.EEGNet")(n_chans=22, n_outputs=4, n_times=1000), noise(b, 22, 1000)
    ),
)
braindecode.add_timed(
    "EEGConformer, 22 channels",
    lambda b: of(
        braindecode("models.EEGConformer")(n_chans=22, n_outputs=4, n_times=500), noise(b, 22, 500)
    ),
)

speechbrain.add_timed(
    "ECAPA_TDNN, 100 frames",
    lambda b: of(
        speechbrain(f"{_LOBES}.ECAPA_TDNN.ECAPA_TDNN")(
            40, channels=[64, 64, 64, 64, 192], lin_neurons=64, attention_channels=16
        ),
        noise(b, 100, 40),
    ),
)
