"""Chain hashes of blocks of tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kv_helpers import ONE
from llamacli.kv import KVLayout, KVPool, KVSequence
from llamacli.kv.prefixes import n_common
from llamacli.serve.ray.blocks import BLOCK, MAX_BLOCKS, ChainCache, chain_hashes, n_matched

tokens = st.builds(
    lambda head, n, tail: [head] * n + tail, st.integers(0, 3), st.integers(0, 5 * BLOCK), st.lists(st.integers(0, 3))
)


def sequence(ids: list[int], adapters: str = "") -> KVSequence:
    made = KVSequence(KVPool(KVLayout.of([ONE], "f32")), 10**6, adapters=adapters)
    made.tokens += ids
    return made


@given(tokens, tokens)
def test_common_hashes_are_common_blocks(a: list[int], b: list[int]) -> None:
    x, y = chain_hashes(a), chain_hashes(b)
    assert len(x) == len(a) // BLOCK
    common = min(n_common(a, b) // BLOCK, len(x), len(y))
    assert n_matched(x, frozenset(y)) == common
    assert chain_hashes(a, x[: len(x) // 2]) == x, "the rest continues known hashes"


def test_cached_sequences_are_hashed_as_they_grow() -> None:
    one, chains = sequence(list(range(BLOCK + 5))), ChainCache()
    assert chains.held([one]) == list(chain_hashes(one.tokens))
    one.tokens += range(BLOCK)
    assert chains.held([one]) == list(chain_hashes(one.tokens))
    assert len(chains.held([one])) == 2
    one.tokens[BLOCK:] = []
    assert chains.held([one]) == list(chain_hashes(one.tokens)), "evicted blocks are not reported"
    assert chains.held([one, sequence(list(range(BLOCK)))]) == chains.held([one]), "shared blocks count once"


def test_reports_are_bounded() -> None:
    many = [sequence([i] * BLOCK * 10) for i in range(MAX_BLOCKS // 10 + 5)]
    held = ChainCache().held(many)
    assert len(held) == MAX_BLOCKS
    assert held[:10] == list(chain_hashes(many[0].tokens)), "the first sequences come first"


def test_adapters_have_hashes_of_their_own() -> None:
    ids = list(range(BLOCK))
    held = ChainCache().held([sequence(ids, "key")], {"key": b"salt"})
    assert held == list(chain_hashes(ids, salt=b"salt"))
    assert held != list(chain_hashes(ids))
