"""Times the fastest of many runs: other load on the machine only ever makes a run slower."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.rows import Provenance, Row


def fastest(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm_up: int,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Returns the seconds of the fastest of `rounds` alternating runs of each, after a warm-up."""
    best = dict.fromkeys(functions, float("inf"))
    for number in range(-warm_up, rounds):
        for name, function in functions.items():
            start = clock()
            function()
            taken = clock() - start
            if number >= 0:
                best[name] = min(best[name], taken)
    return best


def fastest_rows(
    seconds: Mapping[str, float],
    titles: Mapping[str, str],
    *,
    size: str,
    model: str,
    model_title: str,
    quantity: str,
    note: str,
    provenance: Provenance,
) -> list[Row]:
    """Returns a row per method; `ratio` is the fastest run relative to the fastest of "plain"."""
    return [
        Row(
            size=size,
            precision="float32",
            model=model,
            model_title=model_title,
            method=name,
            method_title=titles[name],
            quantity=quantity,
            status="ok",
            note=note,
            seconds=taken,
            seconds_iqr=None,
            fastest=taken,
            ratio=taken / seconds["plain"],
            ratio_iqr=None,
            peak_bytes=None,
            memory_ratio=None,
            provenance=provenance,
        )
        for name, taken in seconds.items()
    ]
