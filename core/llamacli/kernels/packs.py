"""Kernel packs: object code of kernels, compiled ahead of time.

The distribution `llamacli-kernels` has a file for each instruction set, which holds entries of the kernel cache: the
SHA-256 of all that follows, a line of JSON, and the entries, each compressed by zlib. The JSON object has the
fingerprint of the target (`target`, see `jit.fingerprint`) and the place of each entry by the name of its file in the
cache (`entries`: [start, end], counted from the end of the line).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import logging
import zlib
from collections.abc import Mapping
from pathlib import Path

from llamacli.kernels.isa import isa
from llamacli.util.files import SharedFileError, open_own

_log = logging.getLogger(__name__)

PACKAGE = "llamacli_kernels"
_CHECKSUM = 32


def with_checksum(data: bytes) -> bytes:
    """Data behind its SHA-256."""
    return hashlib.sha256(data).digest() + data


def without_checksum(data: bytes) -> bytes | None:
    """Data that `with_checksum` has made, None if it is damaged."""
    return data[_CHECKSUM:] if hashlib.sha256(data[_CHECKSUM:]).digest() == data[:_CHECKSUM] else None


def pack_name(instructions: str) -> str:
    """Name of the file for an instruction set."""
    return f"{instructions}.pack"


def packed(target: str, entries: Mapping[str, bytes]) -> bytes:
    """Contents of a pack, of cache entries by file name."""
    places, parts, end = {}, [], 0
    for name in sorted(entries):
        parts.append(zlib.compress(entries[name], 9))
        start, end = end, end + len(parts[-1])
        places[name] = start, end
    head = json.dumps({"target": target, "entries": places}, separators=(",", ":")).encode()
    return with_checksum(head + b"\n" + b"".join(parts))


class Pack:
    """Pack of this process's instruction set; empty, with a log, if unusable."""

    def __init__(self, path: Path, target: str):
        self._path, self._data = path, b""
        self._places: dict[str, tuple[int, int]] = {}
        try:
            with open_own(path) as file:
                data = without_checksum(file.read())
        except SharedFileError as error:
            _say(str(error))
            return
        except OSError:
            return
        if data is None:
            _say(f"{path} is damaged")
            return
        line, _, self._data = data.partition(b"\n")
        head = json.loads(line)
        if head["target"] == target:
            self._places = head["entries"]
        else:
            _say(f"{path} is for another CPU, system or setting of Numba")

    def __contains__(self, file_name: str) -> bool:
        return file_name in self._places

    def entry(self, file_name: str) -> bytes:
        """Cache entry by file name, b"" if there is none."""
        if file_name in self._places:
            start, end = self._places[file_name]
            return zlib.decompress(self._data[start:end])
        name = file_name.rpartition("-")[0]
        if any(other.rpartition("-")[0] == name for other in self._places):
            _say(f"{self._path} is of another version")
        return b""


@functools.cache
def _say(reason: str) -> None:
    _log.info("kernels of %s are not used: %s", PACKAGE, reason)


def pack(target: str) -> Pack:
    """Pack of the installed distribution."""
    return _pack(_folder() / pack_name(isa()), target)


_pack = functools.cache(Pack)


def _folder() -> Path:
    """Folder of the installed package, which is not imported."""
    found = importlib.util.find_spec(PACKAGE)
    places = found.submodule_search_locations if found else None
    return Path(next(iter(places))) if places else Path(PACKAGE)
