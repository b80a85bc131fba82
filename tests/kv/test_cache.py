"""State machine of random operations on a KVCache."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from llamacli import InvalidRequestError
from llamacli.kv import KVCache, KVLayout, KVPool, KVSpec
from suite import examples

SEQ_LEN, N_SEQ, WINDOW, CHUNK = 70, 4, 20, 24
SPECS = [
    KVSpec(1, 2),
    KVSpec(2, 3, window=WINDOW, value_dim=5),
    KVSpec(1, 4, value_dim=2, values_in_keys=True),
    KVSpec(1, 2, chunk=CHUNK),
]

seqs = st.integers(0, N_SEQ - 1)
positions = st.integers(-2, SEQ_LEN)


def shift_keys(layer: int, keys: np.ndarray, by: int) -> np.ndarray:
    """K-shift of a simple position encoding.

    The key of mark m at position p is m + p / 256.
    """
    return keys - by / 256


def seen_from(n: int) -> list[int]:
    """First positions visible from position n, in the layers that evict."""
    return [max(0, n - WINDOW + 1), n // CHUNK * CHUNK]


def is_evicted(left: int, n: int) -> bool:
    """Check that n tokens may lack what position `left` attends to."""
    return any(wanted < held for wanted, held in zip(seen_from(left), seen_from(n), strict=True))


class CacheMachine(RuleBasedStateMachine):
    """Random operations, compared with lists of cells.

    `marks` has the expected cells of each sequence; keys and values are computed from these numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(KVLayout.of(SPECS, "f32"))
        self.cache = KVCache(self.pool, SEQ_LEN, N_SEQ, shift_keys=shift_keys)
        self.marks: dict[int, list[int]] = {seq: [] for seq in range(N_SEQ)}
        self.next = 1

    def cells(self, seq: int, start: int) -> np.ndarray:
        """Expected keys from position `start` on, float32 [n]."""
        marks = self.marks[seq][start:]
        return np.array(marks, np.float32) + np.arange(start, start + len(marks), dtype=np.float32) / 256

    @rule(seq=seqs, n=st.integers(0, 30))
    def append(self, seq: int, n: int) -> None:
        sequence, start = self.cache.sequence(seq), len(self.marks[seq])
        n = min(n, SEQ_LEN - start)
        self.marks[seq] += range(self.next, self.next + n)
        self.next += n
        sequence.reserve(start, n)
        keys = self.cells(seq, start)
        for layer, spec in enumerate(SPECS):
            k = np.broadcast_to(keys[:, None, None], (n, spec.n_head_kv, spec.head_dim))
            v = np.broadcast_to(keys[:, None, None], (n, spec.n_head_kv, spec.value_dim))
            sequence.write(layer, start, k, -np.round(v))
        sequence.tokens += self.marks[seq][start:]
        sequence.evict(start + n)

    @rule(seq=seqs, p0=positions, p1=positions)
    def remove(self, seq: int, p0: int, p1: int) -> None:
        n = len(self.marks[seq])
        stop = n if p1 == -1 else p1
        try:
            self.cache.remove_range(seq, p0, p1)
        except InvalidRequestError:
            assert not 0 <= p0 <= stop <= n or is_evicted(n - (stop - p0), n)
        else:
            del self.marks[seq][p0:stop]

    @rule(src=seqs, dst=seqs, p0=positions, p1=positions)
    def copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        n = len(self.marks[src])
        stop = n if p1 == -1 else p1
        try:
            self.cache.seq_cp(src, dst, p0, p1)
        except InvalidRequestError:
            valid = 0 <= p0 <= stop <= n and p0 == len(self.marks[dst]) and src != dst
            assert not valid or is_evicted(stop, n)
        else:
            self.marks[dst] += self.marks[src][p0:stop]

    @rule(seq=seqs)
    def keep(self, seq: int) -> None:
        self.cache.seq_keep(seq)
        self.marks = {other: marks if other == seq else [] for other, marks in self.marks.items()}

    @rule(everything=st.booleans())
    def clear(self, everything: bool) -> None:
        (self.cache.clear_all if everything else self.cache.clear_metadata)()
        self.marks = {seq: [] for seq in range(N_SEQ)}

    @invariant()
    def cells_in_the_window_hold_what_was_written(self) -> None:
        for seq, marks in self.marks.items():
            sequence, n = self.cache.sequence(seq), len(marks)
            assert self.cache.pos_max(seq) == n - 1
            assert sequence.tokens == marks
            for layer, spec in enumerate(SPECS):
                window_start, chunk_start = seen_from(n)
                first = window_start if spec.window else chunk_start if spec.chunk else 0
                keys, values = sequence.read(layer, n)
                expected = self.cells(seq, 0)[first:]
                np.testing.assert_allclose(
                    keys[..., first:], np.broadcast_to(expected, keys[..., first:].shape), atol=1e-3
                )
                if spec.values_in_keys:
                    np.testing.assert_array_equal(values, keys[:, : spec.value_dim].swapaxes(1, 2))
                    continue
                written = np.broadcast_to(-np.array(marks[first:], np.float32)[:, None], values[:, first:].shape)
                np.testing.assert_array_equal(values[:, first:], written)

    @invariant()
    def reference_counts_match_page_tables(self) -> None:
        for g, pages in enumerate(self.pool.groups):
            owned = [int(page) for seq in range(N_SEQ) for page in self.cache.sequence(seq).tables[g] if page]
            assert pages.n_used == len(set(owned))
            assert all(pages.ref_count(page) == owned.count(page) for page in owned)

    @invariant()
    def window_pages_are_kept_and_others_evicted(self) -> None:
        for seq, marks in self.marks.items():
            if marks:
                held = np.flatnonzero(self.cache.sequence(seq).tables[1])
                assert len(held) <= SEQ_LEN // 16 + 1
                first, _ = seen_from(len(marks))
                assert set(range(first // 16, -(-len(marks) // 16))) <= set(held.tolist())

    def teardown(self) -> None:
        self.cache.close()
        assert [pages.n_used for pages in self.pool.groups] == [0, 0, 0]
        assert self.pool.n_bytes == 0


CacheMachine.TestCase.settings = examples(60, stateful_step_count=40)
TestCacheMachine = CacheMachine.TestCase


def test_remove_range_in_the_middle_needs_shift_keys() -> None:
    cache = KVCache(KVPool(KVLayout.of([KVSpec(1, 2)], "f32")), 40)
    sequence = cache.sequence(0)
    sequence.reserve(0, 5)
    sequence.tokens += range(5)
    with pytest.raises(InvalidRequestError, match="made with shift_keys"):
        cache.remove_range(0, 1, 3)
    cache.remove_range(0, 3)
    assert sequence.tokens == [0, 1, 2]
