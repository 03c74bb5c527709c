"""Describes an index in one JSON file: what its rows are of, how they were made, and which parts it has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pergrad.audit.streaming.files import write_whole
from pergrad.errors import IndexingError

__all__ = ["MANIFEST", "Manifest", "Part", "read_manifest", "write_manifest"]

MANIFEST = "index.json"
_FORMAT = 3  # formats 1 and 2 had other count sketches
_KIND = "an index by pergrad"


@dataclass(frozen=True)
class Part:
    """Samples that were added by one build or append: positions start to stop, from one data set."""

    start: int
    stop: int
    offset: int  # of its data set: index = offset + the item's number there
    size: int  # items of its data set
    data: str  # fingerprint of the data set
    name: str
    subset: str | int | None = None


@dataclass(frozen=True)
class Manifest:
    """Everything about an index but its rows."""

    identity: Mapping[str, Any]  # of model, loss and options; a build or append must have the same
    parts: tuple[Part, ...]
    batch_size: int
    chunk: int  # samples in a chunk
    positions: int  # samples that the chunks cover once the index is finished
    width: int  # numbers for each checkpoint
    generation: int = 0  # of the folder with rows; compaction makes a new one
    about: Mapping[str, Any] = field(default_factory=dict)  # versions, parameters, certificate
    preconditioner: Mapping[str, Any] = field(default_factory=dict)

    @property
    def checkpoints(self) -> int:
        return len(self.identity["models"])

    def with_part(self, part: Part) -> Manifest:
        """Returns the manifest with another part at its end."""
        return replace(self, parts=(*self.parts, part), positions=part.stop)


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a folder; refuses what is not an index or has another format."""
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text())
        if found["kind"] != _KIND:
            raise IndexingError(f"{path} was not written by an index: choose another folder")
        if found["format"] != _FORMAT:
            raise IndexingError(
                f"{path} has format {found['format']}, written by pergrad {found.get('pergrad')}; this "
                f"version "
                f"reads {_FORMAT}: build the index again"
            )
        content = {name: found[name] for name in Manifest.__dataclass_fields__}
        content["parts"] = tuple(Part(**part) for part in content["parts"])
        return Manifest(**content)
    except FileNotFoundError as error:
        raise IndexingError(
            f"{folder} holds no index: make one with pergrad.Index.build or `pergrad index build`"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IndexingError(
            f"{path} is corrupt ({type(error).__name__}: {error}): build the index in another folder"
        ) from error


def write_manifest(folder: Path, manifest: Manifest, version: str) -> None:
    """Writes the manifest atomically."""
    content = {"kind": _KIND, "format": _FORMAT, "pergrad": version, **asdict(manifest)}
    write_whole(folder / MANIFEST, (json.dumps(content, indent=2) + "\n").encode())
