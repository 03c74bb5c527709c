"""Builds a spec from a Hugging Face model and data set on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from pergrad.audit.subject.inferring.collating import TEXTS
from pergrad.audit.subject.losses import LossOfLogits
from pergrad.audit.subject.spec import Spec
from pergrad.audit.subject.tables import refuse_missing
from pergrad.errors import AuditError

__all__ = ["PREFIX", "spec_of_names"]

PREFIX = "hf:"
_LABELS = ("label", "labels")
_LONGEST = 512  # tokens; longer texts are truncated
_IGNORED = -100
_HERE = " from this machine (--download asks the hub)"


_FILES = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def spec_of_names(
    reference: str, *, download: bool = False, say: Callable[[str], None] = lambda _: None
) -> Spec:
    """Loads `hf:MODEL,DATASET[,SPLIT]`: as a classifier if the data has labels, else as a language model.

    MODEL and DATASET are paths, or names in the local cache; DATASET may be a CSV, JSON or Parquet file. The
    network is not used, unless `download`. The text is the column `text`, or of another name that is usual,
    else the first column of strings; the label is the column `label` or `labels`; the default split is
    `train`. A row without a text or label cannot be read. `say` receives what was inferred.
    """
    parts = reference.removeprefix(PREFIX).split(",")
    if len(parts) not in (2, 3) or not all(parts):
        raise AuditError(
            f"the reference {reference!r} does not have the form {PREFIX}MODEL,DATASET[,SPLIT]"
        )
    try:
        import datasets  # noqa: F401, PLC0415  # an extra
        import transformers  # noqa: F401, PLC0415
    except ModuleNotFoundError as error:
        raise AuditError(
            f"{PREFIX} needs {error.name}, which is not installed: pip install 'pergrad[hf]'"
        ) from error
    with nullcontext() if download else _offline():
        return _spec(parts, say, is_local=not download)


def _spec(parts: list[str], say: Callable[[str], None], *, is_local: bool) -> Spec:
    data = _dataset(parts[1], parts[2] if len(parts) == 3 else "train", is_local=is_local)
    label = next((name for name in _LABELS if name in data.features), None)
    texts = [name for name, kind in data.features.items() if _is_text(kind) and name != label]
    if not texts:
        raise AuditError(
            f"the data set {parts[1]!r} has no column of strings, only {list(data.features)}: write a "
            "pergrad.audit.Spec for it"
        )
    text = next((name for name in TEXTS if name in texts), texts[0])
    is_classifier = label is not None
    model, tokenizer = _model_and_tokenizer(
        parts[0], is_classifier=is_classifier, is_local=is_local
    )
    unused = ", ".join(name for name in data.features if name not in (text, label))
    say(
        f"data: {len(data):,} rows of {parts[1]}, the text {text!r}"
        + (f", target {label!r}" if is_classifier else "")
        + (f" (not used: {unused})" if unused else "")
    )
    say(
        f"loss: {'cross-entropy of the logits' if is_classifier else 'next token, mean over the tokens'}"
    )
    labels = None if label is None else Labels(data, label, model.config, parts[1])
    return Spec(
        model,
        data,
        LossOfLogits(_logits, _class_losses) if is_classifier else _token_losses,
        show=lambda item: str(item[text]),
        label=None if labels is None else labels.name_of,
        collate=_collate(tokenizer, text, labels),
        name=parts[1],
        logits=_logits if is_classifier else None,
        target=(lambda batch: batch["labels"]) if is_classifier else None,
    )


class Labels:
    """Labels of a data set as classes of a model: whole numbers, or names that the model knows.

    A label below 0 means none, as in test splits.
    """

    def __init__(self, data: Any, column: str, config: Any, where: str) -> None:
        self._column = column
        self._names = getattr(data.features[column], "names", None)
        self._place: dict[str, int] = dict(config.label2id or {})
        for value in data.unique(column):
            if isinstance(value, str) and value and value not in self._place:
                raise AuditError(
                    f"label {value!r} of {where} is none of the model's classes: "
                    f"{', '.join(self._place)}"
                )
            if (
                isinstance(value, int | float)
                and value >= 0
                and value not in range(config.num_labels)
            ):
                raise AuditError(
                    f"a label of {where} is {value:g}, but the model has {config.num_labels} outputs: "
                    f"classes must be whole numbers from 0 to {config.num_labels - 1}"
                )

    def number_of(self, item: Any) -> int:
        value = item[self._column]
        if value in (None, "") or value != value or (not isinstance(value, str) and value < 0):
            raise ValueError(f"it has no label: {value!r}")
        return self._place[value] if isinstance(value, str) else int(value)

    def name_of(self, item: Any) -> str:
        value = item[self._column]
        if isinstance(value, int | float) and value == value:
            known = self._names is not None and 0 <= value < len(self._names)
            return str(self._names[int(value)] if known and self._names else int(value))
        return str(value)


@contextmanager
def _offline() -> Iterator[None]:
    """Keeps Hugging Face's packages from asking their hub within the block."""
    import datasets  # noqa: PLC0415
    import huggingface_hub  # noqa: PLC0415

    places = [
        (place, name)
        for place in (huggingface_hub.constants, datasets.config)
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
        if hasattr(place, name)
    ]
    before = [getattr(place, name) for place, name in places]
    for place, name in places:
        setattr(place, name, True)
    try:
        yield
    finally:
        for (place, name), value in zip(places, before, strict=True):
            setattr(place, name, value)


def _is_text(kind: Any) -> bool:
    return getattr(kind, "dtype", None) in ("string", "large_string")


def _dataset(name: str, split: str, *, is_local: bool = True) -> Any:
    import datasets  # noqa: PLC0415

    if Path(name).suffix.lower() in _FILES and "://" not in name:
        refuse_missing(Path(name))
    try:
        if Path(name).is_dir() and any(
            (Path(name) / f).exists() for f in ("state.json", "dataset_dict.json")
        ):
            found = datasets.load_from_disk(name)
            return found[split] if isinstance(found, datasets.DatasetDict) else found
        kind = _FILES.get(Path(name).suffix.lower())
        if kind is not None:
            return datasets.load_dataset(kind, data_files=name, split=split)
        where = datasets.DownloadConfig(local_files_only=is_local)
        return datasets.load_dataset(name, split=split, download_config=where)
    except Exception as error:
        raise AuditError(
            f"cannot load split {split!r} of the data set {name!r}{_HERE if is_local else ''}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _model_and_tokenizer(
    name: str, *, is_classifier: bool, is_local: bool = True
) -> tuple[nn.Module, Any]:
    import transformers  # noqa: PLC0415

    kind = (
        transformers.AutoModelForSequenceClassification
        if is_classifier
        else transformers.AutoModelForCausalLM
    )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, local_files_only=is_local)
        model = kind.from_pretrained(name, local_files_only=is_local)
    except Exception as error:
        raise AuditError(
            f"cannot load the model {name!r}{_HERE if is_local else ''}: {type(error).__name__}: {error}"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        model.config.pad_token_id = tokenizer.pad_token_id
    return model.eval(), tokenizer


def _collate(
    tokenizer: Any, text: str, labels: Labels | None
) -> Callable[[list[Any]], dict[str, Tensor]]:
    def collate(items: Sequence[Any]) -> dict[str, Tensor]:
        texts = [item[text] for item in items]
        if None in texts:
            raise ValueError(f"it has no text in column {text!r}")
        batch = tokenizer(
            texts, padding=True, truncation=True, max_length=_LONGEST, return_tensors="pt"
        )
        found = dict(batch)
        if labels is not None:
            found["labels"] = batch["input_ids"].new_tensor(list(map(labels.number_of, items)))
        return found

    return collate


def _logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:  # (n, classes)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    found: Tensor = model(**inputs).logits
    return found


def _class_losses(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:  # (n,)
    return F.cross_entropy(logits, batch["labels"], reduction="none")


def _token_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:  # (n,)
    """Returns the mean loss of each text over the tokens that are not padding."""
    logits = model(**batch).logits[:, :-1]
    targets = batch["input_ids"][:, 1:].masked_fill(batch["attention_mask"][:, 1:] == 0, _IGNORED)
    losses = F.cross_entropy(logits.mT, targets, reduction="none", ignore_index=_IGNORED)
    return losses.sum(1) / (targets != _IGNORED).sum(1).clamp(min=1)
