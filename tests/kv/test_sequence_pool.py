"""State machine of random leases."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llamacli import InvalidRequestError
from llamacli.kv import NO_LEASE, KVCache, KVLayout, KVPool, KVSpec, SequencePool
from suite import examples


class SequencePoolMachine(RuleBasedStateMachine):
    """Random leases, compared with a list of free sequences.

    `free` has the next lease last; `tokens` is the length of each sequence.
    """

    @initialize(n=st.integers(0, 5))
    def begin(self, n: int) -> None:
        self.cache = KVCache(KVPool(KVLayout.of([KVSpec(1, 2)], "f32")), 40, n)
        self.pool = SequencePool(self.cache)
        self.free = list(reversed(range(n)))
        self.tokens = dict.fromkeys(range(n), 0)

    @property
    def leased(self) -> set[int]:
        return set(self.tokens) - set(self.free)

    @rule()
    def acquire(self) -> None:
        assert self.pool.acquire() == (self.free.pop() if self.free else NO_LEASE)

    @rule(seq=st.integers(-1, 5), n=st.integers(1, 40))
    def use(self, seq: int, n: int) -> None:
        if seq in self.leased and self.tokens[seq] + n <= 40:
            sequence = self.cache.sequence(seq)
            sequence.reserve(self.tokens[seq], n)
            sequence.tokens += range(n)
            self.tokens[seq] += n

    @rule(seq=st.integers(-1, 5), action=st.sampled_from(["release", "evict", "release_all_but"]))
    def give_back(self, seq: int, action: str) -> None:
        allowed = seq in self.leased and (action != "release" or self.tokens[seq] == 0)
        try:
            getattr(self.pool, action)(seq)
        except InvalidRequestError:
            assert not allowed
            return
        assert allowed
        if action == "release_all_but":
            self.tokens = {other: n if other == seq else 0 for other, n in self.tokens.items()}
            self.free = [other for other in sorted(self.tokens, reverse=True) if other != seq]
        else:
            self.tokens[seq] = 0
            self.free.append(seq)

    @rule()
    def evict_all(self) -> None:
        self.pool.evict_all()
        self.free += sorted(self.leased)
        self.tokens = dict.fromkeys(self.tokens, 0)

    @invariant()
    def leases_match_and_free_sequences_are_empty(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.available == len(self.free)
        assert self.pool.leased == self.leased
        for seq, n in self.tokens.items():
            assert self.cache.pos_max(seq) == n - 1
            if seq in self.free:
                assert not self.cache.sequence(seq).tables[0].any()


SequencePoolMachine.TestCase.settings = examples(150, stateful_step_count=40)
TestSequencePoolMachine = SequencePoolMachine.TestCase


def test_sequences_are_created_when_first_used() -> None:
    cache = KVCache(KVPool(KVLayout.of([KVSpec(1, 2)], "f32")), 40, 10**5)
    assert (SequencePool(cache).available, cache.pos_max(10**5 - 1)) == (10**5, -1)
    assert not cache._sequences


def test_all_but_one_are_leased_again_the_lowest_first() -> None:
    pool = SequencePool(KVCache(KVPool(KVLayout.of([KVSpec(1, 2)], "f32")), 40, 4))
    leased = [pool.acquire() for _ in range(4)]
    pool.release_all_but(2)
    assert pool.leased == {2}
    assert [pool.acquire() for _ in range(4)] == [0, 1, 3, NO_LEASE]
    assert leased == [0, 1, 2, 3]


def test_one_token_is_not_empty() -> None:
    cache = KVCache(KVPool(KVLayout.of([KVSpec(1, 2)], "f32")), 40, 2)
    pool = SequencePool(cache)
    cache.sequence(pool.acquire()).reserve(0, 1)
    cache.sequence(0).tokens += [7]
    with pytest.raises(InvalidRequestError, match="sequence 0 still holds tokens"):
        pool.release(0)
    with pytest.raises(InvalidRequestError, match="must be empty"):
        SequencePool(cache)


@pytest.mark.parametrize("seq", [[], None, 1.0, True, "0"])
def test_sequence_numbers_that_are_not_integers_are_refused(seq: object) -> None:
    pool = SequencePool(KVCache(KVPool(KVLayout.of([KVSpec(1, 2)], "f32")), 40, 2))
    while pool.acquire() != NO_LEASE:
        pass
    for misuse in (pool.release, pool.evict, pool.release_all_but):
        with pytest.raises(InvalidRequestError, match="not leased"):
            misuse(seq)
    assert pool.leased == {0, 1}
