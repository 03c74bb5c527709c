"""Measures building an index over a language model: tokens per second, beside compiled norms and training.

``python -m benchmarks.index_build --size gpu --store`` builds an index over a Llama of one billion parameters
with random weights in bfloat16, 8 texts of 1,024 random tokens in a batch, by `pergrad.Index.build` with its
default options. Plain training and norms, both compiled, run on the same batches in the same process, before
and after the build; the smaller median counts. The time of the build is that of its batches once the step is
compiled: from batch to batch as they reach the store. ``--size tiny`` is for a CPU. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

import pergrad
from benchmarks import rows
from benchmarks.hugging_face.subjects import SUBJECTS
from benchmarks.rows import Row
from benchmarks.turns import Turns

RESULTS = rows.RESULTS / "index_build"
_PROFILED = 3  # the last batches of these, where kernels are shown
_WARM = 8  # batches of the build before its time counts: the first are not compiled


@dataclass(frozen=True)
class Setting:
    """A Llama, the shape of its batches, and what is built."""

    title: str
    config: dict[str, Any]
    samples: int
    tokens: int
    batches: int
    dtype: torch.dtype
    options: dict[str, Any]


SETTINGS = {
    "gpu": Setting(
        "Llama 1B",
        SUBJECTS["llama-1b"].real,
        *(8, 1024, 108, torch.bfloat16),
        {},
    ),
    "tiny": Setting(
        "tiny Llama",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
        *(4, 16, 12, torch.float32),
        {"compile": True},
    ),
}


def losses(model: nn.Module, words: Tensor) -> Tensor:
    """Returns the cross entropy of each text, averaged over its tokens."""
    logits = model(input_ids=words).logits.float()
    return F.cross_entropy(logits.mT, words, reduction="none").mean(1)


class Clock:
    """Notes when each batch of a build reaches the store; calls `when_warm` once the step is compiled.

    The `shown` kernels that take longest in the last of the warm batches are printed.
    """

    def __init__(self, when_warm: Callable[[], None], shown: int = 0) -> None:
        self.times: list[float] = []
        self.notes: list[str] = []
        self.when_warm = when_warm
        self.shown = shown
        self.profiler = profile(activities=[ProfilerActivity.CUDA], acc_events=True)

    def begin(self, samples: int, done: int) -> None: ...

    def advance(self, samples: int) -> None:
        if self.shown and len(self.times) == _WARM - _PROFILED:
            self.profiler.__enter__()
        if len(self.times) == _WARM:
            if self.shown:
                self.profiler.__exit__(None, None, None)
                show_kernels(self.profiler, self.shown, _PROFILED)
            self.when_warm()
        self.times.append(time.perf_counter())

    def say(self, message: str) -> None:
        self.notes.append(message)


def show_kernels(profiler: profile, shown: int, steps: int) -> None:
    """Prints the kernels that take longest, for each of so many steps."""
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    print(f"{total / steps / 1e3:8.3f} ms of kernels")
    for event in events[:shown]:
        milliseconds = event.self_device_time_total / steps / 1e3
        print(f"{milliseconds:8.3f} ms {event.count / steps:6.1f}x {event.key[:110]}", flush=True)


def timed(step: Callable[[], Any], rounds: int, device: torch.device) -> float:
    """Returns the median seconds of a step over `rounds` pairs of steps that follow each other."""
    found = []
    for _ in range(rounds):
        _wait(device)
        began = time.perf_counter()
        step()
        step()
        _wait(device)
        found.append((time.perf_counter() - began) / 2)
    return statistics.median(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    setting: Setting,
    device: torch.device,
    options: dict[str, Any],
    rounds: int,
    made: Any,
    size: str,
    turns: Turns,
    shown: int = 0,
) -> list[Row]:
    """Times training, norms and the build with options of the index; returns a row of each."""
    began = time.perf_counter()
    turn = ExitStack()  # of preparing, and from the warm build on of timing
    turn.enter_context(turns.preparing())

    def take_turn() -> None:
        turn.close()
        turn.enter_context(turns.timing())

    def tell(what: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {what}", flush=True)

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**setting.config)
    config.use_cache = False
    with torch.device(device):
        model: nn.Module = transformers.LlamaForCausalLM(config)
    model = model.to(setting.dtype).eval()
    words = torch.randint(0, config.vocab_size, (setting.samples * setting.batches, setting.tokens))
    batch = words[: setting.samples].to(device)
    training = torch.compile(losses)
    norms = pergrad.compiled(model, losses, pergrad.Norms())

    def train() -> None:
        training(model, batch).sum().backward()
        model.zero_grad(set_to_none=True)

    steps = {"plain-compiled": train, "pergrad-norms-compiled": lambda: norms(batch)}
    times: dict[str, float] = {}
    peaks: dict[str, int] = {}
    for name, step in steps.items():
        for _ in range(4):  # recorded, compiled, and warm
            step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        times[name] = timed(step, rounds, device)
        if device.type == "cuda":
            peaks[name] = torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        if shown:
            with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
                step()
                _wait(device)
            show_kernels(profiler, shown, 1)
        tell(f"{name}: {times[name] * 1e3:.1f} ms")
    clock = Clock(take_turn, shown)
    with tempfile.TemporaryDirectory() as folder:
        index = pergrad.Index.build(
            *(model, TensorDataset(words), Path(folder) / "index", losses),
            batch_size=setting.samples,
            chunk=len(words),
            keep_states=False,
            device=str(device),
            watch=clock,
            **{**setting.options, **options},
        )
        info = index.info()
        tell(f"built:\n{info}")
    apart = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)][_WARM:]
    times["index-build"] = statistics.mean(apart)
    if device.type == "cuda":
        peaks["index-build"] = torch.cuda.max_memory_allocated(device)
    for name, step in steps.items():
        again = timed(step, rounds, device)
        tell(f"{name}, after the build: {again * 1e3:.1f} ms")
        times[name] = min(times[name], again)
    turn.close()
    tokens = setting.samples * setting.tokens
    for name, seconds in times.items():
        tell(
            f"{name}: {seconds * 1e3:.1f} ms, {tokens / seconds:,.0f} tokens/s, "
            f"{seconds / times['pergrad-norms-compiled']:.3f} of norms, "
            f"{seconds / times['plain-compiled']:.3f} of training"
        )
    built = times["index-build"]
    note = (
        f"{info.projection}, {info.dim} numbers a row, norms {options.get('norms') or 'by default'}; "
        f"{tokens / built:,.0f} tokens/s; {built / times['pergrad-norms-compiled']:.3f} of compiled norms"
    )
    titles = {
        "plain-compiled": ("plain training, compiled", "training", ""),
        "pergrad-norms-compiled": ("norms, compiled", "norms", ""),
        "index-build": ("building an index", "index", "; ".join([note, *clock.notes])),
    }
    return [
        Row(
            size=size,
            precision=str(setting.dtype).removeprefix("torch."),
            model="llama-1b" if size == "gpu" else "llama-tiny",
            model_title=setting.title,
            method=name,
            method_title=titles[name][0],
            quantity=titles[name][1],
            status="ok",
            note=titles[name][2],
            seconds=seconds,
            seconds_iqr=None,
            fastest=None,
            ratio=seconds / times["plain-compiled"],
            ratio_iqr=None,
            peak_bytes=peaks.get(name),
            memory_ratio=None,
            provenance=made,
        )
        for name, seconds in times.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; stores its rows if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.index_build", description=__doc__)
    parser.add_argument("--size", choices=SETTINGS, default="tiny")
    parser.add_argument("--projection", default="count", help="of the index; count is its default")
    parser.add_argument("--norms", choices=("exact", "estimated"), help="default: by the device")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--store", action="store_true", help="keep the rows")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="the commit to store, where there is no checkout")
    parser.add_argument("--turns", type=Path, help="lock file shared with other benchmarks")
    parser.add_argument(
        "--kernels", type=int, default=0, help="on a GPU: print so many kernels of each step"
    )
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if options.size == "gpu" else "cpu")
    setting = SETTINGS[options.size]
    made = rows.provenance(device, of_commit=options.commit, rounds=options.rounds, steps=2, seed=0)
    chosen = {"projection": options.projection, "norms": options.norms}
    turns = Turns(options.turns)
    found = measure(
        *(setting, device, chosen, options.rounds, made, options.size),
        turns=turns,
        shown=options.kernels,
    )
    if options.store:
        precision = str(setting.dtype).removeprefix("torch.")
        path = options.results / rows.file_name(
            options.size, precision, made, part=options.projection
        )
        rows.write(path, found)
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
