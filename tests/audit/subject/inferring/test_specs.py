import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, Subset, TensorDataset

from pergrad.audit.subject.inferring import inferred_spec
from pergrad.errors import AuditError

N = 12


class Logits(nn.Module):
    """Returns its logits as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 11)

    def forward(self, input_ids, attention_mask=None):
        return {"logits": self.table(input_ids)}


X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(N) % 3
TOKENS = torch.arange(N * 5).view(N, 5) % 11


def squared(out, y):
    return (out - y).square()


CASES = {
    "cross-entropy of the logits": (
        *(nn.Linear(4, 3), (X, CLASSES)),
        lambda out, y: F.cross_entropy(out, y, reduction="none"),
    ),
    "negative log of the probabilities": (
        *(nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), (X, CLASSES)),
        lambda out, y: F.nll_loss(out.log(), y, reduction="none"),
    ),
    "binary cross-entropy of one logit": (
        *(nn.Linear(4, 1), (X, CLASSES % 2)),
        lambda out, y: F.binary_cross_entropy_with_logits(out[:, 0], y.float(), reduction="none"),
    ),
    "squared error": (
        *(nn.Linear(4, 2), (X, torch.randn(N, 2))),
        lambda out, y: squared(out, y).mean(1),
    ),
    "squared error, mean": (
        *(nn.Linear(4, 1), (X, torch.randn(N))),
        lambda out, y: squared(out[:, 0], y),
    ),
    "binary cross-entropy of each label": (
        *(nn.Linear(4, 3), (X, (X[:, :3] > 0).float())),
        lambda out, y: F.binary_cross_entropy_with_logits(out, y, reduction="none").mean(1),
    ),
    "cross-entropy, mean over the positions": (
        *(nn.Embedding(11, 11), (TOKENS, TOKENS)),
        lambda out, y: F.cross_entropy(out.mT, y, reduction="none").mean(1),
    ),
    "next token": (
        *(nn.Embedding(11, 11), (TOKENS,)),
        lambda out, y: F.cross_entropy(out[:, :-1].mT, y[:, 1:], reduction="none").mean(1),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_inferred_and_said(name) -> None:
    model, tensors, expected = CASES[name]
    said = []
    spec = inferred_spec(model, TensorDataset(*tensors), say=said.append)
    assert said[0].startswith(f"loss: {name}")
    torch.testing.assert_close(spec.loss(model, *tensors), expected(model(tensors[0]), tensors[-1]))
    is_classified = any(line.startswith("labels: ") for line in said)
    assert is_classified or "labels are not judged" in said[1]
    assert said[2].startswith("show: ")
    assert is_classified == (spec.logits is not None) == (spec.target is not None)


def test_dicts_give_the_model_what_it_takes_and_mask_the_padding() -> None:
    mask = torch.ones_like(TOKENS)
    mask[:, 3:] = 0
    items = [
        {"input_ids": t, "attention_mask": m, "other": 1} for t, m in zip(TOKENS, mask, strict=True)
    ]
    model = Logits()
    spec = inferred_spec(model, items)
    batch = {"input_ids": TOKENS, "attention_mask": mask}
    expected = F.cross_entropy(model.table(TOKENS)[:, :2].mT, TOKENS[:, 1:3], reduction="none")
    torch.testing.assert_close(spec.loss(model, batch), expected.mean(1))


def test_a_loss_module_gives_the_loss_of_each_sample() -> None:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    model = nn.Linear(4, 3)
    spec = inferred_spec(model, TensorDataset(X, CLASSES), criterion)
    expected = F.cross_entropy(model(X), CLASSES, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(spec.loss(model, X, CLASSES), expected)
    assert criterion.reduction == "mean"


def test_an_iterable_is_read_once_in_order() -> None:
    class Stream(IterableDataset):
        def __iter__(self):
            return zip(X, CLASSES, strict=True)

    said = []
    spec = inferred_spec(nn.Linear(4, 3), Stream(), say=said.append)
    assert len(spec.dataset) == N
    assert said[0] == "data: 12 items of Stream read once, in order, and kept in memory"


@pytest.mark.parametrize(
    ("model", "items", "message"),
    [
        (nn.Linear(4, 3), [], "the data set is empty"),
        (
            nn.Linear(4, 3),
            [(x, "cat") for x in X],
            "labels are strings .such as 'cat'.*pass classes=",
        ),
        (nn.Linear(4, 3), list(X), "the data set has no targets"),
        (
            nn.Linear(4, 3),
            [{"input": x, "category": 1} for x in X],
            "no targets .its keys are input, category; targets are called labels, label,",
        ),
        (
            nn.Linear(4, 3),
            {"x": X, "y": CLASSES},
            "the data are a dict: pass one of its values, the tuple",
        ),
        (nn.Linear(4, 3), (X, CLASSES[:5]), "the inputs have 12 rows, the targets 5"),
        (
            nn.Linear(4, 3),
            (X.tolist(), CLASSES.tolist()),
            "the data are a tuple of lists: pass arrays",
        ),
        (nn.Linear, (X, CLASSES), "the model is the class Linear"),
        (nn.Linear(5, 3), TensorDataset(X, CLASSES), "the model fails on the first items"),
        (
            nn.Linear(4, 2),
            TensorDataset(X, CLASSES),
            "a target of sample 2 is 2, but the model has 2",
        ),
        (nn.Linear(4, 3), TensorDataset(X, torch.randn(N, 5)), "no loss fits outputs"),
        (nn.Linear(4, 3), 7, "must have items by index"),
        ("model", TensorDataset(X, CLASSES), "must be an nn.Module, got str"),
    ],
)
def test_what_cannot_be_inferred_is_said_in_one_sentence(model, items, message) -> None:
    with pytest.raises(AuditError, match=message) as raised:
        inferred_spec(model, items)
    assert "\n" not in str(raised.value)


def test_the_mode_of_the_model_and_the_random_state_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    model[0].eval()
    before = torch.get_rng_state()
    inferred_spec(model, TensorDataset(X, CLASSES))
    assert torch.equal(before, torch.get_rng_state())
    assert [m.training for m in model.modules()] == [True, False, True]


def test_a_loss_of_one_s_own_leaves_the_labels_to_be_judged() -> None:
    said = []
    spec = inferred_spec(
        nn.Linear(4, 3), TensorDataset(X, CLASSES), lambda m, x, y: m(x).sum(1), say=said.append
    )
    assert spec.loss(nn.Linear(4, 3), X, CLASSES).shape == (N,)
    assert spec.target(X, CLASSES).equal(CLASSES)
    assert spec.logits(nn.Linear(4, 3), X, CLASSES).shape == (N, 3)
    unknown = lambda m, x, y: m(x[:, 1:], y).sum(1)  # noqa: E731
    spec = inferred_spec(nn.Bilinear(3, 1, 3), TensorDataset(X, CLASSES), unknown, say=said.append)
    assert spec.logits is None
    assert "ranking: by loss and gradient; pass logits= and target= to judge labels" in said


@pytest.mark.parametrize("loss", [None, lambda m, x, y: F.cross_entropy(m(x), y, reduction="none")])
def test_fewer_names_than_outputs_are_said(loss) -> None:
    data, said = TensorDataset(torch.randn(9, 4), torch.arange(9) % 3), []
    inferred_spec(nn.Linear(4, 3), data, loss, say=said.append, classes=["a", "b"])
    assert "classes: 2 names for 3 outputs: the others are called by numbers" in said
    said.clear()
    inferred_spec(nn.Linear(4, 3), data, loss, say=said.append, classes=["a", "b", "c"])
    assert not any("names for" in line for line in said)


def test_names_in_a_file_have_the_order_of_the_model(tmp_path) -> None:
    class TinyForSequenceClassification(nn.Linear):
        config = type("Config", (), {"id2label": {0: "pos", 1: "neg"}})()

    (tmp_path / "data.csv").write_text("a,label\n1,neg\n2,pos\n3,neg\n")
    said = []
    spec = inferred_spec(
        TinyForSequenceClassification(1, 2), str(tmp_path / "data.csv"), say=said.append
    )
    assert spec.classes == ["pos", "neg"]
    assert [int(spec.dataset[n][1]) for n in range(3)] == [1, 0, 1]
    assert "classes: pos, neg" in said
    plain = inferred_spec(nn.Linear(1, 2), str(tmp_path / "data.csv"), say=said.append)
    assert plain.classes == ["neg", "pos"]


def test_names_of_classes_come_from_the_data_set() -> None:
    class Named(TensorDataset):
        classes = ("cat", "cow", "dog")

    spec = inferred_spec(nn.Linear(4, 3), Subset(Named(X, CLASSES), range(6)))
    assert spec.classes == ["cat", "cow", "dog"]


def test_texts_go_through_the_tokenizer() -> None:
    class Tokenizer:
        def __call__(self, texts, **options):
            assert options["return_tensors"] == "pt"
            return {"input_ids": torch.tensor([[ord(c) % 11 for c in text] for text in texts])}

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 2)

        def forward(self, input_ids, **kwargs):
            return self.table(input_ids).mean(1)

    items = [{"text": f"abc{n % 5}", "label": n % 2} for n in range(N)]
    said = []
    spec = inferred_spec(Classifier(), items, tokenizer=Tokenizer(), say=said.append)
    assert said[0] == "inputs: texts through Tokenizer"
    batch = spec.collate(items)
    assert spec.target(batch).tolist() == [n % 2 for n in range(N)]
    assert spec.loss(spec.model, batch).shape == (N,)
    assert spec.show(items[3]) == "abc3"
    with pytest.raises(AuditError, match=r"the items are texts .*pass tokenizer="):
        inferred_spec(Classifier(), items)
