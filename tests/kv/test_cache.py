"""State machine of random operations on a KVCache."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from llamacli import InvalidRequestError
from llamacli.kv import KVCache, KVLayout, KVPool, KVSequence, KVSpec, RecurrentSpec, log_build_info
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


def is_range(p0: int, p1: int) -> bool:
    """Check that a range is valid for some sequence."""
    return p0 >= 0 and (p1 == -1 or p1 >= p0)


def cut(p0: int, p1: int, n: int) -> tuple[int, int]:
    """Range of positions within the n of a sequence."""
    return min(p0, n), n if p1 == -1 else min(p1, n)


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
        start, stop = cut(p0, p1, n)
        try:
            self.cache.remove_range(seq, p0, p1)
        except InvalidRequestError:
            assert not is_range(p0, p1) or is_evicted(n - (stop - start), n)
        else:
            del self.marks[seq][start:stop]

    @rule(src=seqs, dst=seqs, p0=positions, p1=positions)
    def copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        source, target = self.marks[src], self.marks[dst]
        start, stop = cut(p0, p1, len(source))
        both = slice(start, min(stop, len(target)))
        try:
            self.cache.seq_cp(src, dst, p0, p1)
        except InvalidRequestError:
            n_moved = max(0, start - len(target))
            is_other = (
                source[: both.stop] != target[: both.stop] or self.cache.sequence(src).first_stale_cell is not None
            )
            assert (
                not is_range(p0, p1)
                or is_evicted(stop, len(source))
                or is_evicted(stop - n_moved, len(source))
                or (both.start < both.stop and (is_other or self.cache.sequence(dst).first_stale_cell is not None))
            )
        else:
            if src != dst and start < stop:
                assert source[both] == target[both]
                self.marks[dst] = target + source[max(start, min(stop, len(target))) : stop]

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


def filled(n_seq_max: int, n: int, *, recurrent: bool = False) -> KVCache:
    """Cache whose sequence 0 holds n tokens."""
    layout = KVLayout.of([KVSpec(1, 2)], "f32", [RecurrentSpec("state", (2,))] if recurrent else [])
    cache = KVCache(KVPool(layout), 100, n_seq_max, shift_keys=shift_keys)
    append(cache.sequence(0), range(n))
    return cache


def append(sequence: KVSequence, tokens: range) -> None:
    """Append tokens whose keys are those of their ids as marks."""
    start = len(sequence.tokens)
    sequence.reserve(start, len(tokens))
    positions = np.arange(start, start + len(tokens), dtype=np.float32)
    keys = np.broadcast_to((np.array(tokens, np.float32) + positions / 256)[:, None, None], (len(tokens), 1, 2))
    sequence.write(0, start, keys, keys)
    sequence.commit(list(tokens))


def test_middle_range_copied_into_an_empty_sequence_is_shifted() -> None:
    cache = filled(2, 50)
    cache.seq_cp(0, 1, 20, 40)
    copied = cache.sequence(1)
    assert copied.tokens == list(range(20, 40))
    assert copied.first_stale_cell == 0, "these cells have seen tokens that are not there"
    expected = np.arange(20, 40) + np.arange(20) / 256
    np.testing.assert_allclose(copied.read(0, 20)[0][0, 0], expected, atol=1e-3)
    np.testing.assert_allclose(cache.sequence(0).read(0, 50)[0][0, 0], np.arange(50) * (1 + 1 / 256), atol=1e-3)


def test_copy_onto_cells_that_both_hold_copies_the_rest() -> None:
    cache = filled(3, 50)
    cache.seq_cp(0, 1, 0, 20)
    n_used = cache.n_bytes
    cache.seq_cp(0, 1, 5, 15)
    assert (cache.sequence(1).tokens, cache.n_bytes) == (list(range(20)), n_used)
    cache.seq_cp(0, 1, 10, 32)
    assert cache.sequence(1).tokens == list(range(32))
    assert cache.sequence(1).first_stale_cell is None
    append(cache.sequence(2), range(30, 40))
    with pytest.raises(InvalidRequestError, match="sequence 2 holds other tokens at 5 to 10: remove them first"):
        cache.seq_cp(0, 2, 5, 20)
    assert cache.sequence(2).tokens == list(range(30, 40))


def test_cells_after_removed_tokens_are_others() -> None:
    cache = filled(3, 50)
    cache.remove_range(0, 10, 20)
    cache.seq_cp(0, 1)
    cache.seq_cp(0, 1, 5)
    assert cache.sequence(1).tokens == cache.sequence(0).tokens, "the pages are shared: nothing to do"
    append(cache.sequence(2), range(10))
    append(cache.sequence(2), range(20, 30))
    with pytest.raises(InvalidRequestError, match="holds other tokens"):
        cache.seq_cp(0, 2, 5, 30)


def test_ranges_are_cut_to_the_tokens_there() -> None:
    cache = filled(2, 30)
    cache.remove_range(0, 40, 60)
    cache.seq_cp(0, 1, 0, 99)
    cache.remove_range(0, 25, 99)
    assert (cache.pos_max(0), cache.pos_max(1)) == (24, 29)
    for p0, p1 in ((-1, 3), (5, 4), (0, -2), (0.5, 3)):
        with pytest.raises(InvalidRequestError, match="are not a range; the sequence has 25 tokens"):
            cache.remove_range(0, p0, p1)


def test_recurrent_states_cannot_be_copied_in_part_or_shifted() -> None:
    cache = filled(2, 30, recurrent=True)
    for p0, p1, reason in ((0, 20, "cannot copy tokens 0 to 20 alone"), (10, -1, "recurrent states cannot lose")):
        with pytest.raises(InvalidRequestError, match=reason):
            cache.seq_cp(0, 1, p0, p1)
        assert cache.pos_max(1) == -1
    cache.seq_cp(0, 1)
    assert cache.pos_max(1) == 29


def test_n_bytes_are_those_of_this_cache_alone() -> None:
    cache = filled(2, 30)
    other = KVCache(cache.pool, 100)
    append(other.sequence(0), range(40))
    assert (cache.n_bytes, other.n_bytes) == (2 * cache.pool.groups[0].page_bytes, 3 * cache.pool.groups[0].page_bytes)
    cache.seq_cp(0, 1)
    assert cache.n_bytes == 2 * cache.pool.groups[0].page_bytes, "shared pages count once"


def test_operations_are_logged_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    cache = filled(2, 30)
    with caplog.at_level("DEBUG", "llamacli.kv.cache"):
        log_build_info()
        cache.seq_cp(0, 1, 0, 20)
        cache.remove_range(0, 10)
        cache.close()
    build, *operations = [record.getMessage() for record in caplog.records]
    assert build.startswith("llamacli ")
    assert "numba " in build
    assert operations == ["seq_cp(0, 1, 0, 20)", "remove_range(0, 10, -1)", "close()"]


def test_one_sequence_is_the_default() -> None:
    cache = KVCache(KVPool(KVLayout.of([KVSpec(1, 2)], "f32")), 40)
    assert cache.pos_max(0) == -1
    with pytest.raises(InvalidRequestError, match="sequence 1 is not one of 0 to 0"):
        cache.sequence(1)
