"""Per-sample gradients of Hugging Face models, unmodified, against one backward a sample."""

import pytest
import torch
import transformers
from torch import Tensor, nn

import pergrad
from pergrad.errors import PergradError
from pergrad.testing import assert_near
from tests.zoo.architectures import ARCHITECTURES, REPRESENTATIVE
from tests.zoo.batches import LENGTH, VOCABULARY, tokens
from tests.zoo.checking import cases_of, largest_error
from tests.zoo.tiny import TEXT

pytestmark = [
    # What the library itself warns of.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Version v4.12.0 introduces a better way:FutureWarning"),
]
REST = [name for name in ARCHITECTURES if name not in REPRESENTATIVE]


@pytest.mark.parametrize(
    "name", [*REPRESENTATIVE, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)]
)
def test_gradients_are_those_of_the_loop(name: str) -> None:
    architecture = ARCHITECTURES[name]
    for case in cases_of(architecture):
        try:
            if architecture.refusal and case.batch > 1:
                with pytest.raises(PergradError, match=architecture.refusal):
                    largest_error(architecture, case)
            else:
                largest_error(architecture, case)
        except Exception as error:
            error.add_note(f"in the case: {case}")
            raise


def test_layers_that_run_a_backward_of_their_own_are_recorded() -> None:
    """Reformer's reversible layers: their inputs are computed again in the backward, and never kept."""
    config = transformers.ReformerConfig(
        **TEXT,
        is_decoder=True,
        axial_pos_embds=False,
        attn_layers=["local", "local"],
        attention_head_size=4,
        local_attn_chunk_length=LENGTH,
        feed_forward_size=32,
        hidden_dropout_prob=0.0,
        local_attention_probs_dropout_prob=0.0,
    )
    model = transformers.ReformerModelWithLMHead(config).double().train()
    words, cotangent = tokens(3)["input_ids"], torch.randn(3, LENGTH, VOCABULARY).double()

    def loss_fn(model: nn.Module, words: Tensor, cotangent: Tensor) -> Tensor:
        return (model(words).logits * cotangent).flatten(1).sum(1)

    found = pergrad.grads(model, loss_fn, words, cotangent)
    for n in range(3):
        model.zero_grad()
        loss_fn(model, words[n : n + 1], cotangent[n : n + 1]).sum().backward()
        for name, p in model.named_parameters():
            expected = torch.zeros_like(p) if p.grad is None else p.grad
            assert_near(found[name][n], expected, name)


def test_the_zoo_has_sixty_architectures() -> None:
    assert len({a.model for a in ARCHITECTURES.values() if not a.refusal}) >= 60
