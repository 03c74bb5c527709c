"""Adapters as the package `peft` makes them, on models of Hugging Face, against the loop over samples."""

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is ever downloaded

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.testing import assert_close

import pergrad
from pergrad.errors import ScopeError
from pergrad.testing import loop_grads
from tests.engine.exactness import assert_all_near, state_of

pytestmark = [
    # What the libraries themselves warn of.
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

LENGTH, VOCABULARY, HIDDEN = 5, 40, 16
SIZES = [LENGTH, 3, 1]  # as large as the sequence is long, and others
TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        **TEXT,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """Its layers are `Conv1D`, with transposed weights; its head is tied to the embedding."""
    config = transformers.GPT2Config(n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=64, **TEXT)
    return transformers.GPT2LMHeadModel(config)


def adapted(base: Callable[[], nn.Module], config: Any) -> nn.Module:
    """With everything that is trainable moved off its initial value, which is often zero."""
    torch.manual_seed(0)
    model = peft.get_peft_model(base().double(), config).double().eval()
    moved(model)
    return model


def moved(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p), alpha=0.1)


def words(size: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (size, LENGTH))


def loss_fn(model: Callable[..., Any], ids: Tensor, **options: Any) -> Tensor:
    logits = model(input_ids=ids, **options).logits
    return (logits.sin() * torch.arange(1, VOCABULARY + 1)).flatten(1).sum(1)


def assert_exact(
    model: nn.Module,
    size: int,
    loss: Callable[..., Tensor] = loss_fn,
    *,
    precision: torch.dtype = torch.float64,
) -> None:
    """By both ways in; for just the trainable parameters, and with nothing left behind."""

    def assert_all_equal(rows: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        assert {of.dtype for of in rows.values()} == {of.dtype for of in expected.values()}
        assert_all_near(*({n: of.to(precision) for n, of in d.items()} for d in (rows, expected)))

    ids = words(size)
    before = state_of(model)
    expected = loop_grads(model, loss, ids)
    assert any(rows.any() for rows in expected.values())
    assert_all_equal(pergrad.grads(model, loss, ids), expected)
    loss(pergrad.call_for_per_sample_grads(model), ids).sum().backward()
    rows = {
        name: p.__dict__.pop("grad_sample")
        for name, p in model.named_parameters()
        if hasattr(p, "grad_sample")
    }
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert expected.keys() == trainable
    assert rows.keys() <= trainable
    unreached = {name: torch.zeros_like(of) for name, of in expected.items()}
    assert_all_equal({**unreached, **rows}, expected)
    assert state_of(model) == before


PROJECTIONS = ["q_proj", "v_proj", "down_proj"]


def lora(targets: Any = PROJECTIONS, **options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=targets, **options
    )


def of(kind: str, targets: Any = PROJECTIONS, **options: Any) -> peft.PeftConfig:
    return getattr(peft, kind)(task_type="CAUSAL_LM", target_modules=targets, **options)


def virtual_tokens(kind: str, count: int, **options: Any) -> peft.PeftConfig:
    return getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=count, **options)


CONFIGS: dict[str, tuple[Callable[[], nn.Module], Callable[[], peft.PeftConfig]]] = {
    "LoRA": (llama, lora),
    "LoRA on all layers": (llama, lambda: lora("all-linear")),
    "LoRA with a bias": (llama, lambda: lora(lora_bias=True)),
    "LoRA on GPT-2": (gpt2, lambda: lora(["c_attn", "c_proj"], fan_in_fan_out=True)),
    "LoRA and the base's biases": (
        gpt2,
        lambda: lora(["c_attn"], fan_in_fan_out=True, bias="all"),
    ),
    "LoRA on the embedding": (llama, lambda: lora(["embed_tokens", "q_proj"])),
    "LoRA on the tied embedding": (gpt2, lambda: lora(["wte", "c_attn"], fan_in_fan_out=True)),
    "LoRA on the head": (llama, lambda: lora(["lm_head"])),
    "LoRA on a parameter": (llama, lambda: lora([], target_parameters=["mlp.down_proj.weight"])),
    "LoRA and saved modules": (llama, lambda: lora(modules_to_save=["lm_head", "norm"])),
    "LoRA and a saved embedding": (llama, lambda: lora(modules_to_save=["embed_tokens"])),
    "LoRA and new tokens": (llama, lambda: lora(trainable_token_indices=[3, 5, 7])),
    "rsLoRA": (llama, lambda: lora(use_rslora=True)),
    "DoRA": (llama, lambda: lora(use_dora=True)),
    "DoRA on GPT-2": (gpt2, lambda: lora(["c_attn"], fan_in_fan_out=True, use_dora=True)),
    "DoRA on the embedding": (llama, lambda: lora(["embed_tokens"], use_dora=True)),
    "IA3": (
        llama,
        lambda: of(
            "IA3Config", ["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
    ),
    "IA3 on GPT-2": (
        gpt2,
        lambda: of(
            "IA3Config",
            ["c_attn", "mlp.c_proj"],
            feedforward_modules=["mlp.c_proj"],
            fan_in_fan_out=True,
        ),
    ),
    "AdaLoRA": (llama, lambda: of("AdaLoraConfig", init_r=4, target_r=2, total_step=10)),
    "VeRA": (llama, lambda: of("VeraConfig", ["q_proj", "o_proj"], r=4)),
    "LoHa": (llama, lambda: of("LoHaConfig", r=4)),
    "LoKr": (llama, lambda: of("LoKrConfig", r=4)),
    "OFT": (llama, lambda: of("OFTConfig", oft_block_size=4)),
    "BOFT": (llama, lambda: of("BOFTConfig", ["q_proj"], boft_block_size=4)),
    "HRA": (llama, lambda: of("HRAConfig", r=4)),
    "VB-LoRA": (
        llama,
        lambda: of("VBLoRAConfig", ["q_proj"], r=2, num_vectors=8, vector_length=4),
    ),
    "FourierFT": (llama, lambda: of("FourierFTConfig", n_frequency=20)),
    "SHiRA": (llama, lambda: of("ShiraConfig", ["q_proj"], r=2)),  # its weight is sparse
    "norms": (llama, lambda: of("LNTuningConfig", None)),
    "prompt": (llama, lambda: virtual_tokens("PromptTuningConfig", 3)),
    "prompt as long as the text": (llama, lambda: virtual_tokens("PromptTuningConfig", LENGTH)),
    "prompt by an MLP": (
        llama,
        lambda: virtual_tokens("PromptEncoderConfig", 3, encoder_hidden_size=8),
    ),
    "prefix": (llama, lambda: virtual_tokens("PrefixTuningConfig", 3)),
    "prefix as long as the text": (llama, lambda: virtual_tokens("PrefixTuningConfig", LENGTH)),
    "prefix by an MLP": (
        llama,
        lambda: virtual_tokens(
            "PrefixTuningConfig", 3, prefix_projection=True, encoder_hidden_size=8
        ),
    ),
    "prefix on GPT-2": (gpt2, lambda: virtual_tokens("PrefixTuningConfig", 3)),
    "adaption prompt": (
        llama,
        lambda: peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=2),
    ),
}

IN_SINGLE_PRECISION = {"FourierFT"}  # whatever the model's: it casts its spectrum to float32


@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_have_the_gradients_of_the_loop_and_the_frozen_base_none(name: str) -> None:
    base, config = CONFIGS[name]
    model = adapted(base, config())
    assert any(not p.requires_grad for p in model.parameters())
    precision = torch.float32 if name in IN_SINGLE_PRECISION else torch.float64
    for size in SIZES:
        assert_exact(model, size, precision=precision)


@pytest.mark.parametrize("config", [lora(lora_dropout=0.5), lora(lora_dropout=0.5, use_dora=True)])
def test_same_seed_draws_the_dropout_of_the_plain_model(config: peft.LoraConfig) -> None:
    model, ids = adapted(llama, config).train(), words(LENGTH)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(1)
    plain = model(input_ids=ids).logits
    ordinary = torch.autograd.grad(plain.sin().sum(), list(trainable.values()))
    with pergrad.record(model, pergrad.Grads()) as grads:
        torch.manual_seed(1)
        recorded = model(input_ids=ids).logits
        recorded.sin().sum().backward()
    assert_close(recorded, plain, rtol=0, atol=1e-12)
    summed = {name: rows.sum(0) for name, rows in grads.result.items()}
    assert_all_near(summed, dict(zip(trainable, ordinary, strict=True)))
    torch.manual_seed(2)
    assert not torch.allclose(model(input_ids=ids).logits, plain)


def two_adapters(**options: Any) -> nn.Module:
    model = adapted(llama, lora())
    model.add_adapter("second", lora(["q_proj", "up_proj"], **options))
    model.set_adapter("second")
    moved(model)
    return model


@pytest.mark.parametrize("size", SIZES)
def test_the_adapter_that_is_set_has_the_gradients(size: int) -> None:
    model = two_adapters(modules_to_save=["lm_head"])
    for active in ("default", "second"):
        model.set_adapter(active)
        names = {name for name, p in model.named_parameters() if p.requires_grad}
        assert names
        assert all(f".{active}" in name for name in names)
        assert_exact(model, size)


@pytest.mark.parametrize("size", SIZES)
def test_adapters_that_are_active_together_all_have_gradients(size: int) -> None:
    model = two_adapters()
    model.base_model.set_adapter(["default", "second"])
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert {".default" in name for name in names} == {True, False}
    assert_exact(model, size)


@pytest.mark.parametrize("size", SIZES)
def test_an_adapter_for_each_sample(size: int) -> None:
    """A batch whose samples name their adapters; alone, a sample still has its own."""
    model = two_adapters()
    model.base_model.set_adapter(["default", "second"])
    chosen = [("default", "second")[n % 2] for n in range(size)]

    def loss(model: Callable[..., Any], ids: Tensor, number: Tensor) -> Tensor:
        return loss_fn(model, ids, adapter_names=[chosen[n] for n in number.tolist()])

    ids, number = words(size), torch.arange(size)
    assert_all_near(pergrad.grads(model, loss, ids, number), loop_grads(model, loss, ids, number))


def test_a_merged_adapter_has_no_gradient_and_after_unmerging_its_own() -> None:
    model = adapted(llama, lora())
    before = model(input_ids=words(1)).logits.shape
    model.merge_adapter()
    with pytest.raises(ScopeError, match="does not depend on any parameter that requires grad"):
        pergrad.grads(model, loss_fn, words(3))
    model.unmerge_adapter()
    assert model(input_ids=words(1)).logits.shape == before
    assert_exact(model, 3)


def test_a_disabled_adapter_leaves_the_other_trainable_parameters_theirs() -> None:
    model = adapted(llama, lora(bias="none", modules_to_save=["norm"]))
    model.get_base_model().lm_head.weight.requires_grad_()
    with model.disable_adapter():
        assert_exact(model, 3)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("config", [lora(), lora(use_dora=True)], ids=["LoRA", "DoRA"])
def test_checkpointing_changes_no_gradient(config: peft.LoraConfig, reentrant: bool) -> None:
    model, ids = adapted(llama, config).train(), words(LENGTH)
    expected = loop_grads(model, loss_fn, ids)
    model.enable_input_require_grads()  # which reentrant checkpoints need over a frozen embedding
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_all_near(pergrad.grads(model, loss_fn, ids), expected)
