"""Names of packed copies, and the folder that they share."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import attrs
import numpy as np

from llamacli.engine.packed_copies.format import read_index
from llamacli.errors import InvalidRequestError
from llamacli.util.files import remove_unclaimed
from llamacli.util.folders import cache_folder

VARIABLE = "LLAMACLI_PACKED_CACHE"
"""Environment variable with the limit of all copies together, such as 20G; 0: no copies."""

DEFAULT_LIMIT = 16 << 30

UNUSED_S = 30 * 24 * 3600
"""Seconds without use after which a copy is deleted."""

_SIZE = re.compile(r"(\d+)([KMGT]?)", re.ASCII)


def limit() -> int:
    """Limit of all copies together in bytes; 0: no copies.

    Raises InvalidRequestError if LLAMACLI_PACKED_CACHE is not a size.
    """
    given = os.environ.get(VARIABLE, "")
    if not given:
        return DEFAULT_LIMIT
    found = _SIZE.fullmatch(given.upper())
    if found is None:
        raise InvalidRequestError(f"{VARIABLE} = {given!r} is not a size such as 500M, 20G or 0")
    return int(found[1]) << 10 * " KMGT".index(found[2] or " ")


def copy_key(files: Iterable[Path], identity: str, mode: str) -> str | None:
    """Name of a copy: digest of all that its bytes depend on.

    `files` are the model's, `identity` is the digest of their metadata and of the ends of their tensors. None on
    Windows, which renames no file that is open or mapped. Raises OSError.
    """
    if sys.platform == "win32":
        return None
    stats = [(file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns) for file in map(os.stat, files)]
    return hashlib.sha256(repr((stats, identity, mode, sources_digest(), sys.byteorder)).encode()).hexdigest()[:32]


@functools.cache
def sources_digest() -> str:
    """Digest of the sources that decide the bytes of copies."""
    core = Path(__file__).parents[2]
    folders = (Path(__file__).parent, "*.py"), (core / "kernels", "*packing*.py"), (core / "quantization", "*.py")
    sources = [core / "engine/weights.py", *(path for folder, names in folders for path in sorted(folder.glob(names)))]
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in sources)).hexdigest()


def folder() -> Path | None:
    """Folder of the copies; None for a user without a home."""
    cache = cache_folder()
    return cache and cache / "packed"


@attrs.frozen
class CopyInfo:
    """Copy in the cache folder.

    Its file, its model's path, its size in bytes and the time of its last use.
    """

    path: Path
    model: str
    n_bytes: int
    used: float


def copies() -> list[CopyInfo]:
    """List the copies of this user, the last used one last."""
    found, base = [], folder()
    with contextlib.suppress(OSError):
        for path in base.glob("*.packed") if base else ():
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append(CopyInfo(path, _model_of(path), status.st_size, status.st_atime))
    return sorted(found, key=lambda copy: copy.used)


def _model_of(path: Path) -> str:
    """Path of a copy's model; "" if it cannot be read."""
    try:
        return read_index(np.memmap(path, np.uint8, "r")).model
    except ValueError:
        return ""


def remove_copies() -> int:
    """Delete all copies of this user.

    Returns the number of bytes. Models that are loaded keep theirs until they are closed.
    """
    base = folder()
    if base:
        remove_unclaimed(base)
    return sum(_remove(copy) for copy in copies())


def evict(n_bytes: int) -> None:
    """Delete copies that have not been used for long.

    And the oldest ones, until the others have `n_bytes`.
    """
    kept = copies()
    total = sum(copy.n_bytes for copy in kept)
    for copy in kept:
        if total > n_bytes or time.time() - copy.used > UNUSED_S:
            total -= _remove(copy)


def _remove(copy: CopyInfo) -> int:
    try:
        copy.path.unlink()
    except OSError:
        return 0
    return copy.n_bytes
