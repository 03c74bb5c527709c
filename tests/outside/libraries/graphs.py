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
    return _on_batch(model, [_graph(n) for n in range(count)])


def _on_batch(model: nn.Module, graphs: list[Any]) -> Subject:
    cotangents = noise(len(graphs), 3)

    def packed(chosen: list[int]) -> tuple[Any, ...]:
        data = geometric("data.Batch").from_data_list([graphs[n] for n in chosen])
        return data, cotangents[chosen]

    def loss_fn(model: nn.Module, data: Any, cotangents: Tensor) -> Tensor:
        return (model(data) * cotangents).sum(1)

    return Subject(model, loss_fn, packed(list(range(len(graphs)))), alone=lambda n: packed([n]))


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


# -- layers that take more than nodes and edges, on batches of graphs


class _Richer(nn.Module):
    """One layer between two linear maps; `call` says what the layer takes, and whether it pools."""

    def __init__(self, layer: nn.Module, call: Callable[..., Any], width: int) -> None:
        super().__init__()
        self.before, self.layer, self.call = nn.Linear(4, 8), layer, call
        self.head = nn.Linear(width, 3)

    def forward(self, data: Any) -> Tensor:
        x, ids = self.call(self.layer, torch.tanh(self.before(data.x)), data), data.batch
        if isinstance(x, tuple):
            x, ids = x
        if ids is not None:
            x = geometric("nn.global_add_pool")(x, ids, size=data.num_graphs)
        return self.head(torch.tanh(x))


def _rich_graph(n: int) -> Any:
    made = _graph(n)
    edges = made.edge_index.shape[1]
    made.edge_attr, made.pos = noise(edges, 3), noise(len(made.x), 3)
    made.edge_type, made.kind = torch.arange(edges) % 2, torch.arange(len(made.x)) % 2
    return made


def _richer(
    name: str,
    made: Callable[[], nn.Module],
    call: Callable[..., Any],
    width: int = 8,
) -> None:
    def subject(count: int) -> Subject:
        model = prepared(_Richer(made(), call, width))
        return _on_batch(model, [_rich_graph(n) for n in range(count)])

    geometric.add(f"{name} on a Batch", subject)


def _layer(name: str, *args: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: geometric(f"nn.{name}")(*args, **options)


def _given(*names: str) -> Callable[[nn.Module, Tensor, Any], Any]:
    """Calls a layer with its rows and these parts of the batch."""
    return lambda layer, x, data: layer(x, *(data[name] for name in names))


_BY_EDGES = _given("edge_index")
_BY_ATTRIBUTES = _given("edge_index", "edge_attr")
_BY_TYPES = _given("edge_index", "edge_type")
_BY_GRAPHS = _given("batch")
_BY_POSITIONS = _given("pos", "edge_index")
_BY_ALL = _given("edge_index", "batch")


def _aggregated(layer: nn.Module, x: Tensor, data: Any) -> Any:
    return layer(x, data.batch), None


_DEGREES = torch.tensor([0, 0, 6, 4])
for name, args in {
    "FiLMConv": (8, 8),
    "GatedGraphConv": (8, 2),
    "GENConv": (8, 8),
    "EGConv": (8, 8),
    "AGNNConv": (),
    "APPNP": (2, 0.1),
    "FeaStConv": (8, 8),
    "SuperGATConv": (8, 8),
    "HypergraphConv": (8, 8),
    "MFConv": (8, 8),
    "LGConv": (),
    "AntiSymmetricConv": (8,),
}.items():
    _richer(name, _layer(name, *args), _BY_EDGES)
_richer("CGConv", _layer("CGConv", 8, 3), _BY_ATTRIBUTES)
_richer("GMMConv", _layer("GMMConv", 8, 8, 3, 2), _BY_ATTRIBUTES)
_richer("PDNConv", _layer("PDNConv", 8, 8, 3, 4), _BY_ATTRIBUTES)
_richer(
    "NNConv",
    lambda: geometric("nn.NNConv")(8, 8, nn.Sequential(nn.Linear(3, 64), nn.Tanh())),
    _BY_ATTRIBUTES,
)
_richer(
    "PNAConv",
    lambda: geometric("nn.PNAConv")(
        8, 8, ["mean", "max", "std"], ["identity", "amplification"], _DEGREES, edge_dim=3
    ),
    _BY_ATTRIBUTES,
)
_richer("RGCNConv", _layer("RGCNConv", 8, 8, 2), _BY_TYPES)
_richer("RGCNConv, bases", _layer("RGCNConv", 8, 8, 2, num_bases=2), _BY_TYPES)
_richer("RGCNConv, blocks", _layer("RGCNConv", 8, 8, 2, num_blocks=4), _BY_TYPES)
_richer("RGATConv", _layer("RGATConv", 8, 8, 2), _BY_TYPES)
_richer(
    "HEATConv",
    _layer("HEATConv", 8, 8, 2, 2, 4, 3, 4),
    lambda layer, x, data: layer(x, data.edge_index, data.kind, data.edge_type, data.edge_attr),
)
_richer(
    "PointNetConv",
    lambda: geometric("nn.PointNetConv")(nn.Linear(11, 8), nn.Linear(8, 8)),
    _BY_POSITIONS,
)
_richer("PointTransformerConv", _layer("PointTransformerConv", 8, 8), _BY_POSITIONS)
_richer(
    "GPSConv",
    lambda: geometric("nn.GPSConv")(8, geometric("nn.SAGEConv")(8, 8), heads=2, norm=None),
    _BY_ALL,
)
_richer("GraphUNet", _layer("GraphUNet", 8, 8, 8, 1), _BY_ALL)
_richer(
    "AttentiveFP",
    _layer("AttentiveFP", 8, 8, 8, 3, 2, 2),
    lambda layer, x, data: (layer(x, data.edge_index, data.edge_attr, data.batch), None),
)
for name in ("GraphNorm", "InstanceNorm", "LayerNorm"):
    _richer(name, _layer(name, 8), _BY_GRAPHS)
for name in ("TopKPooling", "SAGPooling", "ASAPooling"):
    _richer(
        name,
        _layer(name, 8, 0.5),
        lambda layer, x, data: layer(x, data.edge_index, batch=data.batch)[0:4:3],
    )
_richer(
    "MemPooling",
    _layer("MemPooling", 8, 8, 2, 3),
    lambda layer, x, data: (layer(x, data.batch)[0].sum(1), None),
)
_richer("Set2Set", _layer("Set2Set", 8, 2), _aggregated, 16)
_richer("SoftmaxAggregation", _layer("SoftmaxAggregation", learn=True), _aggregated)
_richer("StdAggregation", _layer("StdAggregation"), _aggregated)
_richer("SortAggregation", _layer("SortAggregation", 2), _aggregated, 16)
_richer("SetTransformerAggregation", _layer("SetTransformerAggregation", 8, heads=2), _aggregated)
_richer(
    "GraphMultisetTransformer", _layer("GraphMultisetTransformer", 8, k=3, heads=2), _aggregated
)
