"""KV caches used entry by entry: a state machine and examples."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llamacli import ClosedError, InvalidRequestError
from llamacli.kv import CacheFull, LayerKVCache, ModelKVCache, MultiSequenceKVCache, SlidingWindowKVCache
from suite import examples


def entry(layer: int, position: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full((2, 3), 100 * layer + position, np.float32), np.full((2, 3), -(100 * layer + position), np.float32)


class EntryCacheMachine(RuleBasedStateMachine):
    """`lengths` and `cached`: for each layer the expected length and cached positions."""

    LAYERS = 2

    @initialize(kind=st.sampled_from(["always", "disabled", "window"]), length=st.integers(1, 40))
    def begin(self, kind: str, length: int) -> None:
        self.kind, self.length = kind, length
        if kind == "window":
            self.cache: ModelKVCache = SlidingWindowKVCache(self.LAYERS, 2, 3, length)
        else:
            self.cache = ModelKVCache(self.LAYERS, 2, 3, length, kind)
        self.lengths = [0] * self.LAYERS
        self.cached: list[set[int]] = [set() for _ in range(self.LAYERS)]

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
                self.cached[layer].add(position)
            if self.kind == "window":
                self.cached[layer].discard(position - self.length)

    @rule(layer=st.integers(0, LAYERS - 1), n=st.integers(0, 50))
    def evict(self, layer: int, n: int) -> None:
        self.cache.layers[layer].evict(n)
        self.cached[layer] = {position for position in self.cached[layer] if position >= n}

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.lengths = [0] * self.LAYERS
        self.cached = [set() for _ in range(self.LAYERS)]

    @rule()
    def compact(self) -> None:
        self.cache.compact()
        if not any(self.cached):
            assert self.cache.n_bytes == 0

    @precondition(lambda self: hasattr(self, "cache"))
    @invariant()
    def entries_are_those_that_were_appended(self) -> None:
        for layer, cached in enumerate(self.cached):
            assert len(self.cache.layers[layer]) == self.lengths[layer]
            assert [found.position for found in self.cache.layers[layer].entries] == sorted(cached)
            for position in range(-1, self.lengths[layer] + 2):
                found = self.cache.get(layer, position)
                assert (found is not None) == (position in cached)
                if found is not None:
                    for mine, expected in zip((found.key, found.value), entry(layer, position), strict=True):
                        np.testing.assert_array_equal(mine, expected)


EntryCacheMachine.TestCase.settings = examples(60, stateful_step_count=40)
TestEntryCacheMachine = EntryCacheMachine.TestCase


def test_layer_cache_checks_shapes_and_restarts_after_clear() -> None:
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


def test_pages_without_entries_are_released() -> None:
    cache, layer = ModelKVCache(1, 2, 3, 40), LayerKVCache(40, 3, 2)
    for position in range(40):
        cache.append(0, *entry(0, position))
        layer.append(*entry(0, position))
    for one, compact in ((cache.layers[0], cache.compact), (layer, layer.compact)):
        assert one._sequence.pool.n_used_bytes == one._sequence.pool.layout.n_bytes(40)
        one.evict(20)
        compact()
        assert one.pages() == {1, 2}
        assert one._sequence.pool.n_used_bytes == one._sequence.pool.layout.n_bytes(32)
        assert one.get(20).position == 20
    assert LayerKVCache(1, 3, 2).get(-1) is None


def test_windows_are_positive_integers() -> None:
    SlidingWindowKVCache(1, 2, 3, 1).append(0, *entry(0, 0))
    for wrong in (0, 1.5, "2"):
        with pytest.raises(InvalidRequestError, match="window must be"):
            SlidingWindowKVCache(1, 2, 3, wrong)


def test_sequences_are_independent_and_limited() -> None:
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
