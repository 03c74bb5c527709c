"""A manifest is read as it was written; anything else is refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pergrad.errors import IndexingError
from pergrad.index.store.manifest import MANIFEST, Manifest, Part, read_manifest, write_manifest

OWN = Manifest(
    {"models": ["a", "b"], "dtype": "float16"},
    (Part(0, 40, 0, 50, "digest", "digits", "0:40"),),
    *(8, 16, 40, 32),
    about={"model": "Net"},
    preconditioner={"kind": "ekfac"},
)


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_manifest(tmp_path, OWN, "1.2")
    assert read_manifest(tmp_path) == OWN
    assert OWN.checkpoints == 2


def test_a_part_lengthens_the_index() -> None:
    longer = OWN.with_part(Part(40, 45, 50, 5, "other", "more"))
    assert (longer.positions, len(longer.parts)) == (45, 2)
    assert OWN.positions == 40


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "a cake"}, "was not written by an index"),
        ({"format": 1}, "has format 1, written by pergrad 1.2; this version reads"),
        ({"parts": [{"start": 0}]}, "is corrupt .TypeError"),
    ],
)
def test_others_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    write_manifest(tmp_path, OWN, "1.2")
    path = tmp_path / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(IndexingError, match=message):
        read_manifest(tmp_path)


def test_missing_and_damaged_ones_are_named(tmp_path: Path) -> None:
    with pytest.raises(IndexingError, match="holds no index"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text('{"kind": ')
    with pytest.raises(IndexingError, match=r"index\.json is corrupt"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text('{"kind": "an index by pergrad"}')
    with pytest.raises(IndexingError, match=r"is corrupt .KeyError"):
        read_manifest(tmp_path)
