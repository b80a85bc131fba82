"""Atomic replacement of files; files of JSON."""

import contextlib
import errno
import functools
import json
import os
import re
import secrets
import stat
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from llamacli.errors import InvalidRequestError, ModelFormatError

if sys.platform != "win32":
    import fcntl
    import grp
    import pwd

_seeking = threading.Lock()
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a full disk, a quota, and a limit of files (`ulimit -f`)."""

_BLOCK = 1 << 20
_MAX_LINKS = 40
"""Symbolic links on the way to a file, as many as Linux follows."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, {} for a missing file; ModelFormatError for another text."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelFormatError(f"{path}: no JSON object")
    return found


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
        _remove_unlocked(folder.glob(".*.part"))


class SharedFileError(PermissionError):
    """File that other users can change, itself or by its path."""


def open_own(path: Path) -> BinaryIO:
    """Open a file that no other user but the superuser can write.

    Raises OSError; a SharedFileError names what others can change.
    """
    status = check_own(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    if not os.path.samestat(status, os.fstat(descriptor)):
        os.close(descriptor)
        raise SharedFileError(errno.EPERM, "it was replaced while it was opened", str(path))
    return os.fdopen(descriptor, "rb")


def check_own(path: Path) -> os.stat_result:
    """Check that no other user but the superuser can change a path.

    What is there, and folders and symbolic links on the way, belong to these two. A group of the user's name may write,
    as systems with the umask 002 have it for each user alone; others may add files to a folder with the sticky bit,
    such as /tmp, above the file's own. Returns the status of the path. Raises OSError; a
    SharedFileError names what others can change.
    """
    if sys.platform == "win32":
        return os.stat(path)
    names, here, n_links = [*reversed(path.absolute().parts[1:])], Path("/"), 0
    owners, status = {0, os.getuid(), *_outer_owners()}, os.stat(here)
    while names:
        name = names.pop()
        if name == "..":
            here = here.parent
            continue
        here /= name
        status = os.lstat(here)
        is_link = stat.S_ISLNK(status.st_mode)
        is_sticky = bool(names) and stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if status.st_uid not in owners or (_others_write(status) and not is_link and not is_sticky):
            raise _shared(here)
        if is_link:
            n_links += 1
            if n_links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = Path(os.readlink(here))
            here = Path("/") if target.is_absolute() else here.parent
            names += reversed(target.parts[target.is_absolute() :])
    if not stat.S_ISDIR(status.st_mode) and _others_write(os.stat(here.parent)):
        raise _shared(here.parent)
    return status


def _others_write(status: os.stat_result) -> bool:
    is_groups = status.st_mode & 0o020 and not _is_private(status.st_gid)
    return bool(is_groups or status.st_mode & 0o002)


@functools.cache
def _is_private(group: int) -> bool:
    """Test for a group of this user alone, not of the superuser's."""
    try:
        user, found = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    own = user.pw_uid != 0 and group == user.pw_gid and found.gr_name == user.pw_name
    return own and set(found.gr_mem) <= {user.pw_name}


def _shared(path: Path) -> SharedFileError:
    return SharedFileError(errno.EPERM, "other users can write to it", str(path))


@functools.cache
def _outer_owners() -> set[int]:
    """Overflow user, in a user namespace (a container without root).

    Files of the superuser outside appear as those of the overflow user.
    """
    with contextlib.suppress(OSError, ValueError):
        if int(Path("/proc/self/uid_map").read_text().split()[2]) < 1 << 31:
            return {int(Path("/proc/sys/kernel/overflowuid").read_text())}
    return set()


def make_own_folder(folder: Path) -> None:
    """Make a folder path for this user alone; errors of `check_own`."""
    for missing in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    check_own(folder)


def _is_at(descriptor: int, path: Path) -> bool:
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
        leftovers = [entry for entry in os.scandir(target.parent) if name.fullmatch(entry.name)]
        _remove_unlocked(Path(leftover) for leftover in leftovers if leftover.is_file(follow_symlinks=False))


def _remove_unlocked(leftovers: Iterable[Path]) -> None:
    for leftover in leftovers:
        with contextlib.suppress(OSError), open(leftover, "rb") as file:
            if _lock(file.fileno()):
                leftover.unlink()


def _lock(descriptor: int) -> bool:
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked by another process, or the file system has no locks
        return False
    return True


# --- calls that Windows lacks, posix_fallocate on macOS too


def read_into(descriptor: int, data: memoryview, start: int) -> int:
    """Read bytes of a file from `start` on; returns their number.

    Threads may share the descriptor.
    """
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [data], start)
    with _seeking:
        os.lseek(descriptor, start, os.SEEK_SET)
        found = os.read(descriptor, min(len(data), _BLOCK))
    data[: len(found)] = found
    return len(found)


def write_pieces(descriptor: int, pieces: Sequence[memoryview]) -> int:
    """Write pieces, or a part of them; returns the number of bytes."""
    return os.writev(descriptor, pieces) if hasattr(os, "writev") else os.write(descriptor, pieces[0])


def allocate(descriptor: int, start: int, n_bytes: int) -> None:
    """Reserve room on the disk behind a file's end. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, start, n_bytes)
        return
    position, end = os.lseek(descriptor, 0, os.SEEK_END), start + n_bytes
    while position < end:
        position += os.write(descriptor, bytes(min(_BLOCK, end - position)))


def _sync_folder(folder: Path) -> None:
    """Sync a directory, which makes a rename in it durable.

    Windows opens no directories.
    """
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
