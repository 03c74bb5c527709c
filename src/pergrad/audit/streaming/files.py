"""Files that are there whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pergrad.errors import AuditError, InterruptedAuditError

__all__ = ["is_unfinished", "made_folder", "replacing", "write_whole"]

_SUFFIX = ".unfinished"


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A path to write to; when the block ends, what is there is safe on disk and takes the name `path`.

    What can be made again at no cost need not be `durable`: to wait for the disk takes its time.
    """
    # One rank's unfinished file must not be another's.
    unfinished = path.with_name(f"{path.name}.{os.getpid()}{_SUFFIX}")
    try:
        yield unfinished
        if durable:
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
        unfinished.replace(path)
        if durable:
            _sync_folder(path.parent)
    except OSError as error:
        raise _explained(error, path) from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def is_unfinished(path: Path) -> bool:
    """Whether it is what a process is writing at the moment, or was when it was killed."""
    return path.name.endswith(_SUFFIX)


def write_whole(path: Path, content: bytes | memoryview, *, durable: bool = True) -> None:
    """Write all of it, or leave what was there."""
    with replacing(path, durable=durable) as unfinished:
        unfinished.write_bytes(content)


def made_folder(path: Path) -> Path:
    """The folder, made where it is missing, and known to take files."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".{os.getpid()}{_SUFFIX}"
        probe.touch()
        probe.unlink()
    except (FileExistsError, NotADirectoryError) as error:
        raise AuditError(
            f"the results folder {path} cannot be made: {error.filename or path} is a file"
        ) from error
    except OSError as error:
        raise AuditError(
            f"the results folder {path} cannot be written to: {error.strerror}"
        ) from error
    return path


def _sync_folder(path: Path) -> None:
    """Make a rename last: on the file systems that need it, by the folder itself."""
    if os.name != "posix":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every file system knows it
            raise
    finally:
        os.close(folder)


def _explained(error: OSError, path: Path) -> InterruptedAuditError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"no space left to write {path}: free some"
    else:
        what = f"{path} cannot be written ({error.strerror or error}): put that right"
    return InterruptedAuditError(
        f"{what}, and the same command goes on from there; what was written before is kept"
    )
