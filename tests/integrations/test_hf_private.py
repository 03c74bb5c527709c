"""A private Trainer makes the steps of the plan, resumes bit for bit, and logs nothing that is private."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)

from pergrad.errors import PrivacyError
from pergrad.integrations.hf_private import PrivateTrainer, losses_of
from pergrad.private import Plan, Step

SIZE = 24


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=17, n_embd=8, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config).double()


def bert(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=17, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=12, max_position_embeddings=16, **options,
    )  # fmt: skip
    return BertForSequenceClassification(config).double()


def texts() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(17, (SIZE, 6), generator=generator)
    labels = tokens.clone()
    labels[:, :2] = -100
    labels[5] = -100  # a sample without a loss
    return [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]


def plan(**changes: Any) -> Plan:
    usual: dict[str, Any] = {
        "noise_multiplier": 1.0,
        "sample_rate": 0.12,  # some batches are empty
        "steps": 6,
        "max_norm": 1.0,
        "expected_batch_size": 3,
    }
    return Plan(**(usual | changes))


def trainer(folder: Path, model: nn.Module, made: Plan | None = None, **changes: Any) -> Any:
    own = {k: changes.pop(k) for k in ("loss_fn", "ledger") if k in changes}
    usual: dict[str, Any] = {
        "output_dir": str(folder),
        "learning_rate": 0.1,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return PrivateTrainer(
        model=model,
        args=TrainingArguments(**(usual | changes)),
        train_dataset=texts(),
        plan=made or plan(),
        options={"generator": torch.Generator().manual_seed(1)},
        **own,
    )


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_it_makes_the_steps_of_a_loop_by_hand(tmp_path: Path) -> None:
    model = llama()
    made = trainer(tmp_path, model, plan(noise_multiplier=0.0))
    made.train()
    by_hand, generator = llama(), torch.Generator().manual_seed(1)
    same = plan(noise_multiplier=0.0)
    loader = same.loader(texts(), generator, collate_fn=transformers.default_data_collator)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 - k / 6)
    step = Step(by_hand.train(), optimizer, losses_of, same, generator=generator)
    sizes = []
    for batch in loader:
        step(batch)
        schedule.step()
        assert step.last is not None
        sizes.append(step.last.batch_size)
    assert 0 in sizes
    torch.testing.assert_close(weights(model), weights(by_hand), rtol=1e-10, atol=1e-12)
    assert made.state.global_step == made.step.number == 6


def test_it_logs_epsilon_and_no_loss(tmp_path: Path) -> None:
    same = plan(delta=1e-3, steps=3)
    made = trainer(tmp_path, llama(), same)
    made.train()
    logged = made.state.log_history
    assert [row["epsilon"] for row in logged if "learning_rate" in row] == pytest.approx(
        [same.epsilon(steps=k) for k in range(1, 4)]
    )
    assert not [key for row in logged for key in row if "loss" in key or "norm" in key]
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 4


def test_a_resumed_run_is_the_undisturbed_one(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = llama()
    trainer(whole, expected, optim="adamw_torch").train()
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    trainer(broken, llama(), **options).train()
    found = llama()
    made = trainer(broken, found, **options)
    made.train(resume_from_checkpoint=str(broken / "checkpoint-2"))
    assert torch.equal(weights(found), weights(expected))
    assert len((broken / "ledger.jsonl").read_text().splitlines()) == 7
    assert made.step.number == made.step.spent == 6
    secret = broken / "checkpoint-2" / "private.pt"
    assert secret.stat().st_mode & 0o077 == 0
    secret.unlink()
    with pytest.raises(PrivacyError, match=r"has no private.pt"):
        trainer(broken, llama(), **options).train(
            resume_from_checkpoint=str(broken / "checkpoint-2")
        )


def test_adapters_are_trained_and_nothing_else(tmp_path: Path) -> None:
    base = llama()
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], r=2, lora_dropout=0.0)
    model = get_peft_model(base, lora)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer(tmp_path, model).train()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("model", "labels"),
    [
        (lambda: bert(num_labels=3), torch.tensor([0, 2, 1, 1])),
        (lambda: bert(num_labels=1), torch.randn(4).double()),
        (lambda: bert(num_labels=3), torch.rand(4, 3).round().double()),
        (llama, torch.tensor([[-100, 3, 4], [1, 2, 3], [-100, -100, 4], [5, -100, 2]])),
        (gpt2, torch.tensor([[-100, 3, 4], [1, 2, 3], [-100, -100, 4], [5, -100, 2]])),
    ],
)
def test_losses_are_those_of_the_model(model: Any, labels: Tensor) -> None:
    made = model().eval()
    tokens = torch.arange(12).view(4, 3)
    found = losses_of(made, {"input_ids": tokens, "labels": labels})
    alone = [made(input_ids=tokens[n : n + 1], labels=labels[n : n + 1]).loss for n in range(4)]
    expected = torch.stack(alone).double()  # some models compute their loss in float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
        ({"max_steps": 7}, "max_steps=7: the plan has 6"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
    ],
)
def test_what_is_not_private_is_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(PrivacyError, match=reason):
        trainer(tmp_path, llama(), **changes)


def test_a_language_model_whose_name_tells_no_loss_is_trained(tmp_path: Path) -> None:
    made = trainer(tmp_path, gpt2())
    made.train()
    assert made.released.step == 6


def test_autocast_of_the_trainer_is_that_of_the_step(tmp_path: Path) -> None:
    """Accelerate puts it into the forward, where a proof in float32 could not switch it off."""
    made = trainer(tmp_path, llama().float(), plan(noise_multiplier=0.0), bf16=True)
    dtypes = set()
    made.model.lm_head.register_forward_hook(lambda *call: dtypes.add(call[2].dtype))
    made.train()
    assert made.step.is_certified
    assert torch.bfloat16 in dtypes
    assert made.model.forward is not made.model._original_forward


def test_a_loss_of_another_kind_must_be_told(tmp_path: Path) -> None:
    class Doubled(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            found = super().forward(*args, **kwargs)
            if found.loss is not None:
                found.loss = 2 * found.loss
            return found

    model = llama()
    model.__class__ = Doubled
    with pytest.raises(PrivacyError, match="pass loss_fn="):
        trainer(tmp_path, model, plan(sample_rate=0.9), remove_unused_columns=False).train()
    told = trainer(
        tmp_path,
        model,
        plan(sample_rate=0.9),
        loss_fn=lambda model, inputs: 2 * losses_of(model, inputs),
        ledger=tmp_path / "other.jsonl",
        remove_unused_columns=False,
    )
    told.train()
    head = json.loads((tmp_path / "other.jsonl").read_text().splitlines()[0])
    assert head["plan"]["steps"] == 6


def test_nothing_that_it_logs_counts_the_tokens_of_private_batches(tmp_path: Path) -> None:
    run = trainer(tmp_path, llama())
    found = run.train()
    assert run.state.total_flos == 0
    assert all(line.get("total_flos", 0) == 0 for line in run.state.log_history)
    assert found.metrics["total_flos"] == 0
    with pytest.raises(PrivacyError, match="number of tokens tells how large the batches were"):
        trainer(tmp_path, llama(), include_num_input_tokens_seen=True)
