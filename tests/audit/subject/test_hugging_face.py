"""Names of Hugging Face, with a tiny model and data set that are written to disk first."""

import json
import sys

import datasets
import huggingface_hub
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from pergrad.audit import AuditOptions, load_spec, run_audit
from pergrad.errors import AuditError

WORDS = ["[PAD]", "[UNK]", "good", "bad", "film", "a", "very"]
TEXTS = ["a good film", "a very bad film", "bad", "very very good film", "a film"]


def save_tokenizer(folder):
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A folder with a classifier, a language model, and data with and without labels."""
    root = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS), "num_labels": 2, "pad_token_id": 0}
    bert = BertConfig(
        **sizes, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    BertForSequenceClassification(bert).save_pretrained(root / "classifier")
    gpt2 = GPT2Config(
        vocab_size=len(WORDS), n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(gpt2).save_pretrained(root / "language-model")
    for name in ("classifier", "language-model"):
        save_tokenizer(root / name)
    names = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])}
    )
    labelled = datasets.Dataset.from_dict({"text": TEXTS, "label": [1, 0, 0, 1, 1]}, features=names)
    datasets.DatasetDict({"train": labelled}).save_to_disk(root / "labelled")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(root / "plain")
    datasets.Dataset.from_dict({"number": [1, 2]}).save_to_disk(root / "numbers")
    return root


def test_a_classifier_is_audited_by_names(local, tmp_path):
    spec = load_spec(f"hf:{local}/classifier,{local}/labelled,train")
    assert not spec.model.training
    summary = run_audit(spec, tmp_path, AuditOptions(batch_size=2))
    assert summary["samples"] == 5
    assert spec.label is not None
    assert [spec.label(item) for item in spec.dataset] == ["pos", "neg", "neg", "pos", "pos"]
    assert spec.show is not None
    assert spec.show(spec.dataset[2]) == "bad"


def test_padding_does_not_change_the_loss_of_a_text(local):
    for kind, data in (("classifier", "labelled"), ("language-model", "plain")):
        spec = load_spec(f"hf:{local}/{kind},{local}/{data}")
        assert spec.collate is not None
        items = [spec.dataset[n] for n in range(5)]
        with torch.no_grad():
            together = spec.loss(spec.model, spec.collate(items))
            alone = [spec.loss(spec.model, spec.collate([item])) for item in items]
        assert together.shape == (5,)
        torch.testing.assert_close(together, torch.cat(alone))


def test_texts_without_labels_are_audited_with_a_language_model(local, tmp_path):
    spec = load_spec(f"hf:{local}/language-model,{local}/plain")
    assert spec.label is None
    assert run_audit(spec, tmp_path)["samples"] == 5


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("hf:{0}/none,{0}/labelled", "cannot load the model .* from this machine"),
        ("hf:{0}/classifier,{0}/none", "cannot load .* the data set .* from this machine"),
        ("hf:{0}/classifier,{0}/labelled,test", "cannot load split 'test' of"),
        ("hf:{0}/classifier,{0}/labeled.csv", "no file .*labeled.csv: check its name and folder"),
        ("hf:{0}/classifier,{0}/numbers", "has no column of strings, only .'number'."),
    ],
)
def test_what_is_not_on_this_machine_is_refused(local, reference, message):
    with pytest.raises(AuditError, match=message):
        load_spec(reference.format(local))


@pytest.mark.parametrize("missing", ["datasets", "transformers"])
def test_without_the_extra_it_says_what_to_install(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(AuditError, match=rf"hf: needs {missing}, .* pip install 'pergrad\[hf\]'"):
        load_spec("hf:model,data")


def test_the_network_is_not_used_unless_it_is_asked_for(local, monkeypatch):
    def refused(*_, **__):
        raise AssertionError("the network was used")

    monkeypatch.setattr("socket.getaddrinfo", refused)
    monkeypatch.setattr("socket.socket.connect", refused)
    with pytest.raises(AuditError, match=r"cannot load .*--download asks the hub") as raised:
        load_spec(f"hf:{local}/classifier,nobody/nothing")
    assert "the network was used" not in str(raised.value)
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


LABELLED = [{"id": f"row {n}", "text": text, "label": n % 2} for n, text in enumerate(TEXTS * 4)]


def of_rows(folder, local, rows, kind="classifier", say=None):
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_spec(f"hf:{local}/{kind},{folder}/data.jsonl", say=say or print)


def test_the_text_is_found_by_its_name_and_this_is_said(local, tmp_path):
    said = []
    spec = of_rows(tmp_path, local, LABELLED, say=said.append)
    assert spec.show(spec.dataset[2]) == "bad"
    assert said[0].endswith("the text 'text', target 'label' (not used: id)")
    assert said[1] == "loss: cross-entropy of the logits"
    of_rows(tmp_path, local, [{"text": text} for text in TEXTS], "language-model", said.append)
    assert said[3] == "loss: next token, mean over the tokens"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"text": None}, "ValueError: it has no text in column 'text'"),
        ({"label": None}, "ValueError: it has no label: None"),
        ({"label": -1}, "ValueError: it has no label: -1"),
    ],
)
def test_rows_without_a_text_or_label_are_skipped_and_listed(local, tmp_path, change, why):
    rows = [row | change if n == 3 else row for n, row in enumerate(LABELLED)]
    summary = run_audit(of_rows(tmp_path, local, rows), tmp_path / "results")
    ((index, said),) = [(row["index"], row["why"]) for row in summary["skipped"]]
    assert index == 3
    assert why in said


def test_labels_that_are_strings_are_the_names_of_the_model(local, tmp_path):
    def named(names):
        return [row | {"label": names[row["label"]]} for row in LABELLED]

    spec = of_rows(tmp_path, local, named(["LABEL_1", "LABEL_0"]))
    assert spec.collate(spec.dataset.select(range(4)))["labels"].tolist() == [1, 0, 1, 0]
    assert spec.label(spec.dataset[0]) == "LABEL_1"
    with pytest.raises(
        AuditError, match=r"label 'pos' of .* is none of the model's classes: LABEL_0"
    ):
        of_rows(tmp_path, local, named(["LABEL_1", "pos"]))


@pytest.mark.parametrize("label", [2, 0.5])
def test_labels_that_the_model_does_not_have_are_refused(local, tmp_path, label):
    with pytest.raises(
        AuditError, match=f"a label of .* is {label:g}, but the model has 2 outputs"
    ):
        of_rows(tmp_path, local, [*LABELLED, LABELLED[0] | {"label": label}])


def test_a_local_file_is_a_data_set_and_its_labels_are_judged(local, tmp_path):
    rows = "".join(f"{text},{n % 2}\n" for n, text in enumerate(TEXTS * 4))
    (tmp_path / "data.csv").write_text(f"text,label\n{rows}")
    spec = load_spec(f"hf:{local}/classifier,{tmp_path}/data.csv")
    assert len(spec.dataset) == 20
    summary = run_audit(spec, tmp_path / "results", AuditOptions(batch_size=8))
    assert summary["ranked_by"] == "labels"
