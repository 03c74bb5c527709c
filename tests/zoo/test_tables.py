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
