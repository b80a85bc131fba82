import gc
import itertools
from typing import ClassVar

import numpy as np
import pytest

from kv_helpers import ONE, InterruptAt, fill, new_sequence, random_cells
from llamacli import InvalidRequestError
from llamacli.kv import KV_TYPES, PAGE, KVLayout, KVPool, KVSequence, KVSpec, RecurrentSpec
from llamacli.kv import sequence as sequence_module
from llamacli.testing import formulas
from suite import STRIDE

NMSE_OF_ROUNDING = {"q4_0": 2e-2, "q4_1": 2e-2, "iq4_nl": 2e-2, "q5_0": 5e-3, "q5_1": 5e-3}
"""Upper bounds of the error that quantizing keys once more may add."""


@pytest.mark.parametrize(("n", "stale", "same"), [(8, None, True), (10, None, True), (11, 10, False), (20, 10, False)])
def test_stale_cells_after_a_cut(n: int, stale: int | None, same: bool) -> None:
    sequence, other = new_sequence([ONE], 64), new_sequence([ONE], 64)
    for one in (sequence, other):
        fill(one, 0, 20)
        one.set_contents(range(20), [0], None)
    sequence.set_contents(range(20), [0], 10)  # the cells from 10 on are those of other beginnings
    assert sequence.has_cells_of(other, n) == same
    sequence.truncate(n)
    assert sequence.first_stale_cell == stale


class TestFork:
    def test_fork_shares_pages_until_one_writes(self) -> None:
        parent = new_sequence([ONE, ONE], 64)
        k, v = fill(parent, 0, 40)
        child = parent.fork()
        pages = parent.pool.groups[0]
        assert pages.n_used == 3
        fill(child, 40, 1, seed=1)
        assert pages.n_used == 4, "copy-on-write of the page that is not full"
        fill(parent, 40, 8, seed=2)
        assert pages.n_used == 4
        for sequence, seed in ((child, 1), (parent, 2)):
            keys, values = sequence.read(1, 41)
            np.testing.assert_array_equal(keys[..., :40], k.transpose(1, 2, 0))
            np.testing.assert_array_equal(values[:, :40], v.transpose(1, 0, 2))
            np.testing.assert_array_equal(keys[..., 40], random_cells(8 if seed == 2 else 1, seed=seed)[0][0])

    def test_fork_outlives_its_parent(self) -> None:
        parent = new_sequence([ONE], 64)
        k, _ = fill(parent, 0, 20)
        child = parent.fork()
        parent.close()
        np.testing.assert_array_equal(child.read(0, 20)[0], k.transpose(1, 2, 0))
        child.close()
        assert child.pool.n_bytes == 0


def test_copied_cells_are_those_of_one_group() -> None:
    """Pages of another group have another shape."""
    layout = KVLayout.of([ONE, KVSpec(1, 3, window=20)], "f32")
    page, source = (np.arange(layout.groups[0].page_bytes, dtype=np.uint8) + 7 * i for i in range(2))
    expected = [array.view(np.float32).copy() for array in (page, source)]
    for x in expected:
        keys, values = x[: x.size // 2].reshape(2, 4, PAGE), x[x.size // 2 :].reshape(2, PAGE, 4)
        if x is not expected[1]:
            keys[..., 5:8] = expected[1][: x.size // 2].reshape(2, 4, PAGE)[..., 5:8]
            values[:, 5:8] = expected[1][x.size // 2 :].reshape(2, PAGE, 4)[:, 5:8]
    sequence_module.copy_cells(layout, 0, page.ctypes.data, source.ctypes.data, 5, 3, same_prefix=True)
    assert page.tobytes() == expected[0].tobytes()


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_copied_cells_read_the_same_after_the_same_or_another_prefix(kv_type: str) -> None:
    source = new_sequence([ONE], 100, kv_type)
    fill(source, 0, 60)
    source.tokens += range(60)
    for same, start in itertools.product((True, False), (0, 5, 16, 21)):
        target = KVSequence(source.pool, 100)
        fill(target, 0, start, seed=0 if same else 9)
        target.tokens += range(start) if same else [7] * start
        target.copy(source, start, 40)
        assert target.first_stale_cell == (None if same or not start else start)
        for mine, theirs in zip(target.read(0, 40, start), source.read(0, 40, start), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=0 if same else 0.5)
        whole = source.read(0, 40)
        np.testing.assert_array_equal(source.read(0, 40, start)[0], whole[0][..., start:])
        np.testing.assert_array_equal(source.read(0, 40, start)[1], whole[1][:, start:])


@pytest.mark.parametrize("start", [1, 3, 9])
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_copy_from_the_middle_of_a_page_keeps_the_values(kv_type: str, start: int) -> None:
    """Bit-equal after the same cells, else rounded once more."""
    spec = KVSpec(2, 32)
    pool = KVPool(KVLayout.of([spec], kv_type))
    source, same, other = (KVSequence(pool, 40) for _ in range(3))
    k, v = random_cells(40, spec)
    k += np.random.default_rng(1).normal(0, 30, (1, 2, 32)).astype(np.float32)
    for sequence, keys in ((source, k), (same, k[:start]), (other, -k[:start])):
        sequence.reserve(0, len(keys))
        sequence.write(0, 0, keys, v[: len(keys)])
        sequence.tokens = list(range(len(keys)))
    other.tokens = [7] * start
    expected = source.read(0, 40)
    before = other.read(0, start)
    for sequence in (same, other):
        sequence.copy(source, start, 40)
    for mine, theirs in zip(same.read(0, 40), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    keys, values = other.read(0, 40)
    np.testing.assert_array_equal(keys[..., :start], before[0])
    np.testing.assert_array_equal(values, expected[1])
    assert formulas.nmse(keys[..., start:], expected[0][..., start:]) < NMSE_OF_ROUNDING.get(kv_type, 1e-4)
    assert formulas.nmse(source.read(0, 40)[0], expected[0]) == 0


class TestWindows:
    SPECS: ClassVar = [ONE, KVSpec(2, 4, window=20), ONE]

    def test_evict_keeps_the_window_only(self) -> None:
        sequence = new_sequence(self.SPECS, 1000)
        whole, windowed = sequence.pool.groups
        for n in range(1, 200):
            sequence.reserve(n - 1, 1)
            sequence.evict(n)
            assert whole.n_used == -(-n // PAGE)
            assert windowed.n_used <= 20 // PAGE + 2
            first = max(0, n - 20 + 1)
            assert all(sequence.tables[1][first // PAGE : -(-n // PAGE)])

    def test_truncate_refuses_to_go_back_beyond_the_window(self) -> None:
        sequence = new_sequence(self.SPECS, 200)
        fill(sequence, 0, 100)
        sequence.evict(100)
        kept = sequence.tables[1].copy()
        with pytest.raises(InvalidRequestError, match="cannot truncate to 60 tokens: the sliding window"):
            sequence.truncate(60)
        np.testing.assert_array_equal(sequence.tables[1], kept)
        sequence.truncate(99)
        sequence.truncate(0)
        assert [pages.n_used for pages in sequence.pool.groups] == [0, 0]
        fill(sequence, 0, 100)

    def test_range_without_its_window_is_not_removed(self) -> None:
        sequence = new_sequence(self.SPECS, 200)
        fill(sequence, 0, 100)
        sequence.tokens += range(100)
        sequence.evict(100)  # the window has the cells from 80 on
        with pytest.raises(InvalidRequestError, match="cannot remove positions 90 to 98: the sliding window"):
            sequence.remove(90, 98, lambda _, keys: keys)
        assert sequence.tokens == [*range(100)]
        sequence.remove(98, 99, lambda _, keys: keys)
        assert sequence.tokens == [*range(98), 99]

    def test_copy_of_an_empty_range_changes_nothing(self) -> None:
        source = new_sequence(self.SPECS, 200)
        fill(source, 0, 100)
        source.tokens += range(100)
        source.evict(100)
        target = KVSequence(source.pool, 200)
        target.copy(source, 0, 0)
        assert (target.tokens, target.first_cells, target.first_stale_cell) == ([], [0, 0], None)

    def test_evict_since_keeps_what_truncate_to_the_batch_start_needs(self) -> None:
        sequence = new_sequence(self.SPECS, 400)
        k, _ = fill(sequence, 0, 50)
        sequence.evict(50)
        for start in range(50, 350, 50):
            sequence.reserve(start, 50)
            sequence.evict(start + 50, since=50)
        assert sequence.pool.groups[1].n_used <= 2 * (20 // PAGE + 2), "pages in between are released"
        sequence.truncate(50)
        np.testing.assert_array_equal(sequence.read(1, 50)[0][..., 31:], k.transpose(1, 2, 0)[..., 31:])


def test_kept_states_are_those_that_an_evaluation_leaves() -> None:
    layout = KVLayout.of([ONE], "f32", [RecurrentSpec("state", (2,))])
    sequence = KVSequence(KVPool(layout), 64)
    sequence.reserve(0, 20)
    sequence.commit(range(20))
    sequence.hold()
    sequence.reserve(20, 1)
    assert sequence.n_kept == 20
    sequence.reserve(20, 4, n_behind=2)  # which writes those before the last 2 in their place
    assert sequence.n_kept is None


@pytest.mark.deep
def test_close_can_be_interrupted_and_repeated() -> None:
    for n in itertools.count(1, STRIDE):
        sequence = new_sequence([ONE, KVSpec(2, 4, window=20)], 100)
        fill(sequence, 0, 90)
        pool = sequence.pool
        with InterruptAt(sequence_module.__file__, n) as interrupt:
            sequence.close()
        if n % 2:
            sequence.close()
            assert sequence.closed
        del sequence
        gc.collect()
        assert pool.n_bytes == 0
        if interrupt.n > 0:
            return
