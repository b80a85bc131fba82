"""Writing files so that whoever looks sees the old one or the new one, whole."""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from llamacli.errors import InvalidRequestError


def check_target(path: Path, *, overwrite: bool) -> None:
    """Raise InvalidRequestError unless a file may be written there: a new one, or a regular one to `overwrite`.

    An OSError that names `path` if its folder is not there or cannot be written to.
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
        raise InvalidRequestError(f"{path} is there already, and it is not a regular file")
    if not overwrite:
        raise InvalidRequestError(f"{path} is there already; it is kept unless told to be overwritten")


@contextlib.contextmanager
def replacing(path: Path, *, overwrite: bool) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` when the block ends, and is gone if it ends in an exception.

    It lies beside `path` under another name till then, and is on disk before it is renamed. InvalidRequestError as in
    check_target(); an OSError names `path`.
    """
    check_target(path, overwrite=overwrite)
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        with open(temporary, "xb") as file:
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


def _sync_folder(folder: Path) -> None:
    """A rename is on disk once its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
