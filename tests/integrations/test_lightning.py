"""A Lightning Trainer that clips each sample trains the weights of a loop written by hand."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pergrad.errors import PergradError
from pergrad.integrations.lightning import Callback

BOUND = 1.6
pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*treespec.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning"),
]


class Classifier(pl.LightningModule):
    """A module with layers, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.scale * self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Manual(Classifier):
    """Halves each batch, and steps on both halves together."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        x, y = batch
        for rows in (slice(0, 2), slice(2, None)):
            if len(x[rows]):
                self.manual_backward(self.loss((x[rows], y[rows])))
        optimizer.step()


class Plain(Manual):
    """Calls `backward` itself, on the whole batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


def data(samples: int = 22) -> TensorDataset:
    torch.manual_seed(0)
    x, y = torch.randn(22, 3).double(), torch.randint(4, (22,))
    return TensorDataset(x[:samples], y[:samples])


def trained(
    module: Classifier, path: Path, callback: Callback | None, *, samples: int = 22, **options: Any
) -> Any:
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=path,
        callbacks=[] if callback is None else [callback],
        **options,
    )
    trainer.fit(module, DataLoader(data(samples), batch_size=4))
    return trainer


def by_hand(
    module: Classifier,
    group: int,
    clip_mean: float | None = None,
    bound: float = BOUND,
    samples: int = 22,
) -> list[Tensor]:
    x, y = data().tensors
    x = x.to(module.scale.dtype)
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    clipped = 0
    for start in range(0, samples, group):
        rows = range(start, min(start + group, samples))
        totals = [torch.zeros_like(p) for p in parameters]
        for row in rows:
            own = torch.autograd.grad(module.loss((x[row, None], y[row, None])), parameters)
            norm = float(torch.stack([g.square().sum() for g in own]).sum().sqrt())
            clipped += norm > bound
            factor = min(1.0, bound / norm)
            totals = [t + factor * g for t, g in zip(totals, own, strict=True)]
        for p, total in zip(parameters, totals, strict=True):
            p.grad = total / len(rows)
        if clip_mean is not None:
            nn.utils.clip_grad_norm_(parameters, clip_mean)
        optimizer.step()
    assert 0 < clipped < samples or bound == float("inf")
    return parameters


def check(module: nn.Module, wanted: list[Tensor]) -> None:
    torch.testing.assert_close(list(module.parameters()), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batches", [1, 2])
def test_weights_are_those_of_a_loop_by_hand(batches: int, tmp_path: Path) -> None:
    module, callback = Classifier().double(), Callback(BOUND, noise_scale=True)
    trainer = trained(module, tmp_path, callback, accumulate_grad_batches=batches)
    check(module, by_hand(Classifier().double(), 4 * batches))
    logged = trainer.callback_metrics
    assert logged["sample_grad_norm_max"] >= logged["sample_grad_norm_mean"] > 0
    assert {"clipped_fraction", "noise_scale", "loss"} <= {*logged}
    assert module.training_step.__func__ is Classifier.training_step  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [Manual, Plain])
def test_manual_optimisation_steps_on_all_backward_passes(kind: Any, tmp_path: Path) -> None:
    module, callback = kind().double(), Callback(BOUND)
    trained(module, tmp_path, callback)
    check(module, by_hand(Manual().double(), 4))
    assert callback.norms is not None
    assert len(callback.norms) == 2


def test_gradient_clip_val_applies_to_the_mean(tmp_path: Path) -> None:
    module = Classifier().double()
    trained(module, tmp_path, Callback(BOUND), gradient_clip_val=0.2)
    check(module, by_hand(Classifier().double(), 4, clip_mean=0.2))


@pytest.mark.parametrize("kind", [Classifier, Manual, Plain])
def test_logging_alone_changes_no_bit_of_the_weights(kind: Any, tmp_path: Path) -> None:
    module, plain = kind().double(), kind().double()
    options = {} if kind is not Classifier else {"accumulate_grad_batches": 2}
    trained(module, tmp_path, Callback(noise_scale=True), **options)
    trained(plain, tmp_path, None, **options)
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


def test_bfloat16_trains_close_to_full_precision(tmp_path: Path) -> None:
    class Single(Classifier):
        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return super().loss((x.to(self.scale.dtype), y))

    module = Single()
    wanted = by_hand(copy.deepcopy(module), 4)
    trained(module, tmp_path, Callback(BOUND), precision="bf16-mixed")
    torch.testing.assert_close(list(module.parameters()), wanted, rtol=0.05, atol=0.02)


def test_step_without_a_loss_is_left_out(tmp_path: Path) -> None:
    class Skipping(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    module, plain = Skipping().double(), Skipping().double()
    trained(module, tmp_path, Callback())
    trained(plain, tmp_path, None)
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


def test_error_leaves_nothing_behind(tmp_path: Path) -> None:
    class Failing(Classifier):
        fails = True

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if self.fails:
                raise ZeroDivisionError
            return loss

    module, callback = Failing().double(), Callback(BOUND)
    with pytest.raises(ZeroDivisionError):
        trained(module, tmp_path, callback)
    assert "training_step" not in vars(module)
    assert not callback.step.is_open
    module.fails = False
    trained(module, tmp_path, callback)
    check(module, by_hand(Classifier().double(), 4))


def test_two_optimizers_are_refused(tmp_path: Path) -> None:
    class Two(Manual):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(p, lr=0.1) for p in ([self.scale], self.net.parameters())]

    with pytest.raises(PergradError, match="one optimizer, got 2"):
        trained(Two().double(), tmp_path, Callback())
