"""Numbered sequences over one pool, and the operations on them that llama.cpp's users know."""

from __future__ import annotations

import os
from collections.abc import Callable

from llamacli.errors import ClosedError, InvalidRequestError, StateError
from llamacli.kernels.kv_types.rounding import Floats
from llamacli.kv import snapshot
from llamacli.kv.pool import KVPool
from llamacli.kv.sequence import KVSequence
from llamacli.util.closing import Closing
from llamacli.util.numbers import is_integer

Turn = Callable[[int, Floats, int], Floats]
"""`shift_keys(layer, keys, by)`: keys, float32 [n_head_kv, head_dim, n], as they are `by` positions lower."""


class KVCache(Closing):
    """Sequences 0 to `n_seq_max` - 1 of up to `seq_len` tokens each, which share pages where they were copied.

    Positions have no gaps: token i of a sequence stands at position i. A cut in the middle therefore moves what is
    behind it up, which turns keys anew (RoPE) and needs `shift_keys`; `Model.kv_cache` gives it.

    One thread at a time may use it and the sessions over its sequences: pages are given back at once, read or not.
    """

    def __init__(
        self, pool: KVPool, seq_len: int, n_seq_max: int = 1, *, shift_keys: Turn | None = None, rope_variant: int = 0
    ):  # fmt: skip
        if not is_integer(n_seq_max) or n_seq_max < 0:
            raise InvalidRequestError(f"n_seq_max must be an integer of at least 0, not {n_seq_max!r}")
        self.pool, self.seq_len, self.n_seq_max = pool, seq_len, n_seq_max
        self._shift_keys, self._rope_variant = shift_keys, rope_variant
        self._sequences: dict[int, KVSequence] | None = {}

    def sequence(self, seq: int) -> KVSequence:
        """The sequence of a number. Raises InvalidRequestError if there is none."""
        sequences = self._expect(seq)
        if seq not in sequences:
            sequences[seq] = KVSequence(self.pool, self.seq_len, self._rope_variant)
        return sequences[seq]

    @property
    def n_bytes(self) -> int:
        """Bytes of the pages in use; those that sequences share count once."""
        return self.pool.n_used_bytes

    def pos_max(self, seq: int) -> int:
        """The last position of a sequence, -1 if it is empty."""
        sequences = self._expect(seq)
        return len(sequences[seq].tokens) - 1 if seq in sequences else -1

    def remove_range(self, seq: int, p0: int = 0, p1: int = -1) -> None:
        """Take out positions `p0` to `p1` - 1; -1 is the end. What is behind moves up."""
        sequence = self.sequence(seq)
        start, stop = self._range(sequence, p0, p1)
        by = stop - start
        if stop < len(sequence.tokens) and by and self._shift_keys is None:
            raise InvalidRequestError("a cut in the middle turns keys, and this cache was given nothing to do it with")
        shift_keys = self._shift_keys
        sequence.remove(start, stop, lambda layer, keys: keys if shift_keys is None else shift_keys(layer, keys, by))

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int = -1) -> None:
        """Let `dst` go on with positions `p0` to `p1` - 1 of `src`, sharing pages; `p0` is how many it holds."""
        source, target = self.sequence(src), self.sequence(dst)
        target.copy(source, *self._range(source, p0, p1))

    def seq_keep(self, seq: int) -> None:
        """Empty every sequence but this one."""
        self.sequence(seq)
        for other, sequence in self._open().items():
            if other != seq:
                sequence.truncate(0)

    def clear_all(self) -> None:
        """Empty every sequence and give all pages back; a page is zeros when it is used again."""
        for sequence in self._open().values():
            sequence.truncate(0)

    def clear_metadata(self) -> None:
        """Empty every sequence but keep its pages for what comes."""
        for sequence in self._open().values():
            sequence.clear_metadata()

    # --- states

    def state_size(self, seq: int) -> int:
        """Bytes that `state_save` gives; 0 for an empty sequence."""
        sequence = self.sequence(seq)
        return snapshot.state_size({0: sequence}) if sequence.tokens else 0

    def state_save(self, seq: int) -> bytes:
        """The state of a sequence, its tokens included; empty for an empty one."""
        sequence = self.sequence(seq)
        return snapshot.dump({0: sequence}) if sequence.tokens else b""

    def state_load(self, seq: int, data: bytes) -> None:
        """Let a sequence hold a state, that of an empty one too.

        Raises StateError, changing nothing, if it is damaged or another model's.
        """
        if data == b"":
            self.sequence(seq).truncate(0)
            return
        self._restore_one(seq, snapshot.load(data, self.pool))

    def write_file(self, seq: int, path: str | os.PathLike[str]) -> int:
        """Write the state of a sequence to a file; returns its bytes. A file that is there is replaced at once.

        Raises InvalidRequestError if the sequence is empty, OSError.
        """
        sequence = self.sequence(seq)
        if not sequence.tokens:
            raise InvalidRequestError(f"sequence {seq} is empty: there is nothing to write")
        return snapshot.write(path, {0: sequence})

    def read_file(self, seq: int, path: str | os.PathLike[str]) -> list[int]:
        """Let a sequence hold the state of a file; returns its tokens.

        Raises StateError, changing nothing, if the file is damaged or another model's; OSError.
        """
        self._restore_one(seq, snapshot.read(path, self.pool))
        return list(self.sequence(seq).tokens)

    def global_state_size(self) -> int:
        """Bytes that `global_state_save` gives."""
        return snapshot.state_size(self._all())

    def global_state_save(self) -> bytes:
        """The state of all sequences; pages that they share are in it once."""
        return snapshot.dump(self._all())

    def global_state_load(self, data: bytes) -> None:
        """Let all sequences hold a state. Raises StateError, changing nothing, if it does not fit here."""
        state = snapshot.load(data, self.pool)
        if state.sequences.keys() != set(range(self.n_seq_max)):
            raise StateError(f"it is of {len(state.sequences)} sequences, and here are {self.n_seq_max}")
        state.restore(self._all())

    def _all(self) -> dict[int, KVSequence]:
        return {seq: self.sequence(seq) for seq in range(self.n_seq_max)}

    def _restore_one(self, seq: int, state: snapshot.Snapshot) -> None:
        if state.sequences.keys() != {0}:
            raise StateError("it is not the state of one sequence")
        state.restore({0: self.sequence(seq)})

    def close(self) -> None:
        """Give everything back; closing twice does nothing."""
        for sequence in (self._sequences or {}).values():
            sequence.close()
        self._sequences = None

    def _expect(self, seq: int) -> dict[int, KVSequence]:
        """All sequences that have been used, once it is known that there may be one of this number."""
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
