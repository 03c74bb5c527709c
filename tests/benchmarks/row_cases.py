"""A stored row and its provenance, for tests to vary."""

from benchmarks.rows import Provenance, Row

RUN = Provenance(
    commit="0123456789ab",
    dirty=False,
    date="2026-01-02T03:04:05+00:00",
    versions={"python": "3.11.0", "torch": "2.13.0"},
    machine="A CPU, 2 threads, 8 GiB",
    rounds=5,
    steps=3,
    seed=0,
)
PLAIN = Row(
    size="cpu",
    precision="float32",
    model="mlp",
    model_title="MLP, B=4",
    method="plain",
    method_title="plain",
    quantity="training",
    status="ok",
    note="",
    seconds=0.0105,
    seconds_iqr=(0.01, 0.011),
    fastest=0.0099,
    ratio=1.0,
    ratio_iqr=(1.0, 1.0),
    peak_bytes=2_000_000,
    memory_ratio=1.0,
    provenance=RUN,
)
