"""KV cache of numbered sequences, with llama.cpp's sequence operations."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from llamacli.errors import ClosedError, InvalidRequestError, StateError
from llamacli.kernels.kv_types.rounding import Floats
from llamacli.kv import snapshot
from llamacli.kv.pool import KVPool
from llamacli.kv.sequence import KVSequence
from llamacli.util.numbers import is_integer

ShiftKeys = Callable[[int, Floats, int], Floats]
"""K-shift: `shift_keys(layer, keys, by)` returns keys, float32 [n_head_kv, head_dim, n], `by` positions lower."""


class KVCache(contextlib.AbstractContextManager["KVCache"]):
    """KV cache of `n_seq_max` sequences of up to `seq_len` tokens each.

    Sequences are numbered from 0; copies between them share pages. Positions have no gaps: token i of a sequence has
    position i. Removing tokens in the middle therefore shifts later ones to lower positions, which needs `shift_keys`;
    `Model.kv_cache` provides it.

    Not thread-safe: one thread at a time may use the cache and the sessions over its sequences.
    """

    def __init__(
        self,
        pool: KVPool,
        seq_len: int,
        n_seq_max: int = 1,
        *,
        shift_keys: ShiftKeys | None = None,
        rope_variant: int = 0,
    ):
        if not is_integer(n_seq_max) or n_seq_max < 0:
            raise InvalidRequestError(f"n_seq_max must be an integer of at least 0, not {n_seq_max!r}")
        self.pool, self.seq_len, self.n_seq_max = pool, seq_len, n_seq_max
        self._shift_keys, self._rope_variant = shift_keys, rope_variant
        self._sequences: dict[int, KVSequence] | None = {}

    def sequence(self, seq: int) -> KVSequence:
        """Get a sequence by number.

        Raises InvalidRequestError if the number is out of range.
        """
        sequences = self._checked(seq)
        if seq not in sequences:
            sequences[seq] = KVSequence(self.pool, self.seq_len, self._rope_variant)
        return sequences[seq]

    @property
    def n_bytes(self) -> int:
        """Bytes of the pages in use; shared pages count once."""
        return self.pool.n_used_bytes

    def pos_max(self, seq: int) -> int:
        """Highest position of a sequence, -1 if it is empty."""
        sequences = self._checked(seq)
        return len(sequences[seq].tokens) - 1 if seq in sequences else -1

    def remove_range(self, seq: int, p0: int = 0, p1: int = -1) -> None:
        """Remove a range of positions; later tokens shift to lower positions.

        The range is `p0` to `p1` - 1; a `p1` of -1 is the end. Raises InvalidRequestError, changing nothing, if the
        range is invalid, a token would then attend to evicted cells, or the cache has no `shift_keys` and later tokens
        would shift.
        """
        sequence = self.sequence(seq)
        start, stop = self._range(sequence, p0, p1)
        by = stop - start
        if stop < len(sequence.tokens) and by and self._shift_keys is None:
            raise InvalidRequestError("removing tokens in the middle needs a cache that was made with shift_keys")
        shift_keys = self._shift_keys
        sequence.remove(start, stop, lambda layer, keys: keys if shift_keys is None else shift_keys(layer, keys, by))

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int = -1) -> None:
        """Append a range of positions of `src` to `dst`, sharing pages.

        The range is `p0` to `p1` - 1; a `p1` of -1 is the end. `dst` must hold `p0` tokens. Raises InvalidRequestError,
        changing nothing, for another range.
        """
        source, target = self.sequence(src), self.sequence(dst)
        target.copy(source, *self._range(source, p0, p1))

    def seq_keep(self, seq: int) -> None:
        """Empty every sequence but this one."""
        self.sequence(seq)
        for other, sequence in self._open().items():
            if other != seq:
                sequence.truncate(0)

    def clear_all(self) -> None:
        """Empty every sequence and release all pages."""
        for sequence in self._open().values():
            sequence.truncate(0)

    def clear_metadata(self) -> None:
        """Empty every sequence but keep its pages for new tokens."""
        for sequence in self._open().values():
            sequence.clear_metadata()

    # --- states

    def state_size(self, seq: int) -> int:
        """Size of what `state_save` returns, in bytes; 0 for an empty sequence."""
        sequence = self.sequence(seq)
        return snapshot.state_size({0: sequence}) if sequence.tokens else 0

    def state_save(self, seq: int) -> bytes:
        """Serialize a sequence with its tokens; b"" for an empty one."""
        sequence = self.sequence(seq)
        return snapshot.dump({0: sequence}) if sequence.tokens else b""

    def state_load(self, seq: int, data: bytes) -> None:
        """Restore a sequence from what `state_save` returned.

        Raises StateError, changing nothing, if the state is damaged or of another model.
        """
        if data == b"":
            self.sequence(seq).truncate(0)
            return
        self._restore_one(seq, snapshot.load(data, self.pool))

    def write_file(self, seq: int, path: str | os.PathLike[str]) -> int:
        """Write the state of a sequence to a file, atomically.

        Returns the size in bytes. Raises InvalidRequestError if the sequence is empty, OSError.
        """
        sequence = self.sequence(seq)
        if not sequence.tokens:
            raise InvalidRequestError(f"sequence {seq} is empty: there is nothing to write")
        return snapshot.write(path, {0: sequence})

    def read_file(self, seq: int, path: str | os.PathLike[str]) -> list[int]:
        """Restore a sequence from a file of `write_file`; returns its tokens.

        Raises StateError, changing nothing, if the file is damaged or of another model; OSError.
        """
        self._restore_one(seq, snapshot.read(path, self.pool))
        return list(self.sequence(seq).tokens)

    def global_state_size(self) -> int:
        """Size of what `global_state_save` returns, in bytes."""
        return snapshot.state_size(self._all())

    def global_state_save(self) -> bytes:
        """Serialize all sequences; shared pages are stored once."""
        return snapshot.dump(self._all())

    def global_state_load(self, data: bytes) -> None:
        """Restore all sequences from what `global_state_save` returned.

        Raises StateError, changing nothing, if the state is damaged, of another model, or of another `n_seq_max`.
        """
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
        for sequence in (self._sequences or {}).values():
            sequence.close()
        self._sequences = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, seq: int) -> dict[int, KVSequence]:
        """Check a sequence number; returns the sequences that have been used."""
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
        if not is_integer(p0) or not is_integer(p1) or p1 < -1 or not 0 <= p0 <= (n if p1 == -1 else p1) or p1 > n:
            raise InvalidRequestError(f"positions {p0!r} to {p1!r} are not within the {n} of the sequence")
        return int(p0), n if p1 == -1 else int(p1)
