"""A Trainer that clips each sample trains the weights of a loop over samples written by hand."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import SequentialSampler
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)

from pergrad.errors import PergradError
from pergrad.integrations import hf

Sample = dict[str, Tensor]
LENGTHS = [6, 3, 5, 2, 6, 4, 3, 6, 5, 2]
BOUND = 2.5


class InOrder:
    """Makes a Trainer take the samples in their order."""

    train_dataset: Any

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class Trainer(InOrder, hf.TrainerMixin, transformers.Trainer):
    pass


class PlainTrainer(InOrder, transformers.Trainer):
    pass


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config).double()


def bert(kind: Any = BertForSequenceClassification) -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return kind(config).double()


def padded(length: int, labels: str) -> Sample:
    ids = torch.randint(1, 17, (6,))
    mask = (torch.arange(6) < length).long()
    if labels == "class":
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(3, ())}
    wanted = ids if labels == "next" else torch.randint(3, (6,))
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": torch.where(mask > 0, wanted, -100),
    }


def samples(labels: str) -> list[Sample]:
    torch.manual_seed(1)
    return [padded(length, labels) for length in LENGTHS]


def arguments(path: Path, **options: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(output_dir=str(path), **(settings | options))


def trained(
    kind: Any, model: nn.Module, data: list[Sample], path: Path, *callbacks: Any, **options: Any
) -> Any:
    trainer = kind(
        model=model,
        args=arguments(path, **options),
        train_dataset=data,
        callbacks=list(callbacks),
    )
    trainer.train()
    return trainer


def own_loss(model: nn.Module, sample: Sample) -> Tensor:
    loss: Tensor = model(**{key: t[None] for key, t in sample.items()}).loss
    return loss


def smoothed_loss(model: nn.Module, sample: Sample) -> Tensor:
    logits = model(
        input_ids=sample["input_ids"][None], attention_mask=sample["attention_mask"][None]
    ).logits
    return F.cross_entropy(logits[0, :-1], sample["labels"][1:], label_smoothing=0.1)


def by_hand(
    model: nn.Module,
    data: list[Sample],
    group: int,
    loss: Callable[[nn.Module, Sample], Tensor] = own_loss,
    bound: float = BOUND,
    max_grad_norm: float | None = None,
) -> list[Tensor]:
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    clipped = 0
    for start in range(0, len(data), group):
        some = data[start : start + group]
        totals = [torch.zeros_like(p) for p in parameters]
        for sample in some:
            own = torch.autograd.grad(loss(model, sample), parameters)
            norm = float(torch.stack([g.square().sum() for g in own]).sum().sqrt())
            clipped += norm > bound
            totals = [t + min(1.0, bound / norm) * g for t, g in zip(totals, own, strict=True)]
        for p, total in zip(parameters, totals, strict=True):
            p.grad = total / len(some)
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        optimizer.step()
    assert 0 < clipped < len(data) or bound == float("inf")
    return parameters


def check(model: nn.Module, wanted: list[Tensor]) -> None:
    torch.testing.assert_close(list(model.parameters()), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(
    ("make", "labels", "bound"),
    [
        (llama, "next", BOUND),
        (bert, "class", 0.87),
        (lambda: bert(BertForTokenClassification), "tokens", BOUND),
    ],
    ids=["causal", "classification", "tokens"],
)
def test_weights_are_those_of_a_loop_by_hand(
    make: Callable[[], nn.Module], labels: str, bound: float, steps: int, tmp_path: Path
) -> None:
    data, model = samples(labels), make()
    callback = hf.Callback(bound)
    trainer = trained(Trainer, model, data, tmp_path, callback, gradient_accumulation_steps=steps)
    check(model, by_hand(make(), data, 2 * steps, bound=bound))
    logged = trainer.state.log_history[0]
    assert logged["sample_grad_norm_max"] > logged["sample_grad_norm_mean"] > 0
    assert callback.norms is not None


def test_label_smoothing_is_part_of_the_loss_of_a_sample(tmp_path: Path) -> None:
    data, model = samples("next"), llama()
    options = {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}
    trained(Trainer, model, data, tmp_path, hf.Callback(BOUND), **options)
    check(model, by_hand(llama(), data, 4, smoothed_loss))


def test_max_grad_norm_applies_to_the_mean_of_clipped_gradients(tmp_path: Path) -> None:
    data, model = samples("next"), llama()
    trained(Trainer, model, data, tmp_path, hf.Callback(BOUND), max_grad_norm=0.5)
    check(model, by_hand(llama(), data, 2, max_grad_norm=0.5))


@pytest.mark.parametrize("labels", ["next", "class"])
def test_logging_alone_changes_no_bit_of_the_weights(labels: str, tmp_path: Path) -> None:
    make = llama if labels == "next" else bert
    data, model, plain = samples(labels), make(), make()
    callback = hf.Callback(noise_scale=True)
    trainer = trained(Trainer, model, data, tmp_path, callback, gradient_accumulation_steps=2)
    other = trained(PlainTrainer, plain, data, tmp_path, gradient_accumulation_steps=2)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    ours, others = trainer.state.log_history[0], other.state.log_history[0]
    assert (ours["loss"], ours["grad_norm"]) == (others["loss"], others["grad_norm"])
    assert "noise_scale" in ours


def test_logged_norms_are_those_of_samples_alone(tmp_path: Path) -> None:
    data, model = samples("next")[:4], llama()
    start, callback = copy.deepcopy(model), hf.Callback()
    trained(Trainer, model, data, tmp_path, callback, gradient_accumulation_steps=2)
    wanted = []
    for sample in data:
        own = torch.autograd.grad(own_loss(start, sample), list(start.parameters()))
        wanted.append(torch.stack([g.square().sum() for g in own]).sum().sqrt())
    torch.testing.assert_close(callback.norms, torch.stack(wanted), rtol=1e-6, atol=1e-6)


def test_bfloat16_trains_close_to_full_precision(tmp_path: Path) -> None:
    data, model = samples("next"), llama().float()
    trained(Trainer, model, data, tmp_path, hf.Callback(BOUND), bf16=True)
    wanted = [p.float() for p in by_hand(llama(), data, 2)]
    torch.testing.assert_close(list(model.parameters()), wanted, rtol=0.1, atol=0.02)


def test_callback_without_the_mixin_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PergradError, match="TrainerMixin"):
        trained(PlainTrainer, bert(), samples("class"), tmp_path, hf.Callback())


def test_loss_that_is_no_mean_over_labels_is_refused(tmp_path: Path) -> None:
    class Summed(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return len(inputs["labels"]) * super().compute_loss(model, inputs, *args, **kwargs)

    with pytest.raises(PergradError, match="not the mean of the losses"):
        trained(Summed, bert(), samples("class"), tmp_path, hf.Callback(1.0))


def test_error_in_a_step_leaves_nothing_behind(tmp_path: Path) -> None:
    class Failing(Trainer):
        fails = True

        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, *args, **kwargs)
            if self.fails and model.training:
                raise ZeroDivisionError
            return loss

    data, model = samples("next"), llama()
    trainer = Failing(
        model=model,
        args=arguments(tmp_path),
        train_dataset=data,
        callbacks=[hf.Callback(BOUND)],
    )
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.fails = False
    trainer.train()
    check(model, by_hand(llama(), data, 2))
