"""KV cache of numbered sequences, with llama.cpp's sequence operations."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import platform
from collections.abc import Callable

import attrs

from llamacli.errors import ClosedError, InvalidRequestError, StateError
from llamacli.kernels.kv_types.rounding import Floats
from llamacli.kv import snapshot
from llamacli.kv.pool import KVPool
from llamacli.kv.sequence import KVSequence, held_bytes
from llamacli.util.numbers import is_integer

ShiftKeys = Callable[[int, Floats, int], Floats]
"""K-shift: `shift_keys(layer, keys, by)` returns keys, float32 [n_head_kv, head_dim, n], `by` positions lower."""


_log = logging.getLogger(__name__)
"""Debug log of every operation that changes or saves a cache."""


def log_build_info() -> None:
    """Log versions and machine at level INFO."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("llamacli", "numpy", "numba"))
    _log.info("%s, Python %s, %s %s", versions, platform.python_version(), platform.system(), platform.machine())


@attrs.frozen
class FileData:
    """Result of `KVCache.read_file`: tokens, and bytes of the file."""

    tokens: list[int]
    bytes_read: int


class KVCache(contextlib.AbstractContextManager["KVCache"]):
    """KV cache of `n_seq_max` sequences of up to `n_ctx_seq` tokens each.

    Sequences are numbered from 0; copies between them share pages. Positions have no gaps, unlike llama.cpp's: token i
    of a sequence is in cell i, at position i, because attention, sliding windows, prefix caching and saved states are
    computed from the number of a cell alone. Removing tokens in the middle therefore always shifts later ones to lower
    positions, as llama.cpp's `seq_rm` followed by `seq_add` does. That needs `shift_keys`, which `Model.kv_cache`
    provides; recurrent states cannot be shifted.

    Operations are logged at level DEBUG, to the logger of this module.

    Not thread-safe: one thread at a time may use the cache and the sessions over its sequences.
    """

    def __init__(
        self,
        pool: KVPool,
        n_ctx_seq: int,
        n_seq_max: int = 1,
        *,
        shift_keys: ShiftKeys | None = None,
        rope_variant: int = 0,
        adapters: str = "",
    ):
        if not is_integer(n_seq_max) or n_seq_max < 0:
            raise InvalidRequestError(f"n_seq_max must be an integer of at least 0, not {n_seq_max!r}")
        self.pool, self.n_ctx_seq, self.n_seq_max = pool, n_ctx_seq, n_seq_max
        self._shift_keys, self._rope_variant, self._adapters = shift_keys, rope_variant, adapters
        self._sequences: dict[int, KVSequence] | None = {}

    def sequence(self, seq: int) -> KVSequence:
        """Get a sequence by number; InvalidRequestError if it is out of range."""
        sequences = self._checked(seq)
        if seq not in sequences:
            sequences[seq] = KVSequence(self.pool, self.n_ctx_seq, self._rope_variant, self._adapters)
        return sequences[seq]

    @property
    def n_bytes(self) -> int:
        """Bytes of the pages that its sequences hold; shared pages count once."""
        return held_bytes(self.pool, list(self._open().values()))

    def pos_max(self, seq: int) -> int:
        """Highest position of a sequence, -1 if it is empty."""
        sequences = self._checked(seq)
        return len(sequences[seq].tokens) - 1 if seq in sequences else -1

    def remove_range(self, seq: int, p0: int = 0, p1: int = -1) -> None:
        """Remove a range of positions; later tokens shift to lower positions.

        The range is `p0` to `p1` - 1, cut to the tokens that are there; a `p1` of -1 is the end. Raises
        InvalidRequestError, changing nothing, if the range is invalid, a token would then attend to evicted cells, or
        the cache has no `shift_keys` and later tokens would shift.
        """
        _log.debug("remove_range(%s, %s, %s)", seq, p0, p1)
        sequence = self.sequence(seq)
        self._remove(sequence, *self._range(sequence, p0, p1))

    def _remove(self, sequence: KVSequence, start: int, stop: int) -> None:
        by = stop - start
        if stop < len(sequence.tokens) and by and self._shift_keys is None:
            raise InvalidRequestError("removing tokens in the middle needs a cache that was made with shift_keys")
        shift_keys = self._shift_keys
        sequence.remove(start, stop, lambda layer, keys: keys if shift_keys is None else shift_keys(layer, keys, by))

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int = -1) -> None:
        """Copy a range of positions of `src` to `dst`, sharing pages.

        The range is `p0` to `p1` - 1, cut to the tokens that are there; a `p1` of -1 is the end. It follows what `dst`
        holds: where that ends before `p0`, the copied tokens move to lower positions, as `remove_range` moves them. Of
        cells that both hold already, only the rest is copied. Raises InvalidRequestError, changing nothing, if `dst`
        holds other tokens in the range, for what `remove_range` refuses, and for a part of a sequence with recurrent
        states.
        """
        _log.debug("seq_cp(%s, %s, %s, %s)", src, dst, p0, p1)
        source, target = self.sequence(src), self.sequence(dst)
        start, stop = self._range(source, p0, p1)
        n = len(target.tokens)
        both = min(stop, n)
        if start == stop or source is target:
            return
        if start < both:
            if not target.has_cells_of(source, both):
                raise InvalidRequestError(f"sequence {dst} holds other tokens at {start} to {both}: remove them first")
            if both < stop:
                target.copy(source, both, stop)
        elif start <= n:
            target.copy(source, start, stop)
        else:
            moved = source.fork()
            try:
                moved.truncate(stop)
                self._remove(moved, n, start)
                target.copy(moved, n, len(moved.tokens))
            finally:
                moved.close()

    def seq_keep(self, seq: int) -> None:
        """Empty every sequence but this one."""
        _log.debug("seq_keep(%s)", seq)
        self.sequence(seq)
        for other, sequence in self._open().items():
            if other != seq:
                sequence.truncate(0)

    def clear_all(self) -> None:
        """Empty every sequence and release all pages."""
        _log.debug("clear_all()")
        for sequence in self._open().values():
            sequence.truncate(0)

    def clear_metadata(self) -> None:
        """Empty every sequence but keep its pages for new tokens."""
        _log.debug("clear_metadata()")
        for sequence in self._open().values():
            sequence.clear_metadata()

    # --- states

    def state_size(self, seq: int) -> int:
        """Size of what `state_save` returns, in bytes; 0 for an empty sequence."""
        sequence = self.sequence(seq)
        return snapshot.state_size({0: sequence}) if sequence.tokens else 0

    def state_save(self, seq: int) -> bytes:
        """Serialize a sequence with its tokens; b"" for an empty one."""
        _log.debug("state_save(%s)", seq)
        sequence = self.sequence(seq)
        return snapshot.dump({0: sequence}) if sequence.tokens else b""

    def state_load(self, seq: int, data: bytes) -> None:
        """Restore a sequence from what `state_save` returned.

        b"", the state of an empty sequence, changes nothing. Raises StateError, changing nothing, if the state is
        damaged or of another model.
        """
        _log.debug("state_load(%s)", seq)
        self._checked(seq)
        if data == b"":
            return
        self._restore_one(seq, snapshot.load(data, self.pool))

    def write_file(self, seq: int, path: str | os.PathLike[str]) -> int:
        """Write the state of a sequence to a file, atomically.

        Returns the size in bytes. Raises InvalidRequestError if the sequence or the path is empty, OSError.
        """
        _log.debug("write_file(%s, %r)", seq, path)
        _expect_path(path)
        sequence = self.sequence(seq)
        if not sequence.tokens:
            raise InvalidRequestError(f"sequence {seq} is empty: there is nothing to write")
        return snapshot.write(path, {0: sequence})

    def read_file(self, seq: int, path: str | os.PathLike[str]) -> FileData:
        """Restore a sequence from a file of `write_file`.

        Returns its tokens and the size of the file. Raises StateError, changing nothing, if the file is damaged, of
        another model, or has more tokens than fit; InvalidRequestError if the path is empty; OSError.
        """
        _log.debug("read_file(%s, %r)", seq, path)
        _expect_path(path)
        state = snapshot.read(path, self.pool)
        self._restore_one(seq, state)
        return FileData(list(self.sequence(seq).tokens), state.n_bytes)

    def global_state_size(self) -> int:
        """Size of what `global_state_save` returns, in bytes."""
        return snapshot.state_size(self._all())

    def global_state_save(self) -> bytes:
        """Serialize all sequences; shared pages are stored once."""
        _log.debug("global_state_save()")
        return snapshot.dump(self._all())

    def global_state_load(self, data: bytes) -> None:
        """Restore all sequences from what `global_state_save` returned.

        Raises StateError, changing nothing, if the state is damaged, of another model, or of another `n_seq_max`.
        """
        _log.debug("global_state_load()")
        state = snapshot.load(data, self.pool)
        if state.sequences.keys() != set(range(self.n_seq_max)):
            raise StateError(f"the state has {len(state.sequences)} sequences, and the cache {self.n_seq_max}")
        state.restore(self._all())

    def _all(self) -> dict[int, KVSequence]:
        return {seq: self.sequence(seq) for seq in range(self.n_seq_max)}

    def _restore_one(self, seq: int, state: snapshot.Snapshot) -> None:
        if state.sequences.keys() != {0}:
            raise StateError("the state is not that of one sequence")
        state.restore({0: self.sequence(seq)})

    def close(self) -> None:
        """Release all pages; closing twice does nothing."""
        _log.debug("close()")
        for sequence in (self._sequences or {}).values():
            sequence.close()
        self._sequences = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, seq: int) -> dict[int, KVSequence]:
        sequences = self._open()
        if not is_integer(seq) or not 0 <= seq < self.n_seq_max:
            raise InvalidRequestError(f"sequence {seq!r} is not one of 0 to {self.n_seq_max - 1}")
        return sequences

    def _open(self) -> dict[int, KVSequence]:
        if self._sequences is None:
            raise ClosedError("the cache is closed")
        return self._sequences

    @staticmethod
    def _range(sequence: KVSequence, p0: int, p1: int) -> tuple[int, int]:
        n = len(sequence.tokens)
        if not is_integer(p0) or not is_integer(p1) or p0 < 0 or p1 < -1 or -1 < p1 < p0:
            raise InvalidRequestError(f"positions {p0!r} to {p1!r} are not a range; the sequence has {n} tokens")
        return min(int(p0), n), n if p1 == -1 else min(int(p1), n)


def _expect_path(path: str | os.PathLike[str]) -> None:
    if not os.fspath(path):
        raise InvalidRequestError("the path of the state file is empty")
