"""Defines the options that all benchmarks share: precision, rounds, steps, seed, output."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.precision import ALIASES, PRECISIONS

GPU_ROUNDS, GPU_STEPS = 7, 10  # many steps in a row: Python must be able to run ahead of the device


def add_run_arguments(
    parser: argparse.ArgumentParser,
    *,
    rounds: int,
    steps: int,
    gpu_rounds: int = GPU_ROUNDS,
    gpu_steps: int = GPU_STEPS,
) -> None:
    """Adds the shared options, with defaults for a CPU and for a GPU."""
    parser.set_defaults(default_rounds=(rounds, gpu_rounds), default_steps=(steps, gpu_steps))
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        type=lambda name: ALIASES.get(name, name),
        help="cpu: float32, gpu: tf32",
    )
    parser.add_argument("--rounds", type=int, help=f"cpu: {rounds}, gpu: {gpu_rounds}")
    parser.add_argument(
        "--steps", type=int, help=f"timed steps per visit; cpu: {steps}, gpu: {gpu_steps}"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="store the rows in this file")
    parser.add_argument("--commit", help="commit of the checkout, if it has no .git")


def parsed_run(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Parses and checks the options; adds the precision and the `device` that the size implies."""
    options = parser.parse_args(arguments)
    is_gpu = options.size == "gpu"
    if options.rounds is None:
        options.rounds = options.default_rounds[is_gpu]
    if options.steps is None:
        options.steps = options.default_steps[is_gpu]
    if options.rounds < 1 or options.steps < 1:
        parser.error(f"--rounds {options.rounds} --steps {options.steps}: both must be at least 1")
    if options.output is not None and options.output.exists():
        parser.error(f"--output {options.output} already exists; choose a new file")
    if is_gpu and not torch.cuda.is_available():
        parser.error("--size gpu needs a CUDA device; use --size cpu on this machine")
    options.device = torch.device("cuda" if is_gpu else "cpu")
    options.precision = options.precision or ("tf32" if is_gpu else "float32")
    return options
