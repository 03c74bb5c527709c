import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from pergrad.audit.streaming.label_free import class_shares
from pergrad.audit.subject.inferring import inferred_spec
from pergrad.audit.subject.inferring.kinds import inferred_kind, kind_of_loss, takes_outputs
from pergrad.audit.subject.inferring.probing import first_items, probed
from pergrad.errors import AuditError

N = 12
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 3
TOKENS = torch.arange(N * 5).view(N, 5) % 11


def probe(model, *tensors):
    data = TensorDataset(*tensors)
    return probed(model, data, None, None, first_items(data))


@pytest.mark.parametrize(
    "given",
    [Y, Y.int(), Y.to(torch.uint8), Y[:, None], Y.double(), F.one_hot(Y), F.one_hot(Y).float()],
)
def test_classes_come_in_many_forms(given) -> None:
    model = nn.Linear(4, 3)
    kind = inferred_kind(probe(model, X, given))
    assert kind.classes(given).equal(Y)
    expected = F.cross_entropy(model(X), Y, reduction="none")
    torch.testing.assert_close(kind.criterion(model(X), given, ()), expected)


@pytest.mark.parametrize(
    "given", [Y % 2, (Y % 2).float(), (Y % 2).bool(), (Y % 2)[:, None].float()]
)
@pytest.mark.parametrize("last", [nn.Identity(), nn.Sigmoid()])
def test_targets_of_zeros_and_ones_and_one_output_are_two_classes(given, last) -> None:
    model = nn.Sequential(nn.Linear(4, 1), last)
    kind = inferred_kind(probe(model, X, given))
    assert kind.title.startswith("binary cross-entropy of ")
    logits = model[0](X)[:, 0]
    expected = F.binary_cross_entropy_with_logits(logits, (Y % 2).float(), reduction="none")
    found = kind.criterion(kind.logits(model(X)), given, ())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert kind.classes(given).equal(Y % 2)


@pytest.mark.parametrize("given", [3 + Y, Y.float() / 3, torch.randn(N, 1)])
def test_other_numbers_and_one_output_are_a_regression(given) -> None:
    model = nn.Linear(4, 1)
    kind = inferred_kind(probe(model, X, given))
    assert kind.title.startswith("squared error")
    expected = (model(X)[:, 0] - given.flatten()).square()
    torch.testing.assert_close(kind.criterion(model(X), given, ()), expected)


def test_probabilities_become_logits() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Softmax(1))
    kind = inferred_kind(probe(model, X, Y))
    torch.testing.assert_close(kind.logits(model(X)).softmax(1), model(X))


def test_labels_that_repeat_the_tokens_are_shifted() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 11)

        def forward(self, input_ids):
            return self.table(input_ids)

    labels = TOKENS.clone()
    labels[:, 4] = -100
    batch = {"input_ids": TOKENS, "labels": labels}
    items = [{name: part[n] for name, part in batch.items()} for n in range(N)]
    model = Model()
    kind = inferred_kind(probed(model, items, None, None, first_items(items)))
    assert kind.title.startswith("next token")
    expected = F.cross_entropy(model(TOKENS)[:, :3].mT, TOKENS[:, 1:4], reduction="none").mean(1)
    torch.testing.assert_close(kind.criterion(model(TOKENS), labels, (batch,)), expected)


def test_a_later_target_out_of_range_is_named() -> None:
    kind = inferred_kind(probe(nn.Linear(4, 3), X, Y))
    with pytest.raises(AuditError, match="a target is 5, but the model has 3 outputs"):
        kind.criterion(torch.zeros(2, 3), torch.tensor([0, 5]), ())
    kind = inferred_kind(probe(nn.Linear(4, 1), X, Y % 2))
    with pytest.raises(AuditError, match="a target is 2: targets of one logit must be 0 or 1"):
        kind.criterion(torch.zeros(2, 1), torch.tensor([0, 2]), ())


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy])
def test_a_given_loss_of_outputs_and_targets_is_taken_apart(loss) -> None:
    assert takes_outputs(loss)
    model = nn.Linear(4, 3)
    kind = kind_of_loss(loss, probe(model, X, Y))
    expected = F.cross_entropy(model(X), Y, reduction="none")
    torch.testing.assert_close(kind.criterion(model(X), Y, ()), expected)
    with pytest.raises(AuditError, match="the items have no targets"):
        kind_of_loss(loss, probe(model, X))


@pytest.mark.parametrize(
    ("model", "targets", "loss", "expected"),
    [
        (nn.Linear(4, 1), Y % 2, nn.BCEWithLogitsLoss(), F.binary_cross_entropy_with_logits),
        (
            nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()),
            Y % 2,
            nn.BCELoss(),
            F.binary_cross_entropy,
        ),
        (nn.Linear(4, 3), F.one_hot(Y, 3), nn.CrossEntropyLoss(), F.cross_entropy),
    ],
)
def test_labels_are_judged_under_a_given_loss_too(model, targets, loss, expected) -> None:
    targets = targets.float().reshape(N, -1)
    kind = kind_of_loss(loss, probe(model, X, targets))
    assert kind.classes is not None
    spec = inferred_spec(model, TensorDataset(X, targets), loss)
    assert spec.target(X, targets).unique().numel() == max(2, targets.shape[1])
    found = spec.loss(model, X, targets)
    torch.testing.assert_close(found.mean(), expected(model(X), targets))
    probabilities = class_shares(spec.logits(model, X, targets))
    if isinstance(model, nn.Sequential):
        torch.testing.assert_close(probabilities[:, 1].float(), model(X)[:, 0])


def test_a_loss_of_regression_judges_no_labels() -> None:
    targets = (Y % 2).float()[:, None]
    assert kind_of_loss(nn.MSELoss(), probe(nn.Linear(4, 1), X, targets)).classes is None
    assert kind_of_loss(F.l1_loss, probe(nn.Linear(4, 1), X, targets)).classes is None


def test_a_later_target_of_a_class_that_is_no_whole_number_is_refused() -> None:
    kind = inferred_kind(probe(nn.Linear(4, 3), X, Y.float()))
    with pytest.raises(AuditError, match="targets of classes must be whole numbers, got 0"):
        kind.criterion(torch.zeros(2, 3), torch.tensor([0.0, 0.5]), ())


def test_sigmoids_and_one_label_each_are_labels_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid())
    kind = inferred_kind(probe(model, X, F.one_hot(Y).float()))
    assert kind.title.startswith("binary cross-entropy of each label")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_a_loss_have_the_type_of_the_outputs(dtype) -> None:
    loss, model = (
        nn.CrossEntropyLoss(weight=torch.tensor([0.1, 0.2, 0.3])),
        nn.Linear(4, 3).to(dtype),
    )
    kind = kind_of_loss(loss, probe(model, X, Y))
    out = model(X.to(dtype))
    expected = F.cross_entropy(out, Y, loss.weight.to(dtype), reduction="none")
    assert torch.equal(kind.criterion(out, Y, ()), expected)
    assert (loss.weight.dtype, loss.reduction) == (torch.float32, "mean")


def test_a_class_of_a_position_that_does_not_exist_is_named() -> None:
    targets = torch.zeros(2, 5, 5, dtype=torch.long)
    kind = inferred_kind(probe(nn.Conv2d(1, 3, 1), torch.rand(2, 1, 5, 5), targets))
    targets[1, 2, 2] = 255
    with pytest.raises(AuditError, match=r"a target is 255, .*3 outputs: .*-100 for unknown ones"):
        kind.criterion(torch.zeros(2, 3, 5, 5), targets, ())


def test_a_loss_of_the_model_is_not_one_of_outputs() -> None:
    assert not takes_outputs(lambda model, x, y: model(x))
    assert not takes_outputs("cross_entropy")
