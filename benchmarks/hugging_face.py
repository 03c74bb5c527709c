"""Times Hugging Face models that the main benchmark does not know, each against training of its own kind.

``python -m benchmarks.hugging_face --size cpu`` times small models of these classes, ``--size gpu`` models of
real size in bfloat16; ``--compiled`` adds compiled steps. Rows are stored under benchmarks/results/models/
with ``--store``. The ratio of a recorded step is to eager training in the same round, that of a compiled one
to compiled training. On a CPU it is the time of one thread, which other processes do not lengthen. Norms are
compared with the loop over two samples first. ``--write FILE`` writes the table of the newest rows between
the markers of a file and draws it; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import matplotlib as mpl
import torch
import torch.nn.functional as F
import transformers
from matplotlib.figure import Figure
from torch import Tensor, nn

import pergrad
from benchmarks import rows
from benchmarks.plot import ASSETS, FAINT, OURS, PEERS, STYLE, TEXT, save
from benchmarks.rows import Row
from benchmarks.table import settle, shortened
from benchmarks.timing import orders

MARKERS = "<!-- benchmark-models:start -->", "<!-- benchmark-models:end -->"
RESULTS = rows.RESULTS / "models"
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """A model class of transformers, its real configuration, and what is smaller on a CPU."""

    title: str
    model: str
    small: dict[str, Any]
    kind: str  # "causal", "masked", "pairs" or "images"
    real: dict[str, Any] = field(
        default_factory=dict
    )  # beside the defaults, which are the real size
    shape: tuple[int, int] = (
        16,
        512,
    )  # samples and positions, or samples and the side of the images

    def title_at(self, size: str) -> str:
        """Returns the name of the real model, or the class alone for the small one."""
        return self.title if size == "gpu" else f"small {self.model}"

    def build(self, size: str) -> nn.Module:
        """Returns the model with random weights."""
        made = getattr(transformers, self.model)
        config = made.config_class(**(self.real if size == "gpu" else self.small))
        config.use_cache = False
        torch.manual_seed(0)
        model: nn.Module = made(config).eval()
        return model

    def batch(self, size: str, model: nn.Module) -> Batch:
        """Returns the inputs and labels of one batch."""
        config: Any = model.config
        samples, length = self.shape if size == "gpu" else (8, 56 if self.kind == "images" else 32)
        if self.kind == "images":
            labels = torch.randint(0, config.num_labels, (samples,))
            return {"pixel_values": torch.randn(samples, 3, length, length), "labels": labels}
        words = torch.randint(5, config.vocab_size, (samples, length))
        if self.kind == "pairs":
            return {"input_ids": words, "decoder_input_ids": words, "labels": words}
        return {"input_ids": words, "labels": words}


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the cross entropy of each sample, averaged over its positions."""
    given = {name: t for name, t in batch.items() if name != "labels"}
    logits = model(**given).logits.float()
    if logits.dim() == 2:
        return F.cross_entropy(logits, batch["labels"], reduction="none")
    return F.cross_entropy(logits.mT, batch["labels"], reduction="none").mean(1)


_TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
_SMALL_GPT: dict[str, Any] = {
    "vocab_size": 512,
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_IMAGES: dict[str, Any] = {"num_labels": 1000, "image_size": 224}
SUBJECTS: dict[str, Subject] = {
    "llama-1b": Subject(
        "Llama 1B",
        "LlamaForCausalLM",
        {**_TEXT, "num_key_value_heads": 2},
        "causal",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
        (8, 1024),
    ),
    "gpt2": Subject("GPT-2", "GPT2LMHeadModel", _SMALL_GPT, "causal"),
    "qwen2-0.5b": Subject(
        "Qwen2 0.5B",
        "Qwen2ForCausalLM",
        {**_TEXT, "num_key_value_heads": 2},
        "causal",
        {
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
        (8, 1024),
    ),
    "bert": Subject("BERT-base", "BertForMaskedLM", _TEXT, "masked", shape=(64, 256)),
    "deberta-v2": Subject(
        "DeBERTa-v2-base",
        "DebertaV2ForMaskedLM",
        {
            **_TEXT,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_buckets": 16,
        },
        "masked",
        {
            "vocab_size": 128100,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_buckets": 256,
            "share_att_key": True,
            "type_vocab_size": 0,
        },
        (32, 256),
    ),
    "convnext-t": Subject(
        "ConvNeXt-T",
        "ConvNextForImageClassification",
        {
            "num_labels": 10,
            "hidden_sizes": [16, 32, 64, 64],
            "depths": [1, 1, 2, 1],
            "image_size": 56,
        },
        "images",
        {**_IMAGES},
        (64, 224),
    ),
    "swin-t": Subject(
        "Swin-T",
        "SwinForImageClassification",
        {
            "num_labels": 10,
            "image_size": 56,
            "embed_dim": 24,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 7,
        },
        "images",
        {**_IMAGES},
        (64, 224),
    ),
    "vit-b": Subject(
        "ViT-B/16",
        "ViTForImageClassification",
        {**_TEXT, "num_labels": 10, "image_size": 56, "patch_size": 8},
        "images",
        {**_IMAGES},
        (64, 224),
    ),
    "t5-base": Subject(
        "T5-base",
        "T5ForConditionalGeneration",
        {
            "vocab_size": 512,
            "d_model": 128,
            "d_kv": 32,
            "d_ff": 256,
            "num_layers": 2,
            "num_heads": 4,
        },
        "pairs",
        {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
        (16, 512),
    ),
    "opt-350m": Subject(
        "OPT-350M",
        "OPTForCausalLM",
        {
            "vocab_size": 512,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 256,
        },
        "causal",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "ffn_dim": 4096,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
        (16, 512),
    ),
    "bart-base": Subject(
        "BART-base",
        "BartForConditionalGeneration",
        {
            "vocab_size": 512,
            "d_model": 128,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 256,
            "decoder_ffn_dim": 256,
        },
        "pairs",
        {
            "d_model": 768,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072,
            "encoder_attention_heads": 12,
            "decoder_attention_heads": 12,
        },
        (16, 512),
    ),
    "resnet-50": Subject(
        "ResNet-50",
        "ResNetForImageClassification",
        {"num_labels": 10, "embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1]},
        "images",
        {"num_labels": 1000},
        (64, 224),
    ),
}
QUANTITIES: dict[str, Callable[[], pergrad.Quantity]] = {
    "norms": pergrad.Norms,
    "clipped": lambda: pergrad.ClippedSum(1.0),
    "grads": pergrad.Grads,
}


def steps_of(
    model: nn.Module, batch: Batch, *, is_compiled: bool, context: Callable[[], Any]
) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Returns the steps by name, each with the quantity that it computes."""

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        with context():
            return losses(model, batch)

    def training(step: Callable[..., Tensor]) -> Callable[[], None]:
        def run() -> None:
            step(model, batch).sum().backward()
            model.zero_grad(set_to_none=True)

        return run

    def recorded(make: Callable[[], pergrad.Quantity]) -> Callable[[], Any]:
        def run() -> Any:
            quantity = make()
            with pergrad.record(model, quantity):
                loss_fn(model, batch).sum().backward()
            return quantity

        return run

    found: dict[str, tuple[str, Callable[[], Any]]] = {"plain": ("training", training(loss_fn))}
    for name in ("norms", "clipped"):
        found[f"pergrad-{name}"] = name, recorded(QUANTITIES[name])
    if not is_compiled:
        return found
    found["plain-compiled"] = "training", training(torch.compile(loss_fn))
    for name, make in QUANTITIES.items():
        step = pergrad.compiled(model, loss_fn, make())
        found[f"pergrad-{name}-compiled"] = name, partial(step, batch)
    return found


def check(model: nn.Module, batch: Batch) -> str:
    """Compares the norms of the first two samples with plain backward passes; returns the error, if any."""
    two = {name: t[:2] for name, t in batch.items()}
    found = pergrad.norms(model, losses, two)
    for n in range(2):
        one = {name: t[n : n + 1] for name, t in two.items()}
        own = torch.autograd.grad(
            losses(model, one).sum(), [*model.parameters()], allow_unused=True
        )
        wanted = torch.stack([g.norm() for g in own if g is not None]).norm()
        if not torch.isclose(found[n], wanted, rtol=1e-3):
            return f"the norm of sample {n} is {found[n]:.6g} instead of {wanted:.6g}"
    return ""


def measure(
    name: str, size: str, device: torch.device, rounds: int, *, is_compiled: bool, made: Any
) -> list[Row]:
    """Times all steps of a model in rounds of random order."""
    subject = SUBJECTS[name]
    model = subject.build(size)
    batch = subject.batch(size, model)
    wrong = check(model, {n: t[:2] for n, t in batch.items()}) if size == "cpu" else ""
    model, batch = model.to(device), {n: t.to(device) for n, t in batch.items()}
    is_gpu = device.type == "cuda"
    clock = time.perf_counter if is_gpu else time.thread_time

    def context() -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if is_gpu else nullcontext()

    taken: dict[str, list[float]] = {}
    notes: dict[str, str] = {}
    peaks: dict[str, int] = {}
    steps = steps_of(model, batch, is_compiled=is_compiled, context=context)
    for method, (_, step) in steps.items():
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                for _ in range(4):  # recorded, compiled, and warm
                    step()
            failed = [str(w.message) for w in told if "pergrad.compiled" in str(w.message)]
            notes[method] = failed[0] if failed else ""
            taken[method] = []
            if is_gpu:
                torch.cuda.reset_peak_memory_stats(device)
                step()
                torch.cuda.synchronize(device)
                peaks[method] = torch.cuda.max_memory_allocated(device)
        except Exception as error:
            notes[method] = f"{type(error).__name__}: {error}".splitlines()[0]
    for order in orders(list(taken), rounds=rounds, seed=0):
        for method in order:
            step = steps[method][1]
            step()
            if is_gpu:
                torch.cuda.synchronize(device)
            start = clock()
            step()
            if is_gpu:
                torch.cuda.synchronize(device)
            taken[method].append(clock() - start)
    found = []
    for method, (quantity, _) in steps.items():
        times = taken.get(method)
        base = "plain-compiled" if method.endswith("compiled") else "plain"
        ratios = [a / b for a, b in zip(times or (), taken.get(base, ()), strict=False)]
        status: rows.Status = "wrong" if wrong else "ok" if ratios else "failed"
        found.append(
            Row(
                size=size,
                precision="bfloat16" if is_gpu else "float32",
                model=name,
                model_title=subject.title_at(size),
                method=method,
                method_title=method,
                quantity=quantity,
                status=status,
                note=wrong or notes[method],
                seconds=statistics.median(times) if times else None,
                seconds_iqr=None,
                fastest=min(times) if times else None,
                ratio=statistics.median(ratios) if ratios else None,
                ratio_iqr=None,
                peak_bytes=peaks.get(method),
                memory_ratio=peaks[method] / peaks[base]
                if method in peaks and base in peaks
                else None,
                provenance=made,
            )
        )
    return found


METHODS = {
    "pergrad-norms": "norms, recorded",
    "pergrad-clipped": "clipped sum, recorded",
    "pergrad-norms-compiled": "norms, compiled",
    "pergrad-clipped-compiled": "clipped sum, compiled",
    "pergrad-grads-compiled": "full gradients, compiled",
}


def newest(folder: Path) -> dict[str, dict[str, dict[str, Row]]]:
    """Returns the newest row by size, model and method; files are named by their date."""
    found: dict[str, dict[str, dict[str, Row]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for row in rows.read(path):
            found.setdefault(row.size, {}).setdefault(row.model, {})[row.method] = row
    return found


def document(found: dict[str, dict[str, dict[str, Row]]]) -> str:
    """Renders a table for each size, with its machine and what failed."""
    parts = []
    for size, models in found.items():
        any_row = next(iter(next(iter(models.values())).values()))
        made = any_row.provenance
        lines = [
            f"| {size}, {any_row.precision} | {' | '.join(METHODS.values())} |",
            "|---" * (len(METHODS) + 1) + "|",
        ]
        notes = []
        for name in [name for name in SUBJECTS if name in models]:
            cells = []
            for method in METHODS:
                row = models[name].get(method)
                is_ok = row is not None and row.status == "ok"
                cells.append(
                    f"{row.ratio:.2f}" if is_ok and row is not None else "fails" if row else ""
                )
                if row is not None and row.note:
                    notes.append(f"- {row.model_title}, {METHODS[method]}: {shortened(row.note)}")
            lines.append(f"| {SUBJECTS[name].title_at(size)} | {' | '.join(cells)} |")
        caption = (
            f"{made.machine}; commit {made.commit}, {made.date[:10]}, torch {made.versions['torch']}, "
            f"{made.rounds} rounds."
        )
        parts.append("\n".join([*lines, "", caption, *notes]))
    return "\n\n".join(parts)


COLOURS = dict(zip(METHODS, (OURS, PEERS, "#56B4E9", "#F0E442", "#009E73"), strict=True))


def draw(found: dict[str, dict[str, dict[str, Row]]], folder: Path) -> list[Path]:
    """Draws a chart for each size: a group of bars for each model; the line is training of the same kind."""
    paths = []
    for size, models in found.items():
        names = [name for name in SUBJECTS if name in models]
        shown = [m for m in METHODS if any(m in models[name] for name in names)]
        with mpl.rc_context(STYLE):
            figure = Figure(
                figsize=(6.0, 0.6 + 0.2 * len(shown) * len(names)), layout="constrained"
            )
            panel = figure.subplots()
            height = 0.8 / len(shown)
            for k, method in enumerate(shown):
                bars = {
                    place + k * height: models[name][method].ratio or 0.0
                    for place, name in enumerate(names)
                    if method in models[name]
                }
                panel.barh(
                    list(bars),
                    list(bars.values()),
                    height,
                    color=COLOURS[method],
                    label=METHODS[method],
                )
            panel.axvline(1, color=TEXT, linewidth=0.8, linestyle=(0, (4, 3)))
            middle = 0.4 - height / 2
            panel.set_yticks(
                [place + middle for place in range(len(names))],
                [SUBJECTS[n].title_at(size) for n in names],
            )
            panel.invert_yaxis()
            panel.grid(visible=True, axis="x", color=FAINT, alpha=0.25, linewidth=0.5)
            panel.set_xlabel(f"time as a multiple of training of the same kind ({size})")
            panel.legend(frameon=False, labelcolor=TEXT)
            paths.append(folder / f"benchmark-models-{size}.svg")
            save(figure, paths[-1])
    return paths


def main(arguments: Sequence[str] | None = None) -> int:
    """Times the models, or writes the table of the stored rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hugging_face", description=__doc__)
    parser.add_argument("--size", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--compiled", action="store_true", help="compiled steps too: minutes each")
    parser.add_argument("--store", action="store_true", help="keep the rows")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--write", type=Path, help="write the table of the stored rows into this file"
    )
    parser.add_argument("--check", type=Path, help="exit with 1 if this file has another table")
    parser.add_argument("--folder", type=Path, default=ASSETS, help="where the charts go")
    options = parser.parse_args(arguments)
    if options.write or options.check:
        text = document(newest(options.results))
        if options.write:
            draw(newest(options.results), options.folder)
        module = "benchmarks.hugging_face"
        return settle(text, options.write, options.check, markers=MARKERS, module=module)
    device = torch.device("cuda" if options.size == "gpu" else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    made = rows.provenance(device, of_commit=None, rounds=options.rounds, steps=1, seed=0)
    precision = "bfloat16" if device.type == "cuda" else "float32"
    path = options.results / rows.file_name(options.size, precision, made)
    found: list[Row] = []
    for name in options.models:
        plan = {"is_compiled": options.compiled, "made": made}
        found += measure(name, options.size, device, options.rounds, **plan)
        for row in found:
            if row.model == name:
                ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
                print(name, row.method, row.status, ratio, row.note[:120], flush=True)
        if options.store:
            rows.update(path, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
