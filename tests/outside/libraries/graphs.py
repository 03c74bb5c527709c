"""torch_geometric: convolutions of one graph for all samples, dense layers, and batches of graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.outside.case import Library, Subject, noise, of, prepared

geometric = Library("torch_geometric")
_NODES = 6
_EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2, 4, 1], [1, 2, 3, 4, 5, 0, 3, 5, 1, 4]])


class _OneGraph(nn.Module):
    """A convolution over nodes (B, N, F) of samples that share their edges."""

    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        self.before, self.convolution = nn.Linear(4, 8), convolution

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(torch.tanh(self.before(x)), _EDGES)


def _shared(name: str, *args: Any, **options: Any) -> None:
    geometric.add(
        f"{name}, one graph for all samples",
        lambda b: of(_OneGraph(geometric(f"nn.{name}")(*args, **options)), noise(b, _NODES, 4)),
    )


for name in "GCNConv SAGEConv GraphConv LEConv ClusterGCNConv".split():
    _shared(name, 8, 5)
_shared("ChebConv", 8, 5, K=3)
_shared("TAGConv", 8, 5, K=2)
_shared("SGConv", 8, 5, K=2)
_shared("ARMAConv", 8, 5, num_stacks=2, num_layers=2)
_shared("SSGConv", 8, 5, alpha=0.1, K=2)
_shared("MixHopConv", 8, 5, powers=[0, 1, 2])


class _Perceptron(_OneGraph):
    """Convolutions that apply a network of their own."""

    def __init__(self, name: str) -> None:
        mlp = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))
        super().__init__(geometric(f"nn.{name}")(mlp))


geometric.add(
    "GINConv, one graph for all samples", lambda b: of(_Perceptron("GINConv"), noise(b, _NODES, 4))
)


class _Dense(nn.Module):
    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        self.before, self.convolution = nn.Linear(4, 8), convolution

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return self.convolution(torch.tanh(self.before(x)), adjacency)


def _adjacency(batch: int) -> Tensor:
    found = (torch.rand(batch, _NODES, _NODES) < 0.5).to(torch.get_default_dtype())
    return ((found + found.mT) > 0).to(found.dtype)


def _dense(name: str, *args: Any, **options: Any) -> None:
    geometric.add(
        name,
        lambda b: of(
            _Dense(geometric(f"nn.{name}")(*args, **options)), noise(b, _NODES, 4), _adjacency(b)
        ),
    )


for name in ("DenseGCNConv", "DenseSAGEConv", "DenseGraphConv"):
    _dense(name, 8, 5)
_dense("DenseGATConv", 8, 5, heads=2)
geometric.add(
    "DenseGINConv",
    lambda b: of(
        _Dense(geometric("nn.DenseGINConv")(nn.Linear(8, 5))), noise(b, _NODES, 4), _adjacency(b)
    ),
)


class _Pooled(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.assign, self.embed = nn.Linear(4, 3), nn.Linear(4, 8)
        self.kind = kind

    def forward(self, x: Tensor, adjacency: Tensor) -> Any:
        pool = geometric(f"nn.{self.kind}")
        return pool(torch.tanh(self.embed(x)), adjacency, self.assign(x))[:2]


for kind in ("dense_diff_pool", "dense_mincut_pool"):
    geometric.add(kind, lambda b, kind=kind: of(_Pooled(kind), noise(b, _NODES, 4), _adjacency(b)))
geometric.add("MLP", lambda b: of(geometric("nn.MLP")([4, 8, 5], norm=None), noise(b, 4)))
geometric.add(
    "MLP, batch norm, eval mode", lambda b: of(geometric("nn.MLP")([4, 8, 5]), noise(b, 4))
)
geometric.add(
    "LayerNorm of nodes",
    lambda b: of(
        nn.Sequential(nn.Linear(4, 8), geometric("nn.LayerNorm")(8, mode="node")),
        noise(b, _NODES, 4),
    ),
)
geometric.add(
    "SchNet's expansion",
    lambda b: of(
        nn.Sequential(geometric("nn.models.schnet.GaussianSmearing")(0.0, 5.0, 8), nn.Linear(8, 5)),
        noise(b).abs(),
    ),
)


class _Wide(nn.Module):
    """Three convolutions over a common graph of 200 nodes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        made = geometric(f"nn.{name}")
        self.layers = nn.ModuleList([made(64, 64), made(64, 64), made(64, 64)])
        self.edges = torch.randint(0, 200, (2, 1000))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x, self.edges))
        return x


for name in ("GCNConv", "SAGEConv"):
    geometric.add_timed(
        f"{name}, 200 nodes", lambda b, name=name: of(_Wide(name), noise(b, 200, 64))
    )


# -- batches of graphs of different sizes


class _OfBatches(nn.Module):
    """Two convolutions, a pooling of each graph, and a head, as in the library's own examples."""

    def __init__(self, first: nn.Module, second: nn.Module, pool: str) -> None:
        super().__init__()
        self.first, self.second, self.pool = first, second, pool
        self.head = nn.Linear(8, 3)

    def forward(self, data: Any) -> Tensor:
        x = torch.tanh(self.first(data.x, data.edge_index))
        x = torch.tanh(self.second(x, data.edge_index))
        return self.head(geometric(f"nn.{self.pool}")(x, data.batch, size=data.num_graphs))


def _graph(n: int) -> Any:
    """A ring of four to six nodes."""
    nodes = 4 + n % 3
    ring = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
    return geometric("data.Data")(x=noise(nodes, 4), edge_index=torch.cat([ring, ring.flip(0)], 1))


def _batched(made: Callable[[int], nn.Module], pool: str, count: int) -> Subject:
    model = prepared(_OfBatches(made(4), made(8), pool))
    graphs, cotangents = [_graph(n) for n in range(count)], noise(count, 3)

    def packed(chosen: list[int]) -> tuple[Any, ...]:
        data = geometric("data.Batch").from_data_list([graphs[n] for n in chosen])
        return data, cotangents[chosen]

    def loss_fn(model: nn.Module, data: Any, cotangents: Tensor) -> Tensor:
        return (model(data) * cotangents).sum(1)

    return Subject(model, loss_fn, packed(list(range(count))), alone=lambda n: packed([n]))


def _perceptron(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 8))


def _of_batches(name: str, pool: str = "global_add_pool", **options: Any) -> None:
    def made(width: int) -> nn.Module:
        kind = geometric(f"nn.{name}")
        if name in ("GINConv", "EdgeConv"):
            return kind(_perceptron(width if name == "GINConv" else 2 * width), **options)
        return kind(width, 8, **options)

    geometric.add(f"{name} on a Batch, {pool}", lambda b: _batched(made, pool, b))


for (
    name
) in "GCNConv SAGEConv GraphConv GATConv GATv2Conv TransformerConv GINConv LEConv TAGConv".split():
    _of_batches(name)
for (
    name
) in "SGConv ChebConv ARMAConv EdgeConv GeneralConv ResGatedGraphConv ClusterGCNConv".split():
    _of_batches(name, **({"K": 2} if name in ("SGConv", "ChebConv") else {}))
for pool in ("global_mean_pool", "global_max_pool"):
    _of_batches("GCNConv", pool)
    _of_batches("GATConv", pool)
