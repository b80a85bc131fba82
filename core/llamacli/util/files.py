"""Atomic replacement of files."""

import contextlib
import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from llamacli.errors import InvalidRequestError

if sys.platform != "win32":
    import fcntl


def check_target(path: Path, *, overwrite: bool) -> None:
    """Check that `path` can be written.

    Raises InvalidRequestError unless it is new, or a regular file and `overwrite`.
    Raises an OSError that names `path` if its directory is missing or not writable.
    """
    folder = os.path.dirname(os.path.realpath(path))
    if not os.access(folder, os.W_OK | os.X_OK):
        code = errno.EACCES if os.path.isdir(folder) else errno.ENOENT
        raise OSError(code, os.strerror(code), str(path))
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise InvalidRequestError(f"{path} exists and is not a regular file")
    if not overwrite:
        raise InvalidRequestError(f"{path} exists; it is only replaced with overwrite=True")


@contextlib.contextmanager
def replacing(path: Path, *, overwrite: bool) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block ends.

    An exception removes it instead.
    It is written in the same directory and synced to disk before it is renamed. Temporary files of `path` that killed
    processes left are removed. Raises what `check_target` raises; an OSError names `path`.
    """
    check_target(path, overwrite=overwrite)
    target = Path(os.path.realpath(path))
    _remove_leftovers(target)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        with open(temporary, "xb") as file:
            _lock(file.fileno())
            yield file
            file.flush()
            os.fsync(file.fileno())
        check_target(target, overwrite=overwrite)
        os.replace(temporary, target)
    except OSError as error:
        if error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":
        _sync_folder(target.parent)


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[BinaryIO | None]:
    """Open a temporary file that replaces `path`, unless another process writes it.

    The context is None then, and where files cannot be locked (flock). An exception removes the file; that of a killed
    process is written anew by the next one. Not synced to disk: the contents need a checksum. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.part")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT, 0o600)
    with open(descriptor, "r+b") as file:
        if not _lock(descriptor) or not _is_at(descriptor, temporary):
            yield None
            return
        try:
            file.truncate(0)
            yield file
            file.flush()
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def remove_unclaimed(folder: Path) -> None:
    """Remove the temporary files of `claimed` whose writers no longer run."""
    with contextlib.suppress(OSError):
        for leftover in folder.glob(".*.part"):
            with contextlib.suppress(OSError), open(leftover, "rb") as file:
                if _lock(file.fileno()):
                    leftover.unlink()


def is_own(status: os.stat_result) -> bool:
    """Test that only this user and the superuser can write a file."""
    return sys.platform == "win32" or (status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022)


def _is_at(descriptor: int, path: Path) -> bool:
    """Test that an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _remove_leftovers(target: Path) -> None:
    """Remove temporary files of `target` whose writers no longer run.

    Writers hold a lock (flock) on theirs. Where there are no such locks, nothing is removed.
    """
    name = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.part")
    with contextlib.suppress(OSError):
        for leftover in [entry for entry in os.scandir(target.parent) if name.fullmatch(entry.name)]:
            if leftover.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError), open(leftover.path, "rb") as file:
                    if _lock(file.fileno()):
                        os.unlink(leftover.path)


def _lock(descriptor: int) -> bool:
    """Lock a file until it is closed; False if that fails."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked by another process, or the file system has no locks
        return False
    return True


def _sync_folder(folder: Path) -> None:
    """Sync a directory, which makes a rename in it durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
