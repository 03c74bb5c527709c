"""Times Hugging Face models that the main benchmark does not know, each against training of its own kind.

``python -m benchmarks.hugging_face --size cpu`` times small models of these classes, ``--size gpu`` models of
real size in bfloat16; ``--compiled`` adds compiled steps, and ``--together N`` compiles those of N models at
a time. Rows are stored under benchmarks/results/models/ with ``--store``. The ratio of a recorded step is to
eager training in the same round, that of a compiled one to compiled training. On a CPU it is the time of one
thread, which other processes do not lengthen. Norms are compared with the loop over two samples first.
``--write FILE`` writes the table of the newest rows between the markers of a file and draws it; nothing is
downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers

from benchmarks import rows
from benchmarks.hugging_face.measuring import prepare, timed
from benchmarks.hugging_face.subjects import SUBJECTS
from benchmarks.hugging_face.table import MARKERS, RESULTS, document, draw, newest
from benchmarks.hugging_face.together import measured
from benchmarks.plot import ASSETS
from benchmarks.rows import Provenance, Row
from benchmarks.table import settle
from benchmarks.turns import Turns


def _rows(
    options: argparse.Namespace, device: torch.device, made: Provenance
) -> Iterator[list[Row]]:
    plan = {"is_compiled": options.compiled, "budget": options.budget}
    if options.together == 1:
        for name in options.models:
            ready = prepare(name, options.size, device, **plan)
            yield timed(ready, options.rounds, made, options.kernels)
        return
    for start in range(0, len(options.models), options.together):
        names = options.models[start : start + options.together]
        yield from measured(
            *(names, options.size, options.rounds, made, plan, options.kernels),
            turns=Turns(options.turns),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Times the models, or writes the table of the stored rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hugging_face", description=__doc__)
    parser.add_argument("--size", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--compiled", action="store_true", help="compiled steps too: minutes each")
    parser.add_argument(
        "--together", type=int, default=1, help="on a GPU: how many models are compiled at a time"
    )
    parser.add_argument(
        "--turns", type=Path, help="with --together: lock file shared with other benchmarks"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=float("inf"),
        help="seconds after which no further method of a model is prepared",
    )
    parser.add_argument(
        "--kernels", type=int, default=0, help="on a GPU: print so many kernels of each step"
    )
    parser.add_argument("--store", action="store_true", help="keep the rows")
    parser.add_argument("--commit", help="the commit to store, where there is no checkout")
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
    made = rows.provenance(device, of_commit=options.commit, rounds=options.rounds, steps=1, seed=0)
    precision = "bfloat16" if device.type == "cuda" else "float32"
    path = options.results / rows.file_name(options.size, precision, made)
    found: list[Row] = []
    for of_model in _rows(options, device, made):
        for row in of_model:
            ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
            times = [f"{1e3 * t:.2f} ms" for t in (row.seconds, row.device_seconds) if t]
            print(row.model, row.method, row.status, ratio, *times, row.note[:120], flush=True)
        found += of_model
        if options.store:
            rows.update(path, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
