import gc
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from kv_helpers import ONE, InterruptAt, fill, new_sequence
from llamacli.errors import OutOfMemoryError
from llamacli.kv import PAGE, KVLayout, KVPool, KVSequence, KVSpec, RecurrentSpec
from llamacli.kv import pool as pool_module
from llamacli.util.memory import view
from suite import STRIDE


def test_memory_is_allocated_on_demand_and_released() -> None:
    sequence = new_sequence([ONE], 1000)
    pool = sequence.pool
    assert pool.n_bytes == 0
    sequence.reserve(0, 1)
    assert pool.groups[0].n_used == 1
    sequence.reserve(1, PAGE)
    assert pool.groups[0].n_used == 2
    sequence.close()
    sequence.close()
    assert (pool.groups[0].n_used, pool.n_bytes) == (0, 0)


def test_available_memory_is_read_once_a_second_or_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    left, reads, clock = [5 << 24, 2 << 24, 1 << 20], list[int](), [0.0]
    monkeypatch.setattr(pool_module, "available_memory", lambda: reads.append(left[len(reads)]) or reads[-1])
    monkeypatch.setattr(pool_module.time, "monotonic", lambda: clock[0])
    pages = pool_module.Pages(1 << 24)
    table = np.zeros(9, np.int64)
    for i, n_reads in enumerate([1, 1, 1, 2]):  # the fourth takes more than half of what the first reading left
        pages.allocate(table, i)
        assert len(reads) == n_reads
    clock[0] = 1.5
    with pytest.raises(OutOfMemoryError, match=f"and {1 << 20} are available"):
        pages.allocate(table, 4)
    assert len(reads) == 3
    for i in range(4):
        pages.release(table, i)


def test_garbage_collected_sequence_releases_its_pages() -> None:
    sequence = new_sequence([ONE], 100)
    pool = sequence.pool
    sequence.reserve(0, 100)
    assert pool.n_bytes > 0
    del sequence
    gc.collect()
    assert pool.n_bytes == 0


def test_copies_of_cells_are_logged() -> None:
    pool = KVPool(KVLayout.of([ONE], "f32"), logs=True)
    for same_prefix in (False, True):
        pool.log_cells(0, 4096, 8192, 3, 12, same_prefix=same_prefix)
    assert [(entry[:4], entry[4] & 0xFF, entry[4] >> 8 & 0xFF, entry[4] >> 16) for entry in pool.log or ()] == [
        ((pool_module.CELLS, 0, 4096, 8192), 3, 12, n) for n in (0, 1)
    ]
    assert pool.groups[0].ref_count(4096) == 0


def test_reallocated_pages_are_zeroed() -> None:
    sequence, other = (KVSequence(pool, 64) for pool in [KVPool(KVLayout.of([ONE], "f32"))] * 2)
    fill(other, 0, 1)  # keeps the slab from being returned to the system
    fill(sequence, 0, 64)
    sequence.truncate(0)
    sequence.reserve(0, 64)
    assert not any(array.any() for array in sequence.read(0, 64))


ACTIONS: dict[str, Callable[[KVSequence], object]] = {
    "reserve": lambda sequence: sequence.reserve(48, 40),
    "copy_on_write": lambda sequence: sequence.reserve(0, 40),
    "share": lambda sequence: sequence.fork(),
    "truncate": lambda sequence: sequence.truncate(3),
    "close": lambda sequence: sequence.close(),
}


@pytest.mark.deep
@pytest.mark.parametrize("action", ACTIONS)
def test_reference_counts_match_page_tables_after_an_interrupt(action: str) -> None:
    for n in itertools.count(1, STRIDE):
        pool = KVPool(KVLayout.of([ONE, KVSpec(2, 4, window=20)], "f32"))
        one, other = KVSequence(pool, 100), KVSequence(pool, 100)
        fill(one, 0, 40)
        one.tokens += range(40)
        other.copy(one, 0, 40)
        with InterruptAt(pool_module.__file__, n) as interrupt:
            ACTIONS[action](one)
        gc.collect()
        pool.collect()
        for g, pages in enumerate(pool.groups):
            held = [int(page) for sequence in (one, other) for page in sequence.tables[g] if page]
            assert pages.n_used == len(set(held))
            assert all(pages.ref_count(page) == held.count(page) for page in held)
        for sequence in (one, other):
            sequence.close()
        assert [pages.n_used for pages in pool.groups] == [0, 0]
        if interrupt.n > 0:
            assert n > 5
            return


def test_failed_allocation_changes_no_page_table(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = new_sequence([ONE, KVSpec(2, 4, window=20)], 10**6)
    fill(sequence, 0, 20)
    kept = [table.copy() for table in sequence.tables]

    def refuse(n_bytes: int) -> np.ndarray:
        raise MemoryError

    monkeypatch.setattr("llamacli.kv.pool.anonymous", refuse)
    with pytest.raises(MemoryError):
        sequence.reserve(20, 10**5)
    for table, before in zip(sequence.tables, kept, strict=True):
        np.testing.assert_array_equal(table, before)


def test_page_of_an_interrupted_copy_is_zeroed_before_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, table = KVPool(KVLayout.of([KVSpec(1, 8)], "f32")).groups[0], np.zeros(4, np.int64)
    pages.allocate(table, 0)
    pages.share(int(table[0]), table, 1)
    view(int(table[0]), pages.page_bytes)[:] = 1

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pages, "_assign", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pages.copy_on_write(table, 1)
    assert (pages.n_used, table[0]) == (1, table[1])
    pages.allocate(table, 2)
    assert not view(int(table[2]), pages.page_bytes).any()


def test_a_copy_takes_one_page_of_the_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_SLAB_BYTES", 1 << 24)  # one page in guarded programs
    pages, table = pool_module.Pages(4 << 20), np.zeros(3, np.int64)
    pages.allocate(table, 0)
    size = pages.n_bytes
    assert 3 * pages.page_bytes < size < 4 * pages.page_bytes
    pages.share(int(table[0]), table, 1)
    pages.copy_on_write(table, 1)
    pages.copy_on_write(table, 1)
    pages.allocate(table, 2)
    assert (pages.n_used, pages.n_bytes) == (3, size)
    assert len({*np.diff(table)}) == 1
    for i in range(3):
        pages.release(table, i)
    assert pages.n_bytes == 0


def test_pool_with_a_limit_refuses_more_pages_and_changes_nothing() -> None:
    pool = KVPool(KVLayout.of([ONE], "f32"))
    page_bytes = pool.layout.groups[0].page_bytes
    assert pool.free_bytes is None
    pool.max_bytes = 3 * page_bytes
    first, second = KVSequence(pool, 64), KVSequence(pool, 64)
    first.reserve(0, 32)
    with pytest.raises(OutOfMemoryError, match=f"needs {page_bytes} bytes more, and 0 are available"):
        second.reserve(0, 32)
    assert (pool.n_used_bytes, pool.free_bytes) == (2 * page_bytes, page_bytes)
    second.reserve(0, 16)
    first.close()
    second.reserve(0, 48)


def test_bytes_to_reserve_are_those_that_reserve_allocates() -> None:
    pool = KVPool(KVLayout.of([ONE, KVSpec(2, 4, window=20)], "f32"))
    sequence = KVSequence(pool, 256)
    n = 0
    for count in (1, 14, 1, 1, 40, 16, 3, 100):
        expected, before = sequence.bytes_to_reserve(count), pool.n_used_bytes
        sequence.reserve(n, count)
        assert pool.n_used_bytes - before == expected
        sequence.tokens += [0] * count
        n += count
        sequence.evict(n)
    other = sequence.fork()
    expected, before = other.bytes_to_reserve(1), pool.n_used_bytes
    other.reserve(n, 1)
    assert pool.n_used_bytes - before == expected > 0, "the begun page is shared, and copied"


@pytest.mark.parametrize("n_held", [0, 3])
def test_bytes_to_reserve_hold_recurrent_states_of_two_batches(n_held: int) -> None:
    pool = KVPool(KVLayout.of([ONE], "f32", [RecurrentSpec("state", (8,))]))
    sequence = KVSequence(pool, 64)
    if n_held:
        sequence.reserve(0, n_held)
        sequence.commit([0] * n_held)
        sequence.finish()
    expected, before = sequence.bytes_to_reserve(5), pool.n_used_bytes
    sequence.reserve(n_held, 3)
    sequence.advance(n_held + 3)
    sequence.reserve(n_held + 3, 2, n_behind=1)
    assert pool.n_used_bytes - before == expected


@pytest.mark.parametrize("n_bytes", [100, 4096, 1 << 25])
def test_pages_begin_at_cache_lines_and_leave_room_for_a_vector(n_bytes: int) -> None:
    pages, table = pool_module.Pages(n_bytes), np.zeros(2, np.int64)
    for i in range(2):
        pages.allocate(table, i)
    assert not (table % 64).any()
    assert abs(table[1] - table[0]) >= n_bytes + 64
    assert pages.n_bytes >= 2 * (n_bytes + 64)
    for i in range(2):
        pages.release(table, i)
