import json

import pytest

from benchmarks import scale


@pytest.fixture(scope="module")
def parts():
    return {
        "bytes_per_row": 1000.0,
        "write_per_row": 1e-6,
        "read_per_row": 1e-7,
        "hash_per_byte": 1e-9,
        "checksum_per_byte": 1e-10,
        "claim": 1e-5,
        "step": 0.05,
        "analysis": 10.0,
    }


def test_the_page_has_the_tables_of_the_stored_figures() -> None:
    text = scale.PAGE.read_text()
    assert scale.page(text, scale.tables(scale.stored())) == text, (
        "python -m benchmarks.scale --write"
    )


def test_parts_grow_as_they_are_said_to(parts, monkeypatch) -> None:
    before = scale.costs(parts)
    monkeypatch.setattr(scale, "TOKENS", 4 * scale.TOKENS)
    after = scale.costs(parts)
    growth = {name: after[name]["seconds"] / before[name]["seconds"] for name in before}
    assert growth["gradients, on all GPUs"] == pytest.approx(4)
    assert growth["analysis, in one process"] == pytest.approx(8)
    assert growth["queue"] == growth["hash of the model, in one process"] == 1
    assert after["writing rows"]["disk"] == 4 * before["writing rows"]["disk"]


def test_gradients_take_tokens_over_the_measured_rate(parts) -> None:
    found = scale.costs(parts)["gradients, on all GPUs"]["seconds"]
    assert found == pytest.approx(1e9 / (16 * 512) * 0.05 / 64)


@pytest.mark.parametrize("analysis", [0.001, 10.0])
def test_the_bottleneck_is_the_part_that_takes_longest(parts, analysis) -> None:
    text = scale.tables({**parts, "analysis": analysis})
    assert ("bottleneck is **analysis" in text) == (analysis == 10.0)
    assert ("bottleneck is **gradients" in text) == (analysis != 10.0)


def test_every_part_is_measured(capsys) -> None:
    scale.main(["--measure"])
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 6
    assert all(value > 0 for value in found.values())
