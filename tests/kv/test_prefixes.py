import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kv_helpers import ONE, fill
from llamacli.kv import PAGE, KVLayout, KVPool, KVSequence, KVSpec, PrefixIndex, RecurrentSpec
from llamacli.kv.prefixes import MAX_KEPT, n_common

few = st.lists(st.integers(0, 1), max_size=9)
PAGE_BYTES = KVLayout.of([ONE], "f32").groups[0].page_bytes


def cached(pool: KVPool, tokens: list[int]) -> KVSequence:
    sequence = KVSequence(pool, 200)
    fill(sequence, 0, len(tokens))
    sequence.tokens += tokens
    return sequence


def reused(index: PrefixIndex, pool: KVPool, tokens: list[int]) -> int:
    return index.reuse(KVSequence(pool, 200), tokens)


@given(few, few)
def test_n_common_is_the_length_of_the_common_prefix(a: list[int], b: list[int]) -> None:
    n = n_common(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]
    assert n_common(tuple(a), tuple(b)) == n


def test_reuse_shares_the_longest_prefix_but_the_last_token() -> None:
    pool = KVPool(KVLayout.of([ONE], "f32"))
    index = PrefixIndex(pool)
    sources = [cached(pool, list(range(n))) for n in (20, 60, 40)]
    for source in sources:
        index.add(source)
    target = KVSequence(pool, 200)
    assert index.reuse(target, [*range(50), 7, 8]) == 50
    assert target.tokens == list(range(50))
    for mine, theirs in zip(target.read(0, 50), sources[1].read(0, 50), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert reused(index, pool, list(range(60))) == 59
    assert index.reuse(target, [*range(50), 7, 8]) == 0, "nothing longer is cached"


def test_stale_cells_are_not_reused() -> None:
    pool = KVPool(KVLayout.of([ONE], "f32"))
    index = PrefixIndex(pool)
    source = cached(pool, list(range(40)))
    index.add(source)
    source.remove(10, 20, lambda layer, keys: keys)
    assert reused(index, pool, [*source.tokens, 1]) == source.first_stale_cell == 10


def test_keep_evicts_the_least_recently_used() -> None:
    pool = KVPool(KVLayout.of([ONE], "f32"))
    index = PrefixIndex(pool)
    limit = 3 * PAGE_BYTES
    for first in (1, 2, 3):
        with_prefix = cached(pool, [first] * PAGE)
        index.keep(with_prefix, limit)
        with_prefix.close()
    assert index.n_bytes == limit
    assert reused(index, pool, [1] * (PAGE + 1)) == PAGE
    index.keep(cached(pool, [4] * PAGE), limit)
    assert [reused(index, pool, [first] * (PAGE + 1)) for first in (1, 2, 3, 4)] == [PAGE, 0, PAGE, PAGE]
    index.keep(cached(pool, [5] * 4 * PAGE), limit)
    assert reused(index, pool, [5] * PAGE) == 0, "larger than the limit"
    assert index.n_bytes == limit, "nothing is evicted for it"
    index.clear()
    assert index.n_bytes == 0


def test_a_copy_with_states_that_adds_least_to_a_shorter_one_is_evicted() -> None:
    pool = KVPool(KVLayout.of([ONE], "f32", [RecurrentSpec("state", (2,))]))
    index = PrefixIndex(pool)
    for n in (20, 60, 62, 120, 180):
        index._kept.append(cached(pool, list(range(n))))
    assert len(index._least_useful().tokens) == 62, "two tokens more than the one of 60"


def test_keep_replaces_a_prefix_and_limits_the_number_of_copies() -> None:
    pool = KVPool(KVLayout.of([ONE], "f32"))
    index = PrefixIndex(pool)
    for n in (PAGE, 2 * PAGE, PAGE):
        index.keep(cached(pool, list(range(n))), 1 << 30)
    assert index.n_bytes == 2 * PAGE_BYTES
    for first in range(MAX_KEPT + 5):
        index.keep(cached(pool, [first]), 1 << 30)
    assert index.n_bytes == MAX_KEPT * PAGE_BYTES


def test_reuse_skips_sequences_whose_window_moved_past_the_prefix() -> None:
    pool = KVPool(KVLayout.of([ONE, KVSpec(2, 4, window=20)], "f32"))
    index = PrefixIndex(pool)
    long, short = cached(pool, list(range(100))), cached(pool, list(range(30)))
    for sequence in (long, short):
        sequence.evict(len(sequence.tokens))
        index.add(sequence)
    assert reused(index, pool, [*range(60), 7]) == 30
    assert reused(index, pool, list(range(101))) == 100


def test_evictable_bytes_are_those_that_evictions_free() -> None:
    pool = KVPool(KVLayout.of([ONE], "f32"))
    index = PrefixIndex(pool)
    assert (index.evictable_bytes, index.evict_one()) == (0, False)
    shared = cached(pool, [7] * 2 * PAGE)
    index.keep(shared, 1 << 20)
    for first in (1, 2):
        alone = cached(pool, [first] * 3 * PAGE)
        index.keep(alone, 1 << 20)
        alone.close()
    assert index.evictable_bytes == 6 * PAGE_BYTES, "pages of the open sequence stay"
    assert pool.n_used_bytes == 8 * PAGE_BYTES
    assert [index.evict_one() for _ in range(4)] == [True, True, True, False]
    assert (index.evictable_bytes, pool.n_used_bytes) == (0, 2 * PAGE_BYTES)


def test_keeping_does_not_look_at_unused_slots_of_page_tables() -> None:
    pool = KVPool(KVLayout.of([ONE], "f32"))
    index = PrefixIndex(pool)
    for seq_len in (PAGE * 8, PAGE << 20):
        sequence = KVSequence(pool, seq_len)
        sequence.reserve(0, 2 * PAGE)
        sequence.commit(list(range(2 * PAGE)))
        assert sequence.extent[0] < 8
        assert len(sequence.held_pages(0)) == 2
        index.keep(sequence, 1 << 30)
        sequence.tables[0][-1] = 1 << 40  # no page: an access to it would fail
        index.keep(sequence, 1 << 30)
        sequence.close()
    assert index.n_bytes == index.evictable_bytes == 2 * PAGE_BYTES


def test_sequences_are_those_of_open_sessions_then_the_kept_ones_latest_first() -> None:
    pool = KVPool(KVLayout.of([ONE], "f32"))
    index = PrefixIndex(pool)
    live = cached(pool, [1, 2])
    index.add(live)
    for tokens in ([3, 4], [5, 6]):
        index.keep(cached(pool, tokens), 10 * PAGE_BYTES)
    assert [sequence.tokens for sequence in index.sequences()] == [[1, 2], [5, 6], [3, 4]]
    index.reuse(KVSequence(pool, 200), [3, 4, 7])
    assert [sequence.tokens for sequence in index.sequences()] == [[1, 2], [3, 4], [5, 6]]
