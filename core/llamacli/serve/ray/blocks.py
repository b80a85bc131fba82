"""Chain hashes of blocks of tokens, to compare prompts with caches."""

from __future__ import annotations

import bisect
import hashlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from llamacli.kv import KVSequence

BLOCK = 64
"""Tokens of a block."""
HASH_BYTES = 8
MAX_BLOCKS = 4096
"""Blocks that a replica reports, at most."""


def chain_hashes(tokens: Sequence[int], chain: Sequence[bytes] = (), salt: bytes = b"") -> tuple[bytes, ...]:
    """Hashes of the whole blocks of tokens.

    Each covers all tokens up to its block's end, so that equal hashes are equal prefixes. `chain` has those of the
    first blocks, where they are known; `salt` keeps apart what LoRA adapters compute differently.
    """
    hashes = list(chain[: len(tokens) // BLOCK])
    data = np.asarray(tokens[len(hashes) * BLOCK :], "<i8").tobytes()  # content keys are wider than ids
    size = 8 * BLOCK
    last = hashes[-1] if hashes else salt
    for start in range(0, len(data) - size + 1, size):
        last = hashlib.blake2b(last + data[start : start + size], digest_size=HASH_BYTES).digest()
        hashes.append(last)
    return tuple(hashes)


def n_matched(hashes: Sequence[bytes], held: frozenset[bytes]) -> int:
    """Number of first blocks that are held; a binary search."""
    return bisect.bisect_left(hashes, True, key=lambda block: block not in held)


class ChainCache:
    """Hashes of cached sequences, each block hashed once."""

    def __init__(self) -> None:
        self._chains: weakref.WeakKeyDictionary[KVSequence, tuple[bytes, ...]] = weakref.WeakKeyDictionary()

    def held(self, sequences: Iterable[KVSequence], salts: Mapping[str, bytes] = MappingProxyType({})) -> list[bytes]:
        """Hashes of the sequences' whole blocks, at most MAX_BLOCKS.

        Those of the first sequences come first, and of each the first blocks. `salts` are those of LoRA adapters, by
        `KVSequence.adapters`.
        """
        found: dict[bytes, None] = {}
        for sequence in sequences:
            known = self._chains.get(sequence, ())
            tokens = list(sequence.tokens)
            if len(tokens) // BLOCK > len(known):
                known = self._chains[sequence] = chain_hashes(tokens, known, salts.get(sequence.adapters, b""))
            found.update(dict.fromkeys(known[: len(tokens) // BLOCK]))
            if len(found) >= MAX_BLOCKS:
                break
        return list(found)[:MAX_BLOCKS]
