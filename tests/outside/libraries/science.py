"""Operators, differential equations, equivariant networks, splines and kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.outside.case import Library, images, noise, of, words

# -- neural operators

operators = Library("neuraloperator", "neuralop")
_FNO = {"in_channels": 1, "out_channels": 1, "hidden_channels": 8, "n_layers": 2}
operators.add(
    "FNO, 1d", lambda b: of(operators("models.FNO")(n_modes=(4,), **_FNO), noise(b, 1, 16))
)
operators.add(
    "FNO, 2d", lambda b: of(operators("models.FNO")(n_modes=(4, 4), **_FNO), images(b, 8, 1))
)
operators.add(
    "FNO, 3d", lambda b: of(operators("models.FNO")(n_modes=(4, 4, 4), **_FNO), images(b, 8, 1, 3))
)
operators.add(
    "FNO, complex data",
    lambda b: of(
        operators("models.FNO")(n_modes=(4,), **_FNO, complex_data=True),
        torch.complex(noise(b, 1, 16), noise(b, 1, 16)),
    ),
)
operators.add(
    "TFNO",
    lambda b: of(
        operators("models.TFNO")(n_modes=(4, 4), **_FNO, factorization="Tucker", rank=0.5),
        images(b, 8, 1),
    ),
)
operators.add(
    "TFNO, factorized",
    lambda b: of(
        operators("models.TFNO")(
            n_modes=(4, 4), **_FNO, factorization="CP", implementation="factorized", rank=0.5
        ),
        images(b, 8, 1),
    ),
)
operators.add(
    "UNO",
    lambda b: of(
        operators("models.UNO")(
            in_channels=1,
            out_channels=1,
            hidden_channels=8,
            uno_out_channels=[8, 8, 8],
            uno_n_modes=[[4, 4]] * 3,
            uno_scalings=[[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]],
            n_layers=3,
            horizontal_skips_map={2: 0},
            channel_mlp_skip="linear",
        ),
        images(b, 8, 1),
    ),
)
operators.add(
    "ChannelMLP", lambda b: of(operators("layers.channel_mlp.ChannelMLP")(4, 3, 8), noise(b, 4, 8))
)
operators.add(
    "FNO, group norm",
    lambda b: of(
        operators("models.FNO")(n_modes=(4, 4), **_FNO, norm="group_norm"), images(b, 8, 1)
    ),
)
operators.add_timed(
    "FNO, 32 pixels",
    lambda b: of(
        operators("models.FNO")(
            n_modes=(12, 12), in_channels=1, out_channels=1, hidden_channels=32, n_layers=4
        ),
        images(b, 32, 1),
    ),
)

# -- differential equations

ode = Library("torchdiffeq")


class _Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, time: Tensor, y: Tensor) -> Tensor:
        return self.net(y) * torch.cos(time)


class _Flow(nn.Module):
    def __init__(self, method: str, **options: Any) -> None:
        super().__init__()
        self.field, self.method, self.options = _Field(), method, options

    def forward(self, y: Tensor) -> Tensor:
        times = torch.linspace(0.0, 1.0, 3)
        return ode("odeint")(self.field, y, times, method=self.method, **self.options)[-1]


for method in ("euler", "midpoint", "rk4", "heun3", "explicit_adams"):
    ode.add(
        f"odeint, {method}",
        lambda b, method=method: of(_Flow(method, options={"step_size": 0.25}), noise(b, 4)),
    )
ode.add(
    "odeint, dopri5",
    lambda b: of(_Flow("dopri5"), noise(b, 4)),
    meets="the size of a step is chosen by the error of the whole batch",
)


class _Adjoint(_Flow):
    def forward(self, y: Tensor) -> Tensor:
        times = torch.linspace(0.0, 1.0, 3)
        return ode("odeint_adjoint")(
            self.field, y, times, method=self.method, options={"step_size": 0.25}
        )[-1]


ode.add("odeint_adjoint, rk4", lambda b: of(_Adjoint("rk4"), noise(b, 4)))


# -- equivariance

e3nn = Library("e3nn")


def _irreps(name: str, *args: Any, **options: Any) -> Any:
    return e3nn(name)(*args, **options)


_SH = "2x0e + 2x1o"
e3nn.add("o3.Linear", lambda b: of(_irreps("o3.Linear", _SH, _SH), noise(b, 8)))
e3nn.add(
    "o3.FullyConnectedTensorProduct",
    lambda b: of(
        _irreps("o3.FullyConnectedTensorProduct", _SH, "1x0e + 1x1o", _SH), noise(b, 8), noise(b, 4)
    ),
)
e3nn.add(
    "o3.FullTensorProduct and o3.Linear",
    lambda b: of(_irreps("o3.Linear", "2x0e + 2x1o", "1x0e + 1x1o"), noise(b, 8)),
)
e3nn.add(
    "nn.FullyConnectedNet",
    lambda b: of(_irreps("nn.FullyConnectedNet", [4, 8, 5], torch.relu), noise(b, 4)),
)
e3nn.add("nn.BatchNorm, eval mode", lambda b: of(_irreps("nn.BatchNorm", _SH), noise(b, 8)))
e3nn.add(
    "nn.BatchNorm, training mode",
    lambda b: of(_irreps("nn.BatchNorm", _SH), noise(b, 8), train=True),
    meets="batch norm",
)

egnn = Library("egnn-pytorch")
egnn.add("EGNN", lambda b: of(egnn("EGNN")(dim=8, m_dim=8), noise(b, 6, 8), noise(b, 6, 3)))
egnn.add(
    "EGNN, nearest neighbours",
    lambda b: of(
        egnn("EGNN")(dim=8, m_dim=8, num_nearest_neighbors=3, norm_coors=True),
        noise(b, 6, 8),
        noise(b, 6, 3),
    ),
)
egnn.add(
    "EGNN_Network",
    lambda b: of(
        egnn("EGNN_Network")(num_tokens=8, dim=8, depth=2, num_nearest_neighbors=3, m_dim=8),
        words(b, 6, 8),
        noise(b, 6, 3),
    ),
)

points = Library("invariant-point-attention")


def _frames(batch: int) -> dict[str, Tensor]:
    found, _ = torch.linalg.qr(noise(batch, 6, 3, 3))
    return {"rotations": found, "translations": noise(batch, 6, 3)}


points.add(
    "InvariantPointAttention",
    lambda b: of(
        points("InvariantPointAttention")(dim=8, heads=2, require_pairwise_repr=False),
        noise(b, 6, 8),
        **_frames(b),
    ),
)
points.add(
    "IPABlock",
    lambda b: of(
        points("IPABlock")(dim=8, heads=2, require_pairwise_repr=False),
        noise(b, 6, 8),
        **_frames(b),
    ),
)
points.add(
    "InvariantPointAttention, pairs",
    lambda b: of(
        points("InvariantPointAttention")(dim=8, heads=2),
        noise(b, 6, 8),
        pairwise_repr=noise(b, 6, 6, 8),
        **_frames(b),
    ),
)

# -- splines, state spaces, kernels

kan = Library("pykan", "kan")
kan.add(
    "KAN",
    lambda b: of(
        kan("KAN")(
            width=[3, 4, 2], grid=3, k=3, symbolic_enabled=False, auto_save=False, save_act=False
        ),
        noise(b, 3),
        moved=0.0,
    ),
)
kan.add(
    "KAN, symbolic part",
    lambda b: of(
        kan("KAN")(width=[3, 4, 2], grid=3, k=3, auto_save=False, save_act=False),
        noise(b, 3),
        moved=0.0,
    ),
)
kan.add(
    "KANLayer",
    lambda b: of(
        kan("KANLayer")(in_dim=3, out_dim=4),
        noise(b, 3),
        call=lambda m, x: m(x)[0],
        moved=0.0,
    ),
)

mamba = Library("mambapy")
for name, options in {
    "Mamba": {},
    "Mamba, sequential scan": {"pscan": False},
    "Mamba, norms inside": {"inner_layernorms": True},
}.items():
    mamba.add(
        name,
        lambda b, options=options: of(
            mamba("mamba.Mamba")(
                mamba("mamba.MambaConfig")(
                    d_model=8, n_layers=2, d_state=4, expand_factor=2, **options
                )
            ),
            noise(b, 8, 8),
        ),
    )
mamba.add_timed(
    "Mamba, 64 tokens",
    lambda b: of(
        mamba("mamba.Mamba")(mamba("mamba.MambaConfig")(d_model=64, n_layers=2, d_state=8)),
        noise(b, 64, 64),
    ),
)

gpytorch = Library("gpytorch")


class _Features(nn.Module):
    """A kernel between the samples' own points, over learned features; samples are a batch of kernels."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.kernel = gpytorch("kernels.ScaleKernel")(gpytorch(f"kernels.{kernel}")())

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(self.net(x)).to_dense()


for kernel in ("RBFKernel", "MaternKernel", "LinearKernel", "RQKernel", "CosineKernel"):
    gpytorch.add(
        f"{kernel} of features", lambda b, kernel=kernel: of(_Features(kernel), noise(b, 5, 3))
    )


class _Kernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = gpytorch("kernels.RBFKernel")()

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x).to_dense()


gpytorch.add(
    "RBFKernel between samples",
    lambda b: of(_Features("RBFKernel"), noise(b, 3)),
    meets="the kernel is between the samples",
)
