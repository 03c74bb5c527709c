"""nflows and normflows: the likelihood of a sample under a flow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.outside.case import Library, noise, of


def _likelihood(model: nn.Module, x: Tensor) -> Tensor:
    return model.log_prob(x)


nflows = Library("nflows")


def _nflow(name: str, **options: Any) -> nn.Module:
    transforms, flows = nflows("transforms"), nflows("flows")
    made = {
        "affine autoregressive": lambda: transforms.MaskedAffineAutoregressiveTransform(4, 8),
        "spline autoregressive": lambda: (
            transforms.MaskedPiecewiseRationalQuadraticAutoregressiveTransform(
                features=4, hidden_features=8, num_bins=4, tails="linear", tail_bound=3.0
            )
        ),
        "quadratic autoregressive": lambda: (
            transforms.MaskedPiecewiseQuadraticAutoregressiveTransform(
                features=4, hidden_features=8, num_bins=4, tails="linear", tail_bound=3.0
            )
        ),
        "LU": lambda: transforms.LULinear(4),
        "SVD": lambda: transforms.SVDLinear(4, num_householder=2),
        "Householder": lambda: transforms.HouseholderSequence(4, 2),
        "QR": lambda: transforms.QRLinear(4, num_householder=2),
        "naive linear": lambda: transforms.NaiveLinear(4),
        "coupling": lambda: _coupling("AffineCouplingTransform"),
        "additive coupling": lambda: _coupling("AdditiveCouplingTransform"),
        "spline coupling": lambda: _coupling(
            "PiecewiseRationalQuadraticCouplingTransform",
            num_bins=4,
            tails="linear",
            tail_bound=3.0,
        ),
        "leaky ReLU": lambda: transforms.CompositeTransform(
            [transforms.LULinear(4), transforms.LeakyReLU()]
        ),
        "actnorm": lambda: _initialized(
            transforms.CompositeTransform([transforms.ActNorm(4), transforms.LULinear(4)])
        ),
    }[name]
    parts = transforms.CompositeTransform([made(), transforms.ReversePermutation(4), made()])
    return flows.Flow(parts, nflows("distributions").StandardNormal([4]))


def _initialized(transform: nn.Module) -> nn.Module:
    for module in transform.modules():
        if hasattr(module, "initialized"):
            module.initialized = torch.tensor(True)
    return transform


def _coupling(kind: str, **options: Any) -> nn.Module:
    def net(inputs: int, outputs: int) -> nn.Module:
        return nflows("nn.nets").ResidualNet(inputs, outputs, hidden_features=8, num_blocks=1)

    return getattr(nflows("transforms"), kind)(torch.tensor([1, 0, 1, 0]), net, **options)


for name in (
    "affine autoregressive,spline autoregressive,quadratic autoregressive,LU,SVD,Householder,QR,"
    "naive linear,coupling,additive coupling,spline coupling,leaky ReLU,actnorm"
).split(","):
    nflows.add(name, lambda b, name=name: of(_nflow(name), noise(b, 4), call=_likelihood))
for name in ("MaskedAutoregressiveFlow", "SimpleRealNVP"):
    nflows.add(
        name,
        lambda b, name=name: of(nflows(f"flows.{name}")(4, 8, 2, 1), noise(b, 4), call=_likelihood),
    )

normflows = Library("normflows")


def _normflow(name: str) -> nn.Module:
    flows = normflows("flows")
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0])
    made: dict[str, Any] = {
        "Planar": lambda: flows.Planar((4,)),
        "Radial": lambda: flows.Radial((4,)),
        "MaskedAffineFlow": lambda: flows.MaskedAffineFlow(
            mask, normflows("nets").MLP([4, 8, 4]), normflows("nets").MLP([4, 8, 4])
        ),
        "AffineCouplingBlock": lambda: flows.AffineCouplingBlock(normflows("nets").MLP([2, 8, 4])),
        "AutoregressiveRationalQuadraticSpline": lambda: (
            flows.AutoregressiveRationalQuadraticSpline(4, 1, 8, num_bins=4)
        ),
        "CoupledRationalQuadraticSpline": lambda: flows.CoupledRationalQuadraticSpline(
            4, 1, 8, num_bins=4
        ),
        "MaskedAffineAutoregressive": lambda: flows.MaskedAffineAutoregressive(4, 8),
        "LULinearPermute": lambda: flows.LULinearPermute(4),
        "AffineConstFlow": lambda: flows.AffineConstFlow((4,)),
    }
    base = normflows("distributions").base.DiagGaussian(4)
    return normflows("NormalizingFlow")(base, [made[name](), made[name]()])


for name in (
    "MaskedAffineFlow AffineCouplingBlock AutoregressiveRationalQuadraticSpline"
    " CoupledRationalQuadraticSpline MaskedAffineAutoregressive LULinearPermute AffineConstFlow"
).split():
    normflows.add(name, lambda b, name=name: of(_normflow(name), noise(b, 4), call=_likelihood))


def _forward_flow(model: nn.Module, z: Tensor) -> Any:
    return model.forward_and_log_det(z)


for name in ("Planar", "Radial"):
    normflows.add(name, lambda b, name=name: of(_normflow(name), noise(b, 4), call=_forward_flow))

for name, flow in {
    "MaskedAutoregressiveFlow": "MaskedAutoregressiveFlow",
    "SimpleRealNVP": "SimpleRealNVP",
}.items():
    nflows.add_timed(
        f"{name}, 256 units",
        lambda b, flow=flow: of(
            nflows(f"flows.{flow}")(32, 1024, 4, 2), noise(b, 32), call=_likelihood
        ),
    )
