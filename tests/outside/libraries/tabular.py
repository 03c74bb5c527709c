"""Models of tables: rtdl, tabm, TabNet and the tabular transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.outside.case import Library, noise, of

rtdl = Library("rtdl_revisiting_models")
rtdl.add(
    "MLP",
    lambda b: of(rtdl("MLP")(d_in=8, d_out=3, n_blocks=2, d_block=16, dropout=0.0), noise(b, 8)),
)
rtdl.add(
    "ResNet",
    lambda b: of(
        rtdl("ResNet")(
            d_in=8,
            d_out=3,
            n_blocks=2,
            d_block=16,
            d_hidden=None,
            d_hidden_multiplier=2.0,
            dropout1=0.0,
            dropout2=0.0,
        ),
        noise(b, 8),
    ),
)
rtdl.add(
    "ResNet, training mode",
    lambda b: of(
        rtdl("ResNet")(
            d_in=8,
            d_out=3,
            n_blocks=2,
            d_block=16,
            d_hidden=None,
            d_hidden_multiplier=2.0,
            dropout1=0.0,
            dropout2=0.0,
        ),
        noise(b, 8),
        train=True,
    ),
    meets="batch norm",
)


def _categories(batch: int) -> torch.Tensor:
    return torch.stack([torch.randint(0, 3, (batch,)), torch.randint(0, 5, (batch,))], dim=1)


def _ft(**options: Any) -> Any:
    config = rtdl("FTTransformer").get_default_kwargs(n_blocks=2)
    config.update(d_block=16, attention_n_heads=2, **options)
    return rtdl("FTTransformer")(d_out=3, **config)


rtdl.add(
    "FTTransformer",
    lambda b: of(_ft(n_cont_features=4, cat_cardinalities=[3, 5]), noise(b, 4), _categories(b)),
)
rtdl.add(
    "FTTransformer, numbers only",
    lambda b: of(_ft(n_cont_features=4, cat_cardinalities=[]), noise(b, 4), None),
)
rtdl.add("LinearEmbeddings", lambda b: of(rtdl("LinearEmbeddings")(4, 8), noise(b, 4)))
rtdl.add(
    "CategoricalEmbeddings", lambda b: of(rtdl("CategoricalEmbeddings")([3, 5], 8), _categories(b))
)
rtdl.add_timed(
    "MLP, wide",
    lambda b: of(
        rtdl("MLP")(d_in=64, d_out=3, n_blocks=4, d_block=1024, dropout=0.0), noise(b, 64)
    ),
)

numbers = Library("rtdl_num_embeddings")
_BINS = [torch.linspace(-3.0, 3.0, count) for count in (4, 5, 6)]


def _bins() -> list[torch.Tensor]:
    return [bins.to(torch.get_default_dtype()) for bins in _BINS]


numbers.add("LinearEmbeddings", lambda b: of(numbers("LinearEmbeddings")(3, 8), noise(b, 3)))
numbers.add(
    "LinearReLUEmbeddings", lambda b: of(numbers("LinearReLUEmbeddings")(3, 8), noise(b, 3))
)
numbers.add(
    "PeriodicEmbeddings", lambda b: of(numbers("PeriodicEmbeddings")(3, 8, lite=False), noise(b, 3))
)
numbers.add(
    "PeriodicEmbeddings, lite",
    lambda b: of(numbers("PeriodicEmbeddings")(3, 8, lite=True), noise(b, 3)),
)
for version in ("A", "B"):
    numbers.add(
        f"PiecewiseLinearEmbeddings {version}",
        lambda b, version=version: of(
            numbers("PiecewiseLinearEmbeddings")(_bins(), 8, activation=False, version=version),
            noise(b, 3),
        ),
    )

tabm = Library("tabm")
for kind in ("tabm", "tabm-mini", "tabm-packed"):
    tabm.add(
        f"TabM, {kind}",
        lambda b, kind=kind: of(
            tabm("TabM").make(
                n_num_features=4, d_out=3, n_blocks=2, d_block=16, k=4, dropout=0.0, arch_type=kind
            ),
            noise(b, 4),
        ),
    )
tabm.add(
    "TabM, categories",
    lambda b: of(
        tabm("TabM").make(
            n_num_features=4,
            cat_cardinalities=[3, 5],
            d_out=3,
            n_blocks=2,
            d_block=16,
            k=4,
            dropout=0.0,
        ),
        noise(b, 4),
        _categories(b),
    ),
)
tabm.add(
    "TabM, periodic embeddings",
    lambda b: of(
        tabm("TabM").make(
            n_num_features=3,
            num_embeddings=numbers("PeriodicEmbeddings")(3, 4, lite=False),
            d_out=3,
            n_blocks=2,
            d_block=16,
            k=4,
            dropout=0.0,
        ),
        noise(b, 3),
    ),
)
tabm.add(
    "LinearBatchEnsemble",
    lambda b: of(tabm("LinearBatchEnsemble")(8, 6, k=4, scaling_init="normal"), noise(b, 4, 8)),
)
tabm.add("LinearEnsemble", lambda b: of(tabm("LinearEnsemble")(8, 6, k=4), noise(b, 4, 8)))
tabm.add(
    "ElementwiseAffine",
    lambda b: of(
        tabm("ElementwiseAffine")((4, 8), bias=True, scaling_init="normal"), noise(b, 4, 8)
    ),
)
tabm.add_timed(
    "TabM, wide",
    lambda b: of(
        tabm("TabM").make(n_num_features=32, d_out=3, n_blocks=3, d_block=1024, k=32, dropout=0.0),
        noise(b, 32),
    ),
)

tab_transformer = Library("tab-transformer-pytorch")
_TABLE = {
    "categories": (3, 5),
    "num_continuous": 4,
    "dim": 16,
    "dim_out": 3,
    "depth": 2,
    "heads": 2,
}
tab_transformer.add(
    "TabTransformer",
    lambda b: of(
        tab_transformer("TabTransformer")(**_TABLE, mlp_act=nn.ReLU()), _categories(b), noise(b, 4)
    ),
)
tab_transformer.add(
    "FTTransformer",
    lambda b: of(tab_transformer("FTTransformer")(**_TABLE), _categories(b), noise(b, 4)),
)
tab_transformer.add(
    "FTTransformer, hyper-connections",
    lambda b: of(
        tab_transformer("FTTransformer")(**_TABLE, num_residual_streams=2),
        _categories(b),
        noise(b, 4),
    ),
)

tabnet = Library("pytorch-tabnet")


def _tabnet(kind: str) -> Any:
    config: dict[str, Any] = {"n_d": 4, "n_a": 4, "n_steps": 2, "n_independent": 1, "n_shared": 1}
    if kind == "TabNetPretraining":
        return tabnet("tab_network.TabNetPretraining")(
            6, **config, group_attention_matrix=torch.eye(6)
        )
    return tabnet("tab_network.TabNet")(6, 3, **config, group_attention_matrix=torch.eye(6))


tabnet.add("TabNet", lambda b: of(_tabnet("TabNet"), noise(b, 6), call=lambda m, x: m(x)[0]))
tabnet.add(
    "TabNet, training mode",
    lambda b: of(_tabnet("TabNet"), noise(b, 6), call=lambda m, x: m(x)[0], train=True),
    meets="ghost batch norm",
)
