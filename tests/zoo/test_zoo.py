"""Per-sample gradients of Hugging Face models, unmodified, against one backward a sample."""

from collections.abc import Callable
from typing import Any

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
from tests.zoo.comparing import WrongGradientsError, compare_rounded
from tests.zoo.conditions import CONDITIONS, Condition, InapplicableError
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


# One for each thing that only some models do under these.
_UNDER_CONDITIONS = (
    "GPT-2",
    "Gemma",  # a weight cast to the type that it has
    "Mixtral",
    "RecurrentGemma",  # a function without a rule, run again in the backward
    "BEiT",  # positions that the library keeps from call to call
    "ResNet",  # batch norms in eval mode
    "SegFormer",  # the loop itself is far off under autocast
)


@pytest.mark.parametrize("condition", CONDITIONS[1:])
@pytest.mark.parametrize(
    "name",
    [
        *_UNDER_CONDITIONS,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name, architecture in ARCHITECTURES.items()
            if name not in _UNDER_CONDITIONS
            and not architecture.refusal
            and architecture.reentrant == "right"
        ),
    ],
)
def test_checkpointing_and_autocast_change_no_gradient(name: str, condition: Condition) -> None:
    for case in cases_of(ARCHITECTURES[name], condition):
        try:
            largest_error(ARCHITECTURES[name], case)
        except InapplicableError as reason:
            pytest.skip(str(reason))


def _traced(
    model: nn.Module, loss_fn: Callable[..., Tensor], *batch: Any, **options: Any
) -> dict[str, Tensor]:
    """The gradients of a step that was traced, where it can be."""
    grads = pergrad.Grads()
    step = pergrad.compiled(model, loss_fn, grads, backend="eager", **options)
    try:
        for _ in range(3):
            step(*batch)
    except UserWarning as reason:
        raise InapplicableError(str(reason)) from reason
    assert step.graphs == 1
    return grads.result


@pytest.mark.parametrize(
    "name",
    [
        *_UNDER_CONDITIONS[:2],
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name, architecture in ARCHITECTURES.items()
            if name not in _UNDER_CONDITIONS[:2] and not architecture.refusal
        ),
    ],
)
def test_a_step_that_is_traced_gives_the_same_gradients(name: str) -> None:
    case, *_ = cases_of(ARCHITECTURES[name], "plain")
    try:  # a constant of DeBERTa's is traced as it is, in float32
        largest_error(ARCHITECTURES[name], case, grads=_traced, tolerance=1e-6)
    except InapplicableError as reason:  # mixtures of experts, and others that look at values
        pytest.skip(str(reason))


def test_a_weight_that_leaves_a_reentrant_checkpoint_is_refused() -> None:
    for case in cases_of(ARCHITECTURES["T5"], "reentrant"):
        with pytest.raises(PergradError, match="use_reentrant=False"):
            largest_error(ARCHITECTURES["T5"], case)


def test_the_comparison_under_autocast_notices_wrong_answers() -> None:
    torch.manual_seed(0)
    exact = {"w": torch.randn(5, 4, 4), "b": torch.randn(5, 4)}
    loop = {name: g + 0.02 * torch.randn_like(g) for name, g in exact.items()}
    found = {name: g + 0.02 * torch.randn_like(g) for name, g in exact.items()}
    ordinary = {name: g.sum(0) for name, g in found.items()}
    assert compare_rounded(found, loop, exact, ordinary) < 0.1
    for wrong in (
        {"w": found["w"].roll(1, 0), "b": found["b"]},
        {"w": found["w"], "b": 1.3 * found["b"]},
        {"w": found["w"], "b": found["b"].mean(0, keepdim=True).expand(5, 4)},
        {"w": torch.full_like(found["w"], torch.nan), "b": found["b"]},
    ):
        with pytest.raises(WrongGradientsError):
            compare_rounded(wrong, loop, exact, ordinary)


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
