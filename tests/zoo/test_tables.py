"""Traced steps of the zoo sum positions by the rows of small tables without a scatter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.fx import GraphModule

import pergrad
from pergrad.engine.compiling import step as compiling
from pergrad.testing import loop_grads

WORDS, HEADS = 600, 4


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:
    """The graphs that are traced, in order."""
    found: list[GraphModule] = []
    trace_step = compiling.trace_step

    def noted(*args: Any, **kwargs: Any) -> Any:
        trace = trace_step(*args, **kwargs)
        found.append(trace[0])
        return trace

    monkeypatch.setattr(compiling, "trace_step", noted)
    return found


def t5(layers: int) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=16,
        d_kv=4,
        d_ff=16,
        num_layers=layers,
        num_heads=HEADS,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def bert(layers: int) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        intermediate_size=16,
        max_position_embeddings=40,
    )
    return transformers.BertForMaskedLM(config).eval()


def t5_losses(model: nn.Module, words: Tensor) -> Tensor:
    logits = model(input_ids=words, decoder_input_ids=words).logits
    return logits.log_softmax(-1)[..., 0].sum(1)


def bert_losses(model: nn.Module, words: Tensor) -> Tensor:
    logits = model(input_ids=words, token_type_ids=words % 2).logits
    return logits.log_softmax(-1)[..., 0].sum(1)


def scatters(graph: GraphModule) -> Counter[tuple[int, ...]]:
    """Counts scattered sums, by their shapes."""
    names = ("index_add", "index_put", "scatter_add", "row_sums")
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    return Counter(
        tuple(node.meta["val"].shape)
        for node in nodes
        if any(name in str(node.target) for name in names)
    )


@pytest.mark.parametrize("make_quantity", [pergrad.Norms, lambda: pergrad.ClippedSum(1.0)])
@pytest.mark.parametrize(("build", "losses"), [(t5, t5_losses), (bert, bert_losses)])
def test_layers_that_look_up_a_small_table_scatter_nothing(
    build: Any, losses: Any, make_quantity: Any, graphs: list[GraphModule]
) -> None:
    words = torch.randint(5, WORDS, (3, 40))
    for layers in (1, 3):
        torch.manual_seed(0)
        model = build(layers)
        step = pergrad.compiled(model, losses, make_quantity(), backend="eager")
        step(words)
        step(words)
        assert step.graphs == 1
    few, many = (scatters(graph) for graph in graphs)
    assert few == many
    # Words and BERT's positions have many rows; relative positions have 32, and token types two.
    assert all(shape[-2] >= 40 for shape in few)


@pytest.mark.parametrize("size", [1, 3, HEADS])
@pytest.mark.parametrize(("build", "losses"), [(t5, t5_losses), (bert, bert_losses)])
def test_compiled_gradients_of_tables_are_those_of_the_loop(
    build: Any, losses: Any, size: int
) -> None:
    torch.manual_seed(0)
    model = build(2).double()
    grads = pergrad.Grads()
    step = pergrad.compiled(model, losses, grads, backend="eager")
    words = torch.randint(5, WORDS, (size, 20))
    step(words)
    step(words)
    assert step.graphs == 1
    for name, expected in loop_grads(model, losses, words).items():
        torch.testing.assert_close(grads.result[name], expected, rtol=1e-9, atol=1e-12)


class Types(nn.Module):
    """Words of types: the table of types is small, has padding, and is also the head's weight."""

    def __init__(self, is_tied: bool, padding: int | None) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.types = nn.Embedding(3, 4, padding_idx=padding)
        self.head = nn.Linear(4, 3)
        if is_tied:
            self.head.weight = self.types.weight

    def forward(self, words: Tensor, types: Tensor) -> Tensor:
        return self.head((self.words(words) + self.types(types)).tanh()).square().sum((1, 2))


@pytest.mark.parametrize("size", [1, 3, 4, 40])
@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("frozen", ["", "types", "words"])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_tables_of_types_are_those_of_the_loop(
    size: int, padding: int | None, frozen: str, is_tied: bool, is_compiled: bool
) -> None:
    torch.manual_seed(0)
    model = Types(is_tied, padding).double()
    if frozen:
        getattr(model, frozen).requires_grad_(False)
    batch = torch.randint(WORDS, (size, 40)), torch.randint(3, (size, 40))
    expected = loop_grads(model, _called, *batch)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in expected.values()]).norm(dim=0)
    clip = float(norms.median())
    quantities = pergrad.Grads(), pergrad.Norms(), pergrad.ClippedSum(clip)
    step = pergrad.compiled(model, _called, *quantities, backend="eager")
    for _ in range(1 + is_compiled):
        step(*batch)
    grads, found, clipped = quantities
    torch.testing.assert_close(found.result.double(), norms, rtol=1e-6, atol=0)
    weights = (clip / norms).clamp(max=1)
    for name, g in expected.items():
        torch.testing.assert_close(grads.result[name], g, rtol=1e-9, atol=1e-12)
        total = torch.einsum("n,n...->...", weights, g)
        torch.testing.assert_close(clipped.result[name], total, rtol=1e-5, atol=1e-6)


def _called(model: nn.Module, *batch: Tensor) -> Tensor:
    found: Tensor = model(*batch)
    return found
