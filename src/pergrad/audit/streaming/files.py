"""Writes files atomically: a file is complete or missing, also after a crash."""

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
    """Yields a temporary path; renames the file to `path` when the block ends.

    If `durable`, the file is synced to disk before it is renamed. Files that are cheap to make again need not
    wait for the disk.
    """
    # The process id keeps the files of several ranks apart.
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
    """Returns whether the file is incomplete: being written, or left by a killed process."""
    return path.name.endswith(_SUFFIX)


def write_whole(path: Path, content: bytes | memoryview, *, durable: bool = True) -> None:
    """Writes the content atomically; on an error the old file stays."""
    with replacing(path, durable=durable) as unfinished:
        unfinished.write_bytes(content)


def made_folder(path: Path) -> Path:
    """Creates the folder if it is missing and checks that it is writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".{os.getpid()}{_SUFFIX}"
        probe.touch()
        probe.unlink()
    except (FileExistsError, NotADirectoryError) as error:
        raise AuditError(
            f"cannot create the results folder {path}: {error.filename or path} is a file"
        ) from error
    except OSError as error:
        raise AuditError(f"cannot write to the results folder {path}: {error.strerror}") from error
    return path


def _sync_folder(path: Path) -> None:
    """Syncs the folder, which makes a rename durable on POSIX file systems."""
    if os.name != "posix":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
        ):  # some file systems cannot sync folders
            raise
    finally:
        os.close(folder)


def _explained(error: OSError, path: Path) -> InterruptedAuditError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"no space left to write {path}: free some"
    else:
        what = f"cannot write {path} ({error.strerror or error}): fix this"
    return InterruptedAuditError(
        f"{what} and run the same command to resume; all rows written so far are kept"
    )
