"""Prompt cache on disk: prefixes that survive the end of a process.

A kept prefix is a saved state (`llamacli.kv.snapshot`) in a file of its own, with a checksum, the version of llamacli
and the identity of model, mode and cache type. Files are found by their tokens, and the least recently used ones are
deleted beyond a limit. A damaged file is deleted when it is found.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import attrs

from llamacli.errors import ClosedError, OutOfMemoryError, StateError
from llamacli.kv import snapshot
from llamacli.kv.layout import KVLayout
from llamacli.kv.prefixes import PrefixIndex, n_common
from llamacli.kv.sequence import KVSequence
from llamacli.util.files import make_own_folder, open_own

_log = logging.getLogger(__name__)

MIN_TOKENS = 64
"""Tokens that a file must have, and save, to be worth its reading."""

MAX_BYTES = 4 << 30
"""Default limit of a folder."""

IDLE_S = 5.0
"""Seconds without use after which a prefix is written: a chat that goes on is not written at each turn."""

_SUFFIX = ".prompt"


_Kind = tuple[object, ...]


@attrs.frozen
class _Entry:
    """File of the cache.

    `kind` is what equal tokens must have in common to have equal cells; `first_cells` are a field of `KVSequence`.
    """

    path: Path
    kind: _Kind
    tokens: list[int]
    first_cells: list[int]

    def has(self, n: int, layout: KVLayout) -> bool:
        """True if a sequence can go on after the first `n` tokens."""
        groups = zip(layout.groups, self.first_cells, strict=False)  # their number is checked when the file is loaded
        return n == len(self.tokens) or (not layout.recurrent and all(group.has(n, first) for group, first in groups))


def _kind(sequence: KVSequence) -> _Kind:
    kv_type = sequence.kv_type
    return _version(), sequence.pool.identity, kv_type.k, kv_type.v, sequence.rope_variant, sequence.adapters


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("llamacli")
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return "0"


class PromptCache:
    """Folder of prefixes of all models, with a limit of bytes.

    Methods may be called from any thread. Errors of the disk are logged: this is a cache.
    """

    def __init__(self, folder: Path, max_bytes: int):
        """Make the folder, or bring it within its limit.

        A killed process may have left more. Raises OSError, also if other users can write to the folder.
        """
        make_own_folder(folder)
        self.folder, self.max_bytes = folder, max_bytes
        self._lock = threading.Lock()
        self._entries: dict[Path, _Entry | None] = {}
        self._saved: weakref.WeakSet[KVSequence] = weakref.WeakSet()
        self._stopped = threading.Event()
        self._writer: threading.Thread | None = None
        self._limit()

    def load(self, prefixes: PrefixIndex, like: KVSequence, tokens: Sequence[int], max_bytes: int) -> int:
        """Read the prefix that saves the most tokens into the prefix cache.

        Returns the number of its tokens, 0 for none. `like` is a sequence of the prompt, with the same pool, RoPE
        variant and adapters; `max_bytes` is the limit of the prefix cache.
        """
        best = prefixes.longest(like, tokens)
        found = self._find(like, tokens, best + MIN_TOKENS)
        if found is None:
            return 0
        sequence = KVSequence(like.pool, like.seq_len, like.rope_variant, like.adapters)
        try:
            with open_own(found.path) as file:
                snapshot.load(file.read(), like.pool).restore({0: sequence})
            os.utime(found.path)
            prefixes.keep(sequence, max_bytes)
        except (StateError, KeyError) as error:
            self._delete(found.path, str(error))
            return 0
        except (OSError, OutOfMemoryError) as error:
            _log.info("the prompt cache %s was not read: %s", found.path, error)
            return 0
        finally:
            sequence.close()
        return len(found.tokens)

    def save(self, prefixes: PrefixIndex, idle_s: float = 0.0) -> None:
        """Write kept prefixes that were not used for `idle_s` seconds."""
        for sequence in prefixes.idle(idle_s):
            if sequence not in self._saved and len(sequence.tokens) >= MIN_TOKENS:
                self._saved.add(sequence)
                self._write(sequence)

    def save_in_background(self, prefixes: PrefixIndex) -> None:
        """Write prefixes once they are idle, from a thread, until `close`."""

        def run() -> None:
            while not self._stopped.wait(IDLE_S / 5):
                self.save(prefixes, IDLE_S)

        self._writer = threading.Thread(target=run, name="llamacli-prompts", daemon=True)
        self._writer.start()

    def close(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        if self._writer is not None:
            self._writer.join()

    def _write(self, sequence: KVSequence) -> None:
        if sequence.first_stale_cell is not None:
            return
        digest = hashlib.sha256(repr((_kind(sequence), sequence.tokens)).encode()).hexdigest()
        path = self.folder / f"{digest[:32]}{_SUFFIX}"
        try:
            if not path.exists():
                snapshot.write(path, {0: sequence}, version=_version())
                self._drop_prefixes_of(path, sequence)
                self._limit()
        except ClosedError:  # it was evicted meanwhile
            pass
        except (OSError, StateError) as error:
            _log.warning("the prompt cache %s was not written: %s", path, error)

    def _find(self, like: KVSequence, tokens: Sequence[int], least: int) -> _Entry | None:
        layout, given, most = like.pool.layout, [*tokens], min(len(tokens) - 1, like.seq_len)
        best, best_n = None, least - 1
        for entry in self._read_index(like):
            if len(entry.tokens) > like.seq_len:
                continue
            n = min(most, n_common(entry.tokens, given))
            if n > best_n and entry.has(n, layout):
                best, best_n = entry, n
        return best

    def _read_index(self, like: KVSequence) -> list[_Entry]:
        """Entries for sequences like this one; headers of files are read once."""
        with self._lock:
            paths = {*self.folder.glob(f"*{_SUFFIX}")}
            for gone in self._entries.keys() - paths:
                del self._entries[gone]
            for path in paths - self._entries.keys():
                self._entries[path] = self._read_entry(path)
            return [entry for entry in self._entries.values() if entry and entry.kind == _kind(like)]

    def _read_entry(self, path: Path) -> _Entry | None:
        try:
            with open_own(path) as file:
                header, tokens = snapshot.read_head(file)
            (saved,) = header["sequences"]
            kind = header["identity"], header["k"], header["v"], saved["rope_variant"], saved.get("adapters", "")
            return _Entry(path, (header["extra"]["version"], *kind), tokens, [int(n) for n in saved["first_cells"]])
        except OSError as error:
            _log.info("the prompt cache %s is not used: %s", path, error)
        except (StateError, KeyError, TypeError, ValueError) as error:
            self._delete(path, str(error))
        return None

    def _drop_prefixes_of(self, path: Path, sequence: KVSequence) -> None:
        layout = sequence.pool.layout
        if layout.recurrent or layout.has_windows:
            return
        for entry in self._read_index(sequence):
            if entry.path != path and entry.tokens == sequence.tokens[: len(entry.tokens)]:
                entry.path.unlink(missing_ok=True)

    def _limit(self) -> None:
        files = list[tuple[float, int, Path]]()
        for path in self.folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another server deleted it
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _delete(self, path: Path, reason: str) -> None:
        _log.warning("the prompt cache %s is deleted: %s", path, reason)
        with contextlib.suppress(OSError):
            path.unlink()
