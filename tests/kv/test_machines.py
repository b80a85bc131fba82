"""Random operations on sequences, leases and caches, against dictionaries of lists that say what must be there."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llamacli import ClosedError, InvalidRequestError
from llamacli.kv import (
    NO_LEASE,
    CacheFull,
    CacheStrategy,
    KVCache,
    KVLayout,
    KVPool,
    LayerKVCache,
    ModelKVCache,
    MultiSequenceKVCache,
    SlidingWindowKVCache,
    Tenancy,
)
from llamacli.kv.layout import KVSpec

SEQ_LEN, N_SEQ, WINDOW = 70, 4, 20
STATES = [KVSpec(1, 2), KVSpec(2, 3, window=WINDOW), KVSpec(1, 2)]

seqs = st.integers(0, N_SEQ - 1)
positions = st.integers(-2, SEQ_LEN)


def shift_keys(layer: int, keys: np.ndarray, by: int) -> np.ndarray:
    """In the place of RoPE, what is as easily undone: a key of position p and mark m is m + p / 256."""
    return keys - by / 256


class SequenceMachine(RuleBasedStateMachine):
    """`marks`: of each sequence, a number for each of its cells, which its keys and values are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(KVLayout.of(STATES, "f32"))
        self.cache = KVCache(self.pool, SEQ_LEN, N_SEQ, shift_keys=shift_keys)
        self.marks: dict[int, list[int]] = {seq: [] for seq in range(N_SEQ)}
        self.next = 1

    def cells(self, seq: int, start: int) -> np.ndarray:
        """float32 [n]: what keys hold from a position on."""
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
        for layer, state in enumerate(STATES):
            k = np.broadcast_to(keys[:, None, None], (n, state.n_head_kv, state.head_dim))
            sequence.write(layer, start, k, -np.round(k))
        sequence.tokens += self.marks[seq][start:]
        sequence.evict(start + n)

    @rule(seq=seqs, p0=positions, p1=positions)
    def remove(self, seq: int, p0: int, p1: int) -> None:
        n = len(self.marks[seq])
        stop = n if p1 == -1 else p1
        try:
            self.cache.remove_range(seq, p0, p1)
        except InvalidRequestError:
            first_kept = max(0, n - WINDOW + 1)
            assert not 0 <= p0 <= stop <= n or max(0, n - (stop - p0) - WINDOW + 1) < first_kept
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
            assert not valid or max(0, stop - WINDOW + 1) < max(0, n - WINDOW + 1)
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
    def what_is_seen_is_what_was_written(self) -> None:
        for seq, marks in self.marks.items():
            sequence, n = self.cache.sequence(seq), len(marks)
            assert self.cache.pos_max(seq) == n - 1
            assert sequence.tokens == marks
            for layer, state in enumerate(STATES):
                first = 0 if state.window is None else max(0, n - state.window + 1)
                keys, values = sequence.read(layer, n)
                expected = self.cells(seq, 0)[first:]
                np.testing.assert_allclose(
                    keys[..., first:], np.broadcast_to(expected, keys[..., first:].shape), atol=1e-3
                )
                written = np.broadcast_to(-np.array(marks[first:], np.float32)[:, None], values[:, first:].shape)
                np.testing.assert_array_equal(values[:, first:], written)

    @invariant()
    def every_page_has_its_owners(self) -> None:
        for g, pages in enumerate(self.pool.groups):
            owned = [int(page) for seq in range(N_SEQ) for page in self.cache.sequence(seq).tables[g] if page]
            assert pages.n_used == len(set(owned))
            assert all(pages.owners(page) == owned.count(page) for page in owned)

    @invariant()
    def a_window_keeps_little(self) -> None:
        for seq, marks in self.marks.items():
            if marks:
                held = np.flatnonzero(self.cache.sequence(seq).tables[1])
                assert len(held) <= SEQ_LEN // 16 + 1
                assert set(range(max(0, len(marks) - WINDOW + 1) // 16, -(-len(marks) // 16))) <= set(held.tolist())

    def teardown(self) -> None:
        self.cache.close()
        assert [pages.n_used for pages in self.pool.groups] == [0, 0]
        assert self.pool.n_bytes == 0


class TenancyMachine(RuleBasedStateMachine):
    """`vacant`: the leases to come, the next one last. `tokens`: how many each sequence holds."""

    @initialize(n=st.integers(0, 5))
    def begin(self, n: int) -> None:
        self.cache = KVCache(KVPool(KVLayout.of([KVSpec(1, 2)], "f32")), 40, n)
        self.tenancy = Tenancy(self.cache)
        self.vacant = list(reversed(range(n)))
        self.tokens = dict.fromkeys(range(n), 0)

    @property
    def leased(self) -> set[int]:
        return set(self.tokens) - set(self.vacant)

    def refused(self, seq: int) -> bool:
        return seq not in self.leased

    @rule()
    def acquire(self) -> None:
        assert self.tenancy.acquire() == (self.vacant.pop() if self.vacant else NO_LEASE)

    @rule(seq=st.integers(-1, 5), n=st.integers(1, 40))
    def use(self, seq: int, n: int) -> None:
        if seq in self.leased and self.tokens[seq] + n <= 40:
            sequence = self.cache.sequence(seq)
            sequence.reserve(self.tokens[seq], n)
            sequence.tokens += range(n)
            self.tokens[seq] += n

    @rule(seq=st.integers(-1, 5), action=st.sampled_from(["release", "evict", "retain"]))
    def give_back(self, seq: int, action: str) -> None:
        allowed = seq in self.leased and (action != "release" or self.tokens[seq] == 0)
        try:
            getattr(self.tenancy, action)(seq)
        except InvalidRequestError:
            assert not allowed
            return
        assert allowed
        if action == "retain":
            self.tokens = {other: n if other == seq else 0 for other, n in self.tokens.items()}
            self.vacant = [other for other in sorted(self.tokens, reverse=True) if other != seq]
        else:
            self.tokens[seq] = 0
            self.vacant.append(seq)

    @rule()
    def evict_all(self) -> None:
        self.tenancy.evict_all()
        self.vacant += sorted(self.leased)
        self.tokens = dict.fromkeys(self.tokens, 0)

    @invariant()
    def books_are_right_and_what_is_vacant_is_clean(self) -> None:
        if not hasattr(self, "tenancy"):
            return
        assert self.tenancy.available == len(self.vacant)
        assert self.tenancy.leased == self.leased
        for seq, n in self.tokens.items():
            assert self.cache.pos_max(seq) == n - 1
            if seq in self.vacant:
                assert not self.cache.sequence(seq).tables[0].any()


def test_leases_cost_nothing_before_they_are_used() -> None:
    cache = KVCache(KVPool(KVLayout.of([KVSpec(1, 2)], "f32")), 40, 10**5)
    assert (Tenancy(cache).available, cache.pos_max(10**5 - 1)) == (10**5, -1)
    assert not cache._sequences


def entry(layer: int, position: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full((2, 3), 100 * layer + position, np.float32), np.full((2, 3), -(100 * layer + position), np.float32)


class CacheMachine(RuleBasedStateMachine):
    """`there`: of each cache and layer, its length and the positions that are cached."""

    LAYERS = 2

    @initialize(kind=st.sampled_from(["always", "disabled", "window"]), length=st.integers(1, 40))
    def begin(self, kind: str, length: int) -> None:
        self.kind, self.length = kind, length
        if kind == "window":
            self.cache: ModelKVCache = SlidingWindowKVCache(self.LAYERS, 2, 3, length)
        else:
            self.cache = ModelKVCache(self.LAYERS, 2, 3, length, kind)
        self.lengths = [0] * self.LAYERS
        self.there: list[set[int]] = [set() for _ in range(self.LAYERS)]

    @rule(layer=st.integers(0, LAYERS - 1), n=st.integers(1, 12))
    def append(self, layer: int, n: int) -> None:
        for _ in range(n):
            position = self.lengths[layer]
            try:
                self.cache.append(layer, *entry(layer, position))
            except CacheFull:
                assert self.kind != "window"
                assert position == self.length
                return
            self.lengths[layer] += 1
            if self.kind != "disabled":
                self.there[layer].add(position)
            if self.kind == "window":
                self.there[layer].discard(position - self.length)

    @rule(layer=st.integers(0, LAYERS - 1), n=st.integers(0, 50))
    def evict(self, layer: int, n: int) -> None:
        self.cache.layers[layer].evict(n)
        self.there[layer] = {position for position in self.there[layer] if position >= n}

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.lengths = [0] * self.LAYERS
        self.there = [set() for _ in range(self.LAYERS)]

    @rule()
    def compact(self) -> None:
        self.cache.compact()
        if not any(self.there):
            assert self.cache.n_bytes == 0

    @precondition(lambda self: hasattr(self, "cache"))
    @invariant()
    def entries_are_those_that_were_put(self) -> None:
        for layer, there in enumerate(self.there):
            assert len(self.cache.layers[layer]) == self.lengths[layer]
            assert [found.position for found in self.cache.layers[layer].entries] == sorted(there)
            for position in range(-1, self.lengths[layer] + 2):
                found = self.cache.get(layer, position)
                assert (found is not None) == (position in there)
                if found is not None:
                    for mine, expected in zip((found.key, found.value), entry(layer, position), strict=True):
                        np.testing.assert_array_equal(mine, expected)


SequenceMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TenancyMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestSequences, TestTenancy, TestCaches = SequenceMachine.TestCase, TenancyMachine.TestCase, CacheMachine.TestCase


def test_strategies_decide() -> None:
    cases = [(1, None), (257, None), (513, 2048 * 513 + 1), (513, 0)]
    decisions = {
        strategy.value: [strategy.should_cache(n, memory) for n, memory in cases]
        for strategy in CacheStrategy
    }  # fmt: skip
    assert decisions == {
        "always": [True] * 4,
        "long_sequence_only": [False, False, True, True],
        "adaptive": [False, True, True, False],
        "disabled": [False] * 4,
    }


def test_a_layer_alone() -> None:
    layer = LayerKVCache(2, 3, 2)
    assert layer.get(0) is None
    for position in range(2):
        layer.append(*entry(0, position))
    for wrong in (np.zeros((3, 2)), np.zeros(6)):
        with pytest.raises(InvalidRequestError, match="shape"):
            layer.append(wrong, wrong)
    layer.clear()
    layer.append(*entry(0, 7))
    assert [(found.position, found.key[0, 0]) for found in layer.entries] == [(0, 7)]


def test_sequences_are_apart_and_bounded() -> None:
    caches = MultiSequenceKVCache(2, 1, 2, 3, 32)
    one, other = caches.add(5), caches.add(9)
    one.append(0, *entry(0, 1))
    assert other.get(0, 0) is None
    assert (len(caches), 5 in caches, caches.get(7)) == (2, True, None)
    for id_, error in ((1, CacheFull), (5, InvalidRequestError)):
        with pytest.raises(error):
            caches.add(id_)
    caches.remove(5)
    with pytest.raises(ClosedError):
        one.append(0, *entry(0, 2))
    caches.add(1).append(0, *entry(0, 2))
    for wrong in (-1, None, 1.5, "2"):
        with pytest.raises(InvalidRequestError, match="max_sequences"):
            MultiSequenceKVCache(wrong, 1, 2, 3, 32)


@pytest.mark.parametrize("seq", [[], None, 1.0, True, "0"])
def test_leases_are_integers(seq: object) -> None:
    tenancy = Tenancy(KVCache(KVPool(KVLayout.of([KVSpec(1, 2)], "f32")), 40, 2))
    while tenancy.acquire() != NO_LEASE:
        pass
    for misuse in (tenancy.release, tenancy.evict, tenancy.retain):
        with pytest.raises(InvalidRequestError, match="not leased"):
            misuse(seq)
    assert tenancy.leased == {0, 1}
