"""Batches whose samples have several rows: graphs, packed sequences, pairs, images of different sizes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch_geometric scripts functions when it is imported
    import torch_geometric.nn as gnn
    from torch_geometric.data import Batch, Data

D = 4


@dataclass
class Ragged:
    """A model, its loss, a batch with the owners of its rows, and each sample alone."""

    model: nn.Module
    loss: Callable[..., Tensor]
    batch: tuple[Any, ...]
    alone: list[tuple[Any, ...]]
    options: dict[str, Any] = field(default_factory=dict)

    def loop(self) -> dict[str, Tensor]:
        named = dict(self.model.named_parameters())
        rows = [
            torch.autograd.grad(
                self.loss(self.model, *sample).sum(), list(named.values()), allow_unused=True
            )
            for sample in self.alone
        ]
        return {
            name: torch.stack([torch.zeros_like(p) if r[k] is None else r[k] for r in rows])
            for k, (name, p) in enumerate(named.items())
        }


# -- graphs


class GraphNet(nn.Module):
    def __init__(self, conv: Callable[[int, int], nn.Module], pool: Any, edges: bool) -> None:
        super().__init__()
        self.first, self.second = conv(D, 6), conv(6, 6)
        self.head = nn.Linear(6, 1)
        self.pool, self.edges = pool, edges

    def forward(self, x: Tensor, edge_index: Tensor, ids: Tensor, edge_attr: Tensor) -> Tensor:
        given = (edge_attr,) if self.edges else ()
        hidden = torch.tanh(self.first(x, edge_index, *given))
        return self.head(self.pool(self.second(hidden, edge_index, *given), ids)).squeeze(1)


def _mlp(i: int, o: int) -> nn.Module:
    return nn.Sequential(nn.Linear(i, o), nn.Tanh(), nn.Linear(o, o))


class Blocks(gnn.RGCNConv):
    """A stack of matrices for each of two relations, which the first feature of an edge tells."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__(i, o, 2, num_blocks=2)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return super().forward(x, edge_index, (edge_attr[:, 0] > 0).long())  # type: ignore[no-any-return]


CONVOLUTIONS: dict[str, tuple[Callable[[int, int], nn.Module], Any, bool]] = {
    "GIN": (lambda i, o: gnn.GINConv(_mlp(i, o)), gnn.global_add_pool, False),
    "GINE": (lambda i, o: gnn.GINEConv(_mlp(i, o), edge_dim=2), gnn.global_mean_pool, True),
    "GCN": (gnn.GCNConv, gnn.global_max_pool, False),
    "GAT": (lambda i, o: gnn.GATConv(i, o, heads=2, concat=False), gnn.global_add_pool, False),
    "GATv2": (lambda i, o: gnn.GATv2Conv(i, o, edge_dim=2), gnn.global_add_pool, True),
    "attention pool": (
        gnn.SAGEConv,
        gnn.AttentionalAggregation(nn.Linear(6, 1, bias=False)),
        False,
    ),
    "blocks": (Blocks, gnn.global_add_pool, True),
    "gated edges": (lambda i, o: gnn.PDNConv(i, o, 2, 3), gnn.global_add_pool, True),
    "degrees": (lambda i, o: gnn.MFConv(i, o, max_degree=3), gnn.global_add_pool, False),
    "padded": (gnn.SAGEConv, gnn.SetTransformerAggregation(6, heads=2), False),
}


def graphs() -> list[Data]:
    """Graphs of different sizes; some nodes have no edge."""
    made = []
    for nodes, edges in [(3, 5), (5, 3), (2, 2), (4, 6)]:
        made.append(
            Data(
                x=torch.randn(nodes, D).double(),
                edge_index=torch.randint(0, nodes, (2, edges)),
                edge_attr=torch.randn(edges, 2).double(),
                y=torch.randn(1).double(),
            )
        )
    return made


def graph_loss(model: nn.Module, data: Any) -> Tensor:
    return (model(data.x, data.edge_index, data.batch, data.edge_attr) - data.y).square()


def _apart(
    model: nn.Module, x: Tensor, edge_index: Tensor, ids: Tensor, edge_attr: Tensor, y: Tensor
) -> Tensor:
    return (model(x, edge_index, ids, edge_attr) - y).square()


def graph_batch(name: str) -> Ragged:
    """A `Batch`, as it is."""
    made = graphs()
    return Ragged(
        GraphNet(*CONVOLUTIONS[name]).double(),
        graph_loss,
        (Batch.from_data_list(made),),
        [(Batch.from_data_list([g]),) for g in made],
    )


def graph_tensors(name: str) -> Ragged:
    """The tensors of a batch of graphs as arguments, with their owners."""
    made = graphs()
    data: Any = Batch.from_data_list(made)
    singles: list[Any] = [Batch.from_data_list([g]) for g in made]

    def parts(b: Any) -> tuple[Any, ...]:
        return b.x, b.edge_index, b.batch, b.edge_attr, b.y

    edges = data.batch[data.edge_index[0]]
    return Ragged(
        GraphNet(*CONVOLUTIONS[name]).double(),
        _apart,
        parts(data),
        [parts(b) for b in singles],
        {"owners": {"x": data.batch, "edge_attr": edges}},
    )


# -- sequences


LENGTHS = [3, 5, 4]


def _tokens_nll(model: Any, input_ids: Tensor, counted: Tensor, **masks: Tensor) -> Tensor:
    logits = model(input_ids, use_cache=False, **masks).logits[0]
    return F.cross_entropy(logits, input_ids[0].roll(-1), reduction="none") * counted


def _by_positions(model: Any, input_ids: Tensor, counted: Tensor, position_ids: Tensor) -> Tensor:
    return _tokens_nll(model, input_ids, counted, position_ids=position_ids)


def _by_mask(
    model: Any, input_ids: Tensor, counted: Tensor, position_ids: Tensor, attention_mask: Tensor
) -> Tensor:
    masks = {"position_ids": position_ids, "attention_mask": attention_mask}
    return _tokens_nll(model, input_ids, counted, **masks)


def packed_llama(attention: str, masked: str) -> Ragged:
    """Sequences of different lengths in one row; the last token of each predicts nothing."""
    config = LlamaConfig(
        vocab_size=13,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_implementation=attention,
    )
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    tokens = torch.randint(0, 13, (1, len(ids)))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    counted = torch.cat([torch.ones(n).double() for n in LENGTHS])
    counted[torch.tensor(LENGTHS).cumsum(0) - 1] = 0
    is_seen = (ids[:, None] == ids) & (torch.arange(len(ids))[:, None] >= torch.arange(len(ids)))
    block = is_seen[None, None]
    if masked == "float":
        lowest = torch.finfo(torch.float64).min
        block = torch.zeros(block.shape).double().masked_fill(~block, lowest)
    parts: list[tuple[Any, ...]] = [
        (tokens[:, ids == k], counted[ids == k], positions[:, ids == k]) for k in range(3)
    ]
    batch: tuple[Any, ...] = (tokens, counted, positions)
    loss: Callable[..., Tensor] = _by_positions
    if masked != "positions":
        batch, loss = (*batch, block), _by_mask
        parts = [(*part, block[:, :, ids == k][..., ids == k]) for k, part in enumerate(parts)]
    return Ragged(LlamaForCausalLM(config).double(), loss, batch, parts, {"owners": ids})


# -- pairs


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(tokens)).cumsum(1))


def _dpo(model: nn.Module, tokens: Tensor, reference: Tensor) -> Tensor:
    scores = model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])
    chosen, rejected = (scores.sum((1, 2)) - reference).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected))


def preferences() -> Ragged:
    """Chosen answers, and then the rejected ones: two rows make a sample."""
    tokens, reference, n = torch.randint(0, 11, (8, 6)), torch.randn(8).double(), 4
    parts = [(tokens[[k, k + n]], reference[[k, k + n]]) for k in range(n)]
    owners = torch.arange(n).repeat(2)
    return Ragged(Scorer().double(), _dpo, (tokens, reference), parts, {"owners": owners})


# -- images


class Patches(nn.Module):
    """Attends within each image of a list of images of different sizes, all in one sequence."""

    def __init__(self, width: int = 8, size: int = 2) -> None:
        super().__init__()
        self.size = size
        self.embed = nn.Linear(size * size, width)
        self.rows = nn.Parameter(torch.randn(4, width))
        self.columns = nn.Parameter(torch.randn(4, width))
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, 3)

    def forward(self, images: list[Tensor]) -> Tensor:
        tokens, ids = [], []
        for k, image in enumerate(images):
            h, w = image.shape[0] // self.size, image.shape[1] // self.size
            cut = image.reshape(h, self.size, w, self.size).permute(0, 2, 1, 3).reshape(h * w, -1)
            places = (self.rows[:h, None] + self.columns[None, :w]).reshape(h * w, -1)
            tokens.append(self.embed(cut) + places)
            ids += [k] * (h * w)
        x, owner = torch.cat(tokens)[None], torch.tensor(ids)
        q, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mask = (owner[:, None] == owner)[None, None]
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + seen.transpose(1, 2).flatten(2)
        pooled = x.new_zeros(len(images), x.shape[-1]).index_add(0, owner, x[0])
        return self.head(pooled / torch.bincount(owner)[:, None])


def _labels_nll(model: nn.Module, images: list[Tensor], y: Tensor) -> Tensor:
    return F.cross_entropy(model(images), y, reduction="none")


def images() -> Ragged:
    made = [torch.randn(h, w).double() for h, w in [(4, 6), (2, 4), (6, 6), (4, 4)]]
    y = torch.tensor([0, 1, 2, 0])
    alone: list[tuple[Any, ...]] = [([image], y[k : k + 1]) for k, image in enumerate(made)]
    return Ragged(Patches().double(), _labels_nll, (made, y), alone, {"owners": range(4)})


CASES: dict[str, Callable[[], Ragged]] = {
    **{f"{name}, Batch": lambda name=name: graph_batch(name) for name in CONVOLUTIONS},
    **{f"{name}, tensors": lambda name=name: graph_tensors(name) for name in ("GINE", "GAT")},
    "packed, SDPA, positions": lambda: packed_llama("sdpa", "positions"),
    "packed, SDPA, block mask": lambda: packed_llama("sdpa", "bool"),
    "packed, eager, block mask": lambda: packed_llama("eager", "float"),
    "pairs": preferences,
    "images": images,
}
